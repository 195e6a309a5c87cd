# speculators: epoch n - 1 (or a start) + tokens + hidden states + vocab -> epoch n.
# Invalidated by: the algorithm's or strategy's settings, the data, the epochs before.


TRAINING_NODES = PLAN.config["runtime"]["training_nodes"]


def training_inputs(wildcards):
    """Return what one epoch waits for; hidden states by their parts or batches."""
    node = PLAN.get("speculators", wildcards.key)
    if Path(node.manifest).exists():
        return []
    return waits_for("speculators")(wildcards) + PLAN.inputs(PLAN.training_states(node))


def training_gpus(wildcards):
    """Return how many GPUs a training takes on each node: one per process."""
    return PLAN.config["runtime"]["training_processes"] // TRAINING_NODES


def optional(node, flag, role):
    """Return a flag with the folder(s) of a role, or nothing when the part has none."""
    found = node.parents.get(role)
    if not found:
        return []
    return [flag, packed(found) if isinstance(found, list) else found.folder]


rule train_speculator:
    input:
        training_inputs,
    output:
        part("speculators"),
    log:
        log_of("speculators"),
    threads: ENGINE_THREADS
    resources:
        **needs(16000, 720, training_gpus, TRAINING_NODES),
    params:
        runtime=runtime_of("speculators"),
        model=of("speculators", lambda n: n.parents["model"].folder),
        tokens=of("speculators", lambda n: packed(n.parents["tokens"])),
        own=of("speculators", lambda n: optional(n, "--own-tokens", "own_tokens")),
        states=of("speculators", lambda n: packed(PLAN.training_states(n))),
        vocab=of("speculators", lambda n: n.parents["vocab"].folder),
        origin=of(
            "speculators",
            lambda n: optional(n, "--previous", "previous") + optional(n, "--start", "start"),
        ),
        settings=of("speculators", lambda n: n.settings_json),
        extra=of("speculators", lambda n: canonical_json(n.extra)),
        out=of("speculators", lambda n: n.folder),
    shell:
        "{RUN}/speculators.py --model {params.model:q} --tokens {params.tokens:q}"
        " {params.own:q} --states {params.states:q} --vocab {params.vocab:q} {params.origin:q}"
        " --settings {params.settings:q} --extra-inputs {params.extra:q} --runtime {params.runtime:q}"
        " --out {params.out:q} --log {log:q}"
