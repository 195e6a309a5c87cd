"""Speculator studies: from prompts to benchmark tables.

    snakemake                         the study of config/config.yaml
    snakemake -n                      what is missing, and why
    snakemake responses               everything up to the teachers' responses
    snakemake all --configfile F      another study

Every result that costs compute has a key (docs/architecture.md) and lives at
<store>/<stage>/<names>/<key>/; a rule runs when the manifest of its key is missing.
"""

import shlex
import sys
from pathlib import Path

from snakemake.utils import min_version

min_version("9.27")
sys.path.insert(0, str(Path(workflow.basedir)))

from scripts.lib.config import check
from scripts.lib.errors import UserError
from scripts.lib.identity import canonical_json, digest, pin_file
from scripts.lib.labels import study_labels
from scripts.lib.paths import pack
from scripts.lib.plan import Plan
from scripts.lib.site import gpu_memory, job_resources, read_site, shell_prefix, watchdog
from scripts.lib.slurm import growth
from scripts.lib.store import write_json

# A study file stands alone: laid over the demo it would inherit the demo's pools.
if not workflow.overwrite_configfiles:

    configfile: Path(workflow.basedir) / "config" / "config.yaml"


include: "rules/common.smk"
include: "rules/models.smk"
include: "rules/prompts.smk"
include: "rules/workloads.smk"
include: "rules/responses.smk"
include: "rules/tokens.smk"
include: "rules/hidden_states.smk"
include: "rules/vocab.smk"
include: "rules/speculators.smk"
include: "rules/benchmarks.smk"
include: "rules/tables.smk"
include: "rules/economics.smk"


localrules:
    all,
    models,
    prompts,
    responses,
    hidden_states,
    speculators,
    benchmarks,
    tables,


rule all:
    default_target: True
    input:
        "results/report.html",
        rules.make_tables.output,
        rules.make_economics.output,
        rules.link_current.output,


rule models:
    input:
        [n.manifest for n in PLAN.nodes("models")],


rule prompts:
    input:
        [n.manifest for n in PLAN.nodes("prompts") + PLAN.nodes("workloads")],


rule responses:
    input:
        [n.manifest for n in PLAN.nodes("responses")],


rule hidden_states:
    input:
        PLAN.inputs(PLAN.nodes("hidden_states")),


rule speculators:
    input:
        [n.manifest for n in PLAN.nodes("speculators")],


rule benchmarks:
    input:
        PLAN.inputs(PLAN.targets()),


rule tables:
    input:
        rules.make_tables.output,
        rules.make_answers.output,
        rules.make_economics.output,
