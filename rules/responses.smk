# responses: teacher + prompt shard -> the teacher's answers (vLLM offline).
# Invalidated by: the teacher's model or generation settings, the prompts, the seed.


rule generate_responses:
    input:
        waits_for("responses"),
    output:
        part("responses"),
    log:
        log_of("responses"),
    threads: ENGINE_THREADS
    resources:
        **needs(12000, 240, engine_gpus("responses")),
    params:
        runtime=runtime_of("responses"),
        model=of("responses", lambda n: n.parents["model"].folder),
        prompts=of("responses", lambda n: n.parents["prompts"].folder),
        settings=of("responses", lambda n: n.settings_json),
        out=of("responses", lambda n: n.folder),
    shell:
        "{RUN}/responses.py --model {params.model:q} --prompts {params.prompts:q}"
        " --settings {params.settings:q} --runtime {params.runtime:q} --max-lost-share {LOST}"
        " --max-refused-share {REFUSED} --out {params.out:q} --log {log:q}"
