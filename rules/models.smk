# models: model entry -> local model directory and model.json.
# Invalidated by: source, version or pin, dtype, chat template; dropped layers and their model.


rule prepare_model:
    input:
        waits_for("models"),
    output:
        part("models"),
    log:
        log_of("models"),
    threads: ENGINE_THREADS
    resources:
        **needs(8000, 60),
    params:
        settings=of("models", lambda n: n.settings_json),
        optional=of(
            "models",
            lambda n: [
                word
                for flag, key in (("--path", "path"), ("--chat-template", "chat_template"))
                if n.local[key]
                for word in (flag, n.local[key])
            ]
            + (["--base", n.parents["base"].folder] if n.parents else []),
        ),
        out=of("models", lambda n: n.folder),
    shell:
        "{RUN}/models.py --settings {params.settings:q} {params.optional:q}"
        " --out {params.out:q} --log {log:q}"
