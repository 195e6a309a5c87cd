# benchmarks: checkpoint + serving settings + workload -> acceptance and latency parts;
# a job starts one server and makes the missing ones of its checkpoint.
# Invalidated by: the checkpoint, the workload, serving settings; latency also by hardware.


def served(wildcards):
    """Return the speculators part that a job serves, or None for the bare verifier."""
    return parts_of("benchmarks", wildcards)[0].parents.get("speculator")


rule benchmark_checkpoint:
    input:
        batch_waits_for("benchmarks"),
    output:
        batch("benchmarks"),
    log:
        log_of("benchmarks"),
    threads: ENGINE_THREADS
    resources:
        **needs(12000, 240, engine_gpus("benchmarks")),
    params:
        runtime=runtime_of("benchmarks"),
        model=lambda wildcards, output: parts_of("benchmarks", wildcards)[0].parents["model"].folder,
        speculator=lambda wildcards, output: (
            ["--speculator", s.folder, "--algorithm", s.settings["algorithm"]]
            if (s := served(wildcards))
            else []
        ),
        parts=lambda wildcards, output: canonical_json(
            [
                {
                    "out": n.folder,
                    "settings": n.settings,
                    "workload": n.parents["workload"].folder,
                }
                for n in parts_of("benchmarks", wildcards)
            ]
        ),
    shell:
        "{RUN}/benchmarks.py --model {params.model:q} {params.speculator:q}"
        " --parts {params.parts:q} --runtime {params.runtime:q} --max-lost-share {LOST}"
        " --batch {output:q} --log {log:q}"
