#!/usr/bin/env python3
"""Time the scripts of the last stage on 2,000 benchmark parts: 4 verifiers, 3 algorithms,
3 strategies, 6 epochs, 9 workloads of 80 prompts, latency of the last epochs.

Makes a store of finished parts in real formats (numbers are invented) in a temporary
folder and prints seconds per script (goal: 30 s for all of them but the report).
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)
from scripts.lib import acceptance, store, tables
from scripts.lib.config import check
from scripts.lib.identity import CONTRACTS
from scripts.lib.labels import study_labels
from scripts.lib.nodes import Node
from scripts.lib.plan import Plan
from scripts.lib.prompts import prompt_id

GOAL_SECONDS = 30
PROMPTS, STEPS, TOKENS = 80, 120, 320  # per workload; per request
VERIFIERS, WORKLOADS = [f"v{i}" for i in range(4)], [f"w{i}" for i in range(9)]


def study(folder: Path) -> dict:
    """Return the study's configuration."""
    for name in ("pool", *WORKLOADS):
        (folder / f"{name}.jsonl").write_text(json.dumps({"prompt": name}) + "\n")
    base = {"pools": {"pool": 5000}, "schedule_epochs": 6}
    recipe = {
        "algorithm": "eagle3", "layers": [2, 18, 33], "ttt_steps": 5, "draft_vocab_size": 32000,
        "optimizer": "muon", "lr": 0.001, "total_seq_len": 8192,
    }  # fmt: skip
    names = [*VERIFIERS, "other"]
    return {
        "store": str(folder / "store"),
        "models": {m: {"source": "package", "package": m, "version": "1"} for m in names},
        "teachers": {m: {"model": m} for m in names},
        "pools": {"pool": {
            "source": "file", "path": str(folder / "pool.jsonl"), "shard_size": 5000}},
        "workloads": {
            w: {"source": "file", "path": str(folder / f"{w}.jsonl"), "prompts": PROMPTS}
            for w in WORKLOADS
        },
        "vocabulary": {"teacher": "self", "pools": {"pool": 5000}},
        "strategies": {
            "self": base | {"teacher": "self"}, "cross": base | {"teacher": "other"},
            "hybrid": base | {"teacher": "self", "start": {"strategy": "cross", "epoch": 6}},
        },
        "algorithms": {f"a{i}": recipe | {"lr": 0.001 * (i + 1)} for i in range(3)},
        "tokens": {"max_length": 8192},
        "benchmark": {"latency": {"workloads": ["w0"]}},
        "study": {
            "name": "large", "verifiers": VERIFIERS, "algorithms": ["a0", "a1", "a2"],
            "strategies": ["self", "cross", "hybrid"], "epochs": 6, "workloads": WORKLOADS,
        },
    }  # fmt: skip


def finish(node: Node, facts: dict, texts: dict[str, str] | None = None, *table) -> None:
    """Write a node's files and manifest: texts by name, and a table (rows, schema, name)."""
    folder, files = Path(node.folder), list(texts or {})
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (texts or {}).items():
        (folder / name).write_text(text)
    if table:
        rows, schema, name = table
        stamp = {"contract": str(CONTRACTS[node.stage]), "key": node.key}
        tables.write(folder / name, rows, schema, stamp)
        files.append(name)
        facts = facts | {"rows": len(rows)}
    store.write_manifest(folder, {
        "stage": node.stage, "contract": CONTRACTS[node.stage], "key": node.key,
        "settings": node.settings, "inputs": node.inputs, "counts": {}, "facts": facts,
        "files": {n: {"bytes": (folder / n).stat().st_size, "sha256": ""} for n in files},
        "device": {"type": "cpu", "count": 2}, "versions": {"vllm": "0"}, "host": "h",
        "wall_seconds": 60.0, "earlier_attempts": [], "start": store.now(), "end": store.now(),
    })  # fmt: skip


def prompt(text: str, rank: int) -> dict:
    """Return a row of a pool or workload."""
    messages = [{"role": "user", "content": text}]
    return {"prompt_id": prompt_id(messages), "rank": rank, "messages": messages, "source": "x"}


def request(row: dict, k: int, skill: float, generator: random.Random) -> dict:
    """Return a plausible request of some hundred tokens."""
    steps = [0] * (STEPS if k else 0)
    for i in range(len(steps)):
        while steps[i] < k and generator.random() < skill:
            steps[i] += 1
    return {
        "prompt_id": row["prompt_id"], "status": "ok", "finish_reason": "stop",
        "prompt_tokens": 50, "output_ids": list(range(TOKENS)), "drafts": len(steps),
        "drafted": k * len(steps), "accepted": sum(steps),
        "accepted_per_position": acceptance.per_position(steps, k), "seconds": 1.0,
    }  # fmt: skip


