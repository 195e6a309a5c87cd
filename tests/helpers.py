"""What several test files share: small studies, finished parts, other processes."""

import copy
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

from scripts.lib import config as configuration
from scripts.lib import store, tables
from scripts.lib.config import check
from scripts.lib.identity import part_key
from scripts.lib.plan import Plan

# Reading the schema takes half the time of a check, and many tests check.
configuration.load_schema = functools.cache(configuration.load_schema)

ROOT = Path(__file__).resolve().parents[1]


def edited(config: dict, changes: dict) -> dict:
    """Return a copy of `config` with values set at dotted paths (None removes the key)."""
    result = copy.deepcopy(config)
    for path, value in changes.items():
        *parents, last = path.split(".")
        target = result
        for name in parents:
            target = target.setdefault(name, {})
        if value is None:
            del target[last]
        else:
            target[last] = value
    return result


def anchor_paths(config: dict, root: Path) -> None:
    """Make the prompt files of a configuration absolute, so that it runs in any folder."""
    for entry in (*config["pools"].values(), *config["workloads"].values()):
        path = entry["path"]
        several = isinstance(path, list)
        entry["path"] = [str(root / p) for p in path] if several else str(root / path)


def study(root: Path) -> dict:
    """Return a small study of two verifiers, two algorithms and four strategies.

    For the verifier `large` the strategies `own` and `family` are the same thing.
    """
    for name, count in (("p", 100), ("q", 30), ("w1", 20), ("w2", 20), ("w3", 20)):
        rows = [json.dumps({"prompt": f"{name} number {i}"}) for i in range(count)]
        (root / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    models = ("small", "large", "other")
    recipe = {
        "algorithm": "eagle3", "layers": [1, 2], "draft_vocab_size": 64, "ttt_steps": 3,
        "optimizer": "adamw", "lr": 0.001, "total_seq_len": 128,
    }  # fmt: skip
    return {
        "store": str(root / "store"),
        "models": {m: {"source": "package", "package": m, "version": "1.0"} for m in models},
        "teachers": {m: {"model": m, "temperature": 0.5} for m in models},
        "pools": {n: {"source": "file", "path": f"{n}.jsonl", "shard_size": 10} for n in "pq"},
        "workloads": {
            w: {"source": "file", "path": f"{w}.jsonl", "prompts": 20} for w in ("w1", "w2")
        },
        "vocabulary": {"teacher": "self", "pools": {"p": 20}},
        "tokens": {"max_length": 128},
        "strategies": {
            "own": {"teacher": "self", "pools": {"p": 25}},
            "family": {"teacher": "large", "pools": {"p": 25}},
            "cross": {"teacher": "other", "pools": {"p": 25}},
            "hybrid": {
                "teacher": "self", "pools": {"q": 10}, "start": {"strategy": "cross", "epoch": 2},
            },
        },
        "algorithms": {
            "a": recipe,
            "b": recipe | {"layers": [2, 3], "draft_vocab_size": 32},
        },
        "benchmark": {"latency": {"workloads": ["w1"], "concurrencies": [1], "epochs": [2]}},
        "study": {
            "verifiers": ["small", "large"], "algorithms": ["a", "b"], "epochs": 2,
            "strategies": ["own", "family", "cross", "hybrid"], "workloads": ["w1", "w2"],
        },
    }  # fmt: skip


def make_plan(root: Path, changes: dict | None = None) -> Plan:
    """Return the laid-out plan of `study(root)` with `changes` (dotted path -> value)."""
    plan = Plan(check(edited(study(root), changes or {})), root)
    plan.targets()
    return plan


def new_part(root: Path, stage: str, settings: dict, inputs: dict | None = None) -> store.Part:
    """Return a part below `root` whose folder is named after its key; inputs are keys."""
    inputs = inputs or {}
    folder = root / stage / "name" / part_key(stage, settings, inputs)
    return store.Part(folder, stage, settings, {}, inputs)


def finished_table(part: store.Part, name: str, rows: list[dict], schema, **facts) -> Path:
    """Finish `part` with one parquet file; return its folder."""
    with part:
        tables.write(part.folder / name, rows, schema, part.metadata())
        part.finish([name], facts={"rows": len(rows)} | facts)
    return part.folder


def run_python(code: str, *args, timeout: float = 20) -> subprocess.CompletedProcess:
    """Run Python code in a process of its own that can import the repository."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True,
        timeout=timeout, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
