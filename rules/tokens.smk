# tokens: responses + verifier -> input ids and loss mask under the verifier's template.
# Invalidated by: the responses, the verifier's model, max_length.


rule tokenize_responses:
    input:
        waits_for("tokens"),
    output:
        part("tokens"),
    log:
        log_of("tokens"),
    resources:
        **needs(8000, 60),
    params:
        model=of("tokens", lambda n: n.parents["model"].folder),
        responses=of("tokens", lambda n: n.parents["responses"].folder),
        settings=of("tokens", lambda n: n.settings_json),
        out=of("tokens", lambda n: n.folder),
    shell:
        "{RUN}/tokens.py --model {params.model:q} --responses {params.responses:q}"
        " --settings {params.settings:q} --max-lost-share {LOST}"
        " --out {params.out:q} --log {log:q}"