def training(epoch: int) -> dict[str, str]:
    """Return the texts of a speculators part."""
    found = {
        "epoch": epoch, "steps": 500, "tokens": 4_000_000, "rows": 4900, "train_seconds": 900.0,
        "train_loss": 2.0, "resolved_settings": {"seed": 0, "schedule_epochs": 6},
        "validation": {"validation": {"loss": 2.0}, "own": {"loss": 2.1}},
        "expected_acceptance_length": {"validation": 2.0, "own": 1.9},
        "accuracy_by_position": {"validation": [0.6, 0.4], "own": [0.5, 0.3]},
        "vocab_coverage": {"train": 0.99},
    }  # fmt: skip
    steps = "\n".join(["epoch,step,loss", *(f"{epoch},{s},{9 / s}" for s in range(1, 501))])
    return {"training.json": json.dumps(found), "steps.csv": steps}


def make_store(plan: Plan) -> None:
    """Finish every part of a plan with invented numbers."""
    generator = random.Random(0)
    words = lambda n: " ".join(f"word{generator.randrange(5000)}" for _ in range(n))  # noqa: E731
    prompts: dict[str, list[dict]] = {}
    for node in plan.all_nodes():
        if node.stage in ("prompts", "workloads"):
            count = 5000 if node.stage == "prompts" else PROMPTS
            prompts[node.key] = [prompt(words(60), i) for i in range(count)]
            finish(node, {}, None, prompts[node.key], tables.PROMPTS, "prompts.parquet")
        elif node.stage == "responses":
            rows = [
                {"prompt_id": f"{i:032x}", "rank": i, "messages": [], "reasoning": "",
                 "content": "x", "finish_reason": "stop", "prompt_tokens": 50,
                 "response_tokens": 300, "seed": 0, "status": "ok"}
                for i in range(5000)
            ]  # fmt: skip
            finish(node, {}, None, rows, tables.RESPONSES, "responses.parquet")
        elif node.stage == "speculators":
            finish(node, {}, training(node.settings["epoch"]))
        elif node.stage != "benchmarks":
            finish(node, {})
    for node in plan.nodes("benchmarks"):
        k = node.settings["k"]
        if node.settings["kind"] == "acceptance":
            asked = prompts[node.parents["workload"].key]
            made = [request(r, k, generator.uniform(0.3, 0.7), generator) for r in asked]
            finish(node, {}, None, made, acceptance.REQUESTS, "requests.parquet")
        else:
            numbers = dict.fromkeys(("median", "mean", "p95", "p99"), generator.uniform(5, 10))
            summary: dict = dict.fromkeys(("ttft_ms", "itl_ms", "latency_ms"), numbers)
            summary |= {"requests": 4, "failed": 0, "incomplete": 0, "output_tokens_per_s": 100.0}
            finish(node, {}, {"latency.json": json.dumps(summary)})


def main() -> None:
    """Print seconds per script."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = Plan(check(study(folder)), folder)
        plan.targets()
        make_store(plan)
        file, out = folder / "plan.json", str(folder / "tables")
        store.write_json(file, study_labels(plan))
        print(f"{len(plan.nodes('benchmarks'))} benchmark parts, {PROMPTS} prompts per workload")
        total = 0.0
        for script, options in (
            ("tables", ["--out", out, "--index", str(folder / "index.csv")]),
            ("answers", ["--out", out]),
            ("economics", ["--tables", out, "--out", out]),
            ("report", ["--tables", out, "--figures", str(folder / "figures"),
                        "--out", str(folder / "report.html")]),
        ):  # fmt: skip
            started = time.monotonic()
            command = [sys.executable, str(ROOT / f"scripts/{script}.py"), "--plan", str(file)]
            result = subprocess.run(
                [*command, *options], capture_output=True, text=True, timeout=1200
            )
            if result.returncode:
                raise SystemExit(f"{script}: {(result.stdout + result.stderr)[-3000:]}")
            seconds = time.monotonic() - started
            print(f"{script:10} {seconds:6.1f} s", flush=True)
            total += seconds if script != "report" else 0.0
        print(f"tables, answers, economics: {total:.1f} s, {total / GOAL_SECONDS:.2f} of the goal")


if __name__ == "__main__":
    main()
