# prompts: pool entry -> one shard of prompts in hash order.
# Invalidated by: the source file's content, seed, shard size.


rule draw_prompts:
    output:
        part("prompts"),
    log:
        log_of("prompts"),
    resources:
        **needs(4000, 30),
    params:
        source=of("prompts", lambda n: n.local["paths"]),
        settings=of("prompts", lambda n: n.settings_json),
        out=of("prompts", lambda n: n.folder),
    shell:
        "{RUN}/prompts.py --stage prompts --source {params.source:q}"
        " --settings {params.settings:q} --max-lost-share {LOST} --out {params.out:q} --log {log:q}"
