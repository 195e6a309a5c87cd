# models: model entry -> local model directory and model.json.
# Invalidated by: source, version or pin, dtype, chat template.


rule prepare_model:
    output:
        part("models"),
    params:
        settings=of("models", lambda n: n.settings_json),
        path=of("models", lambda n: n.local["path"]),
        template=of("models", lambda n: n.local["chat_template"]),
        out=of("models", lambda n: n.folder),
    log:
        log_of("models"),
    threads: ENGINE_THREADS
    resources:
        mem_mb=lambda wildcards, attempt: 8000 * attempt,
        runtime=lambda wildcards, attempt: 60 * attempt,
    shell:
        "{PYTHON} {SCRIPTS}/models.py --settings {params.settings:q} --path {params.path:q}"
        " --chat-template {params.template:q} --out {params.out:q} --log {log:q}"
