# What all rules share: the plan, and how a script is called.

try:
    PLAN = Plan(check(dict(config)), Path("."))
    PLAN.targets()
except UserError as error:
    # Without this every user's mistake would come with a page of traceback.
    sys.exit(f"error: {error}")

if workflow.is_main_process:
    for notice in PLAN.notices:
        print(notice, file=sys.stderr)

STORE = PLAN.store
PYTHON = PLAN.config["python"] or sys.executable
SCRIPTS = Path(workflow.basedir) / "scripts"
RUN = f"{shlex.quote(PYTHON)} {shlex.quote(str(SCRIPTS))}"  # {RUN}/<script> in a shell command
RUNTIME = canonical_json(PLAN.config["runtime"])
LOST = PLAN.config["max_lost_share"]
REFUSED = PLAN.config["max_refused_share"]
# One engine at a time on a CPU: two slow each other down tenfold.
ENGINE_THREADS = max(1, workflow.cores) if PLAN.config["runtime"]["device"] == "cpu" else 8


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
    return pack([n.folder for n in nodes])
