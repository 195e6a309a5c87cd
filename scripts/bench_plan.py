#!/usr/bin/env python3
"""Time the dry run of a large study: 5 verifiers, 3 algorithms, 6 strategies, 6 epochs,
9 workloads, 500,000 prompts in shards of 5,000.

Prints seconds at a quarter, half and all of the shards (goal: 30 s at all of them, and
no more than linear growth). Nothing is computed: the store is empty.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)
from scripts.lib.config import check
from scripts.lib.plan import Plan

GOAL_SECONDS = 30
SHARDS, SHARD_SIZE = (25, 50, 100), 5000


def study(folder: Path, shards: int) -> dict:
    """Return the study's configuration; its one pool has `shards` shards."""
    for name in ("pool", *(f"w{i}" for i in range(9))):
        # The plan reads sample counts, not the prompts: one row is enough.
        (folder / f"{name}.jsonl").write_text(json.dumps({"prompt": name}) + "\n")
    verifiers = [f"v{i}" for i in range(5)]
    names = [*verifiers, "other"]
    models = {m: {"source": "package", "package": m, "version": "1", "family": "f"} for m in names}
    models["other"]["family"] = "g"
    samples = {"pool": shards * SHARD_SIZE}
    base = {"pools": samples, "schedule_epochs": 6}
    start = {"strategy": "cross_family", "epoch": 6}
    common = {"draft_vocab_size": 32000, "optimizer": "muon", "lr": 0.001, "total_seq_len": 8192}
    workloads = {f"w{i}": {"source": "file", "path": str(folder / f"w{i}.jsonl")} for i in range(9)}
    return {
        "models": models, "teachers": {m: {"model": m} for m in names},
        "families": {"f": {"teacher": "v0", "cross_teacher": "other"}},
        "pools": {"pool": {
            "source": "file", "path": str(folder / "pool.jsonl"), "shard_size": SHARD_SIZE}},
        "workloads": workloads,
        "vocabulary": {"teacher": "same_family", "pools": {"pool": 50000}},
        "strategies": {
            "self": base | {"teacher": "self"},
            "same_family": base | {"teacher": "same_family"},
            "cross_family": base | {"teacher": "cross_family"},
            **{f"hybrid-{n}k": base | {"teacher": "self", "pools": {"pool": n * 1000},
                                       "start": start} for n in (5, 20, 50)},
        },
        "algorithms": {
            "eagle3": common | {"algorithm": "eagle3", "layers": [2, 18, 33], "ttt_steps": 5},
            "dflash": common | {"algorithm": "dflash", "layers": [2, 10, 18, 26, 33],
                                "mask_token_id": 5},
            "peagle": common | {"algorithm": "peagle", "layers": [2, 18, 33], "num_depths": 5,
                                "mask_token_id": 5},
        },
        "tokens": {"max_length": 8192},
        "study": {
            "name": "large", "verifiers": verifiers, "algorithms": ["eagle3", "dflash", "peagle"],
            "strategies": ["self", "same_family", "cross_family", "hybrid-5k", "hybrid-20k",
                           "hybrid-50k"],
            "epochs": 6, "workloads": list(workloads),
        },
    }  # fmt: skip


def dry_run(shards: int) -> tuple[float, int, float]:
    """Return (seconds, jobs) of the dry run on an empty store, and seconds for one job's.

    Every job of a cluster parses and plans anew before it begins.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = study(folder, shards)
        (folder / "config.json").write_text(json.dumps(config))
        first = Plan(check(config), folder).prompts("pool", 0)
        times, outputs = [], []
        for target in ("all", first.manifest):
            started = time.monotonic()
            result = subprocess.run(
                [sys.executable, "-m", "snakemake", "-n", "-s", str(ROOT / "Snakefile"),
                 "-d", name, target, "--cores", "2", "--configfile", str(folder / "config.json"),
                 "--quiet", "rules"],
                capture_output=True, text=True, timeout=600,
            )  # fmt: skip
            times.append(time.monotonic() - started)
            outputs.append(result.stdout)
            if result.returncode:
                raise SystemExit((result.stdout + result.stderr)[-3000:])
    total = [line for line in outputs[0].splitlines() if line.startswith("total")]
    return times[0], int(total[0].split()[1]), times[1]


def main() -> None:
    """Print one line per size and the growth."""
    found = {shards: dry_run(shards) for shards in SHARDS}
    for shards, (seconds, jobs, one) in found.items():
        print(f"dry run, {shards:3} shards: {jobs:6} jobs, {seconds:5.1f} s; one job {one:4.1f} s")
    first, last = (found[s] for s in (SHARDS[0], SHARDS[-1]))
    print(f"of the goal of {GOAL_SECONDS} s: {last[0] / GOAL_SECONDS:.2f}")
    print(f"seconds grow {last[0] / first[0]:.2f} times while jobs grow {last[1] / first[1]:.2f}")


if __name__ == "__main__":
    main()
