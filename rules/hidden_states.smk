# hidden_states: tokens + layer ids -> one part per layer; a job makes the missing ones.
# Invalidated by: the tokens, the verifier's model, dtype. Not by strategy or algorithm.


rule extract_hidden_states:
    input:
        batch_waits_for("hidden_states"),
    output:
        batch("hidden_states"),
    log:
        log_of("hidden_states"),
    threads: ENGINE_THREADS
    resources:
        **needs(12000, 240, engine_gpus("hidden_states")),
    params:
        runtime=runtime_of("hidden_states"),
        model=lambda wildcards, output: parts_of("hidden_states", wildcards)[0]
        .parents["model"]
        .folder,
        tokens=lambda wildcards, output: parts_of("hidden_states", wildcards)[0]
        .parents["tokens"]
        .folder,
        parts=lambda wildcards, output: canonical_json(
            [
                {"out": n.folder, "settings": n.settings}
                for n in parts_of("hidden_states", wildcards)
            ]
        ),
        check=lambda wildcards, output: PLAN.config["hidden_states"]["check_rows"],
    shell:
        "{RUN}/hidden_states.py --model {params.model:q} --tokens {params.tokens:q}"
        " --parts {params.parts:q} --runtime {params.runtime:q} --check-rows {params.check}"
        " --batch {output:q} --log {log:q}"
