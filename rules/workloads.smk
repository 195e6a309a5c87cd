# workloads: workload entry -> held-out evaluation prompts.
# Invalidated by: the source file's content, seed, number of prompts.


rule draw_workload:
    output:
        part("workloads"),
    log:
        log_of("workloads"),
    resources:
        **needs(4000, 30),
    params:
        source=of("workloads", lambda n: n.local["paths"]),
        settings=of("workloads", lambda n: n.settings_json),
        out=of("workloads", lambda n: n.folder),
    shell:
        "{RUN}/prompts.py --stage workloads --source {params.source:q}"
        " --settings {params.settings:q} --max-lost-share {LOST} --out {params.out:q} --log {log:q}"
