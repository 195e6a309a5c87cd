# What all rules share: the plan, and how a script is called.

# The profiles for Slurm name the kind of nodes in this default resource.
_node_type = (workflow.resource_settings.default_resources or {}).get("node_type")
ON_SLURM = _node_type is not None

try:
    PLAN = Plan(check(dict(config)), Path("."))
    PLAN.targets()
    SITE = read_site(
        Path(PLAN.config["site"] or Path(workflow.basedir) / "config" / "site.yaml"),
        _node_type.raw if ON_SLURM and _node_type.raw != "default" else "",
    )
except UserError as error:
    # Without this every user's mistake would come with a page of traceback.
    sys.exit(f"error: {error}")


onstart:
    if ON_SLURM:
        watchdog(SITE, Path.cwd()).start()


if workflow.is_main_process:
    for notice in PLAN.notices:
        print(notice, file=sys.stderr)

# Snakemake formats the prefix like a command.
shell.prefix("set -euo pipefail; " + shell_prefix(SITE).replace("{", "{{").replace("}", "}}"))

STORE = PLAN.store
PYTHON = PLAN.config["python"] or sys.executable
SCRIPTS = Path(workflow.basedir) / "scripts"
RUN = f"{shlex.quote(PYTHON)} {shlex.quote(str(SCRIPTS))}"  # {RUN}/<script> in a shell command
LOST = PLAN.config["max_lost_share"]
REFUSED = PLAN.config["max_refused_share"]
ON_GPU = PLAN.config["runtime"]["device"] == "cuda"
if ON_GPU:
    ENGINE_THREADS = 8
elif ON_SLURM:
    ENGINE_THREADS = PLAN.config["runtime"]["threads"]
else:
    # One engine at a time on a CPU: two slow each other down tenfold.
    ENGINE_THREADS = max(1, workflow.cores)


wildcard_constraints:
    key="[0-9a-f]{16}",
    anchor="[0-9a-f]{16}",
    batch="[0-9a-f]{16}-[0-9]+",
    name="[^/]+(/[^/]+)*",


def part(stage):
    """Return the output pattern of a stage that makes one part per job."""
    return f"{STORE}/{stage}/{{name}}/{{key}}/manifest.json"


def batch(stage):
    """Return the output pattern of a stage that makes several parts per job."""
    return f"{STORE}/{stage}/{{name}}/{{anchor}}/batch-{{batch}}/manifest.json"


def log_of(stage):
    """Return the log pattern of a stage."""
    last = "{anchor}-{batch}" if stage in ("hidden_states", "benchmarks") else "{key}"
    return f"results/logs/{stage}/{{name}}/{last}.log"


def waits_for(stage):
    """Return an input function: the manifests of a part's inputs.

    A finished part waits for nothing. Snakemake compares times of inputs and outputs
    whatever the rerun triggers say, and an input that was removed and made again is
    newer than what was rightly made from it before.
    """

    def manifests(wildcards):
        node = PLAN.get(stage, wildcards.key)
        return (
            [] if Path(node.manifest).exists() else sorted({n.manifest for n in node.all_parents()})
        )

    return manifests


def of(stage, value):
    """Return a params function that takes `value` from the part of the job.

    It takes `output` so that Snakemake does not track it: what counts is in the key.
    """
    return lambda wildcards, output: value(PLAN.get(stage, wildcards.key))


def parts_of(stage, wildcards):
    """Return all parts that a batch job has to care for."""
    return PLAN.batch_parts(stage, f"{STORE}/{stage}/{wildcards.name}/{wildcards.anchor}")


def batch_waits_for(stage):
    """Return an input function: the manifests of the inputs of all parts of a batch job."""
    return lambda wildcards: sorted(
        {n.manifest for p in parts_of(stage, wildcards) for n in p.all_parents()}
    )


def packed(nodes):
    """Return the folders of many parts as one command line value."""
    return pack(tuple(n.folder for n in nodes))


def engine_model(stage, wildcards):
    """Return the models part that a job of a stage loads into an engine."""
    parts = (
        [PLAN.get(stage, wildcards.key)]
        if hasattr(wildcards, "key")
        else parts_of(stage, wildcards)
    )
    return parts[0].parents["model"]


def runtime_of(stage):
    """Return a params function: engine settings of a job, with the GPUs it spreads over."""
    return lambda wildcards, output: canonical_json(PLAN.runtime(engine_model(stage, wildcards)))


def grown(wildcards, attempt, what):
    """Return by what the memory or time of an attempt is multiplied (`slurm.growth`)."""
    if not ON_SLURM or not workflow.is_main_process:
        # A job asks nobody: Snakemake caps its resources at what it was given.
        return attempt
    return growth(getattr(wildcards, "key", getattr(wildcards, "batch", "")), attempt)[what]


def needs(mem_mb, minutes, gpus=None, nodes=1):
    """Return the resources of a step: what it needs anywhere, and the site's settings.

    `gpus`, the GPUs on each node, is a function of wildcards; a step without it never runs
    on a GPU. Memory and time grow with an attempt if the one before lacked them.
    """
    found = job_resources(SITE, 0, nodes)
    memory = lambda wildcards, attempt: mem_mb * grown(wildcards, attempt, "memory")
    if gpus and ON_GPU:
        found = {
            name: (lambda wildcards, name=name: job_resources(SITE, gpus(wildcards), nodes)[name])
            for name in job_resources(SITE, 1, nodes)
        }
        memory = lambda wildcards, attempt: gpu_memory(
            SITE, mem_mb, gpus(wildcards), grown(wildcards, attempt, "memory")
        )
    return found | {
        "mem_mb": memory,
        "runtime": lambda wildcards, attempt: minutes * grown(wildcards, attempt, "time"),
    }


def engine_gpus(stage):
    """Return a function of wildcards: how many GPUs the engine of a job takes."""
    return lambda wildcards: PLAN.tensor_parallel(engine_model(stage, wildcards))
