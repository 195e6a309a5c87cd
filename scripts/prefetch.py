#!/usr/bin/env python3
"""List what a study needs from outside: models, prompts; what is missing, how large, where.

For the machine with a network, before jobs run where there is none. `--fetch` copies
what is missing with Snakemake (the stages models, prompts and workloads, on this machine).
"""

import fnmatch
import shutil
import subprocess
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
import yaml

from scripts import models
from scripts.lib import cli
from scripts.lib.config import check
from scripts.lib.errors import UserError
from scripts.lib.nodes import Node
from scripts.lib.plan import Plan

ROOT = Path(__file__).resolve().parents[1]
DEFAULT = ROOT / "config" / "config.yaml"


def hub_size(repo: str, revision: str) -> int:
    """Return the bytes that `models.download` would copy.

    Raises:
        UserError: when the hub does not say.
    """
    from huggingface_hub import HfApi

    try:
        files = list(HfApi().list_repo_tree(repo, revision=revision))
    except Exception as error:  # the hub's and the network library's own kinds are many
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"the hub does not list {repo} at {revision[:12]} ({type(error).__name__}: {reason}). "
            "Check `repo`, `revision`, HF_TOKEN and the network."
        ) from error
    return sum(
        getattr(f, "size", 0) for f in files
        if any(fnmatch.fnmatch(f.path, pattern) for pattern in models.HUB_FILES)
    )  # fmt: skip


def size_of(node: Node) -> int | None:
    """Return about how many bytes making a part adds to the store; None when unknown."""
    settings = node.settings
    if node.stage != "models":
        return sum(Path(p).stat().st_size for p in node.local["paths"])
    if settings["source"] == "hub":
        return hub_size(settings["repo"], settings["revision"])
    return 0 if settings["source"] == "local" else None


def rows(plan: Plan) -> list[tuple[str, str, str, int | None, str]]:
    """Return (stage, name, there or missing, bytes to come, folder) of all that is needed."""
    result = []
    for node in plan.all_nodes():
        if node.stage in ("models", "prompts", "workloads"):
            there = Path(node.manifest).exists()
            size = 0 if there else size_of(node)
            result.append(
                (node.stage, node.name, "there" if there else "missing", size, node.folder)
            )
    return result


def main(args) -> None:
    """Print the table, check the disk, and fetch if asked to.

    Raises:
        UserError: when the store's disk is too small.
    """
    plan = Plan(check(yaml.safe_load(args.configfile.read_text()) | dict(args.config)))
    found = rows(plan)
    for stage, name, state, size, folder in found:
        shown = "unknown" if size is None else f"{size / 1e9:.2f} GB" if size else ""
        print(f"{stage:10} {state:8} {shown:>10}  {name}  {folder}", flush=True)
    missing = [r for r in found if r[2] == "missing"]
    total = sum(size or 0 for *_, size, _ in missing)
    disk = next(p for p in Path(plan.store).absolute().parents if p.exists())
    free = shutil.disk_usage(disk).free
    print(f"missing: {len(missing)}, at least {total / 1e9:.2f} GB; free: {free / 1e9:.1f} GB")
    if total > free:
        raise UserError(
            f"{plan.store} has {free / 1e9:.1f} GB left and {total / 1e9:.1f} GB are missing. Free "
            "space or move `store`."
        )
    if args.fetch and missing:
        settings = [f"{key}={value}" for key, value in args.config]
        command = [
            sys.executable, "-m", "snakemake", "models", "prompts", "-s", str(ROOT / "Snakefile"),
            "--configfile", str(args.configfile), *(["--config", *settings] if settings else []),
        ]  # fmt: skip
        if subprocess.run(command).returncode:
            raise UserError("not everything could be fetched; the messages above say why.")


if __name__ == "__main__":
    parser = cli.study_parser(__doc__, DEFAULT)
    parser.add_argument("--fetch", action="store_true", help="copy what is missing")
    cli.run(main, parser.parse_args())
