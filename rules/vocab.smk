# vocab: the named token shards of a verifier -> its draft vocabulary.
# Invalidated by: those tokens, the sample counts, the size. Not by the strategies.


rule build_vocab:
    input:
        waits_for("vocab"),
    output:
        part("vocab"),
    log:
        log_of("vocab"),
    resources:
        **needs(8000, 60),
    params:
        model=of("vocab", lambda n: n.parents["model"].folder),
        tokens=of("vocab", lambda n: packed(n.parents["tokens"])),
        settings=of("vocab", lambda n: n.settings_json),
        out=of("vocab", lambda n: n.folder),
    shell:
        "{RUN}/vocab.py --model {params.model:q} --tokens {params.tokens:q}"
        " --settings {params.settings:q} --out {params.out:q} --log {log:q}"
