"""The site: what a cluster wants to be told with a job. Pure and light, in no key."""

from pathlib import Path
from typing import Any

import yaml

from scripts.lib.config import validated
from scripts.lib.errors import UserError
from scripts.lib.slurm import Watchdog

SCHEMA_FILE = Path(__file__).resolve().parents[2] / "config" / "site.schema.yaml"


def read_site(path: Path, node_type: str = "") -> dict:
    """Read a site file and choose its node type.

    Args:
        path: YAML file.
        node_type: an entry of `node_types`; empty: the default one.

    Returns:
        The file's settings with defaults, and `node`: the chosen entry.

    Raises:
        UserError: naming the file, the key and the mend.
    """
    try:
        settings = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"the site file {path} cannot be read ({error}). See `site`.") from error
    site = validated(settings, yaml.safe_load(SCHEMA_FILE.read_text()), str(path))
    chosen = node_type or site["default_node_type"]
    if chosen not in site["node_types"]:
        raise UserError(
            f"{path} has no node type {chosen!r}. Known: {', '.join(sorted(site['node_types']))}."
        )
    return site | {"node": site["node_types"][chosen]}


def job_resources(site: dict, gpus: int = 0, nodes: int = 1) -> dict[str, Any]:
    """Return the resources by which Snakemake's Slurm executor submits a step.

    Args:
        site: result of `read_site`.
        gpus: GPUs on each node.
        nodes: nodes. With more than one the step calls `srun` itself (`lib/launch.py`).

    Raises:
        UserError: when a node has not that many GPUs.
    """
    found: dict[str, Any] = {"nodes": nodes}
    if nodes > 1:
        # The executor then runs the step on the first node, outside of any srun.
        found |= {"mpi": "srun", "tasks": nodes}
    named = {"slurm_account": site["account"], "qos": site["qos"], "slurm_extra": site["extra"]}
    if gpus:
        node = site["node"]
        if gpus > node["gpus"]:
            raise UserError(
                f"a step needs {gpus} GPUs on a node, but nodes have {node['gpus']}. Lower "
                "runtime.tensor_parallel or runtime.training_processes, or raise training_nodes."
            )
        kind = f"gpu:{node['gpu']}" if node["gpu"] else "gpu"
        found |= {
            # Per node, unlike --gpus, which Slurm may spread over several.
            "gres": f"{kind}:{gpus}", "cpus_per_task": gpus * node["cpus_per_gpu"],
            "tasks_per_gpu": 0,
        }  # fmt: skip
        named |= {"slurm_partition": node["partition"], "constraint": node["constraint"]}
    else:
        named["slurm_partition"] = site["cpu_partition"]
    return found | {name: value for name, value in named.items() if value}


def gpu_memory(site: dict, mem_mb: int, gpus: int, growth: int) -> int:
    """Return the memory (MB) that a step with GPUs asks for on each node.

    Args:
        site: result of `read_site`.
        mem_mb: what the step needs at least.
        gpus: GPUs on the node, each with its share of the node's memory.
        growth: 1, or more after an attempt that ran out of memory.
    """
    share = 1000 * site["node"]["memory_gb_per_gpu"]
    return max(mem_mb, min(share * gpus * growth, share * site["node"]["gpus"]))


def watchdog(site: dict, folder: Path) -> Watchdog:
    """Return the watchdog of a run with the site's limits, not yet started.

    Args:
        site: result of `read_site`.
        folder: working directory of the run.
    """
    limits = site["waiting"]
    return Watchdog(
        folder, 60 * limits["hopeless_minutes"], 3600 * limits["pending_hours"],
        60 * limits["lost_minutes"],
    )  # fmt: skip


def shell_prefix(site: dict) -> str:
    """Return shell text that gives a step's engines their cache folders.

    Variables in the folders ($USER, $TMPDIR) are the job's own.
    """
    below = {
        "compile": {
            "VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton",
            "TORCHINDUCTOR_CACHE_DIR": "inductor",
        },
        "hub": {"HF_HOME": ""},
    }  # fmt: skip
    lines = []
    for kind, names in below.items():
        folder = site["caches"][kind].rstrip("/")
        for name, last in names.items():
            if folder:
                path = f"{folder}/{last}".rstrip("/")
                lines.append(f'export {name}="{path}"; mkdir -p "{path}"; ')
    return "".join(lines)
