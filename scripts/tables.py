#!/usr/bin/env python3
"""Last stage, tables: all measured parts of a study as CSV and parquet.

Reads the raw counters of every part that the plan lists and derives acceptance
lengths with bootstrap intervals, losslessness, latency with speedups, and training
curves. Rows are in the order of the plan. `--index` gets names, keys and folders.
"""

import sys
from collections import Counter
from operator import itemgetter
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
from scripts.lib import cli, results, statistics, store
from scripts.lib.errors import UserError
from scripts.lib.results import LABELS, SERVING
from scripts.lib.statistics import MACRO, POOLED

LATENCIES = ("ttft_ms", "itl_ms", "latency_ms")


def lossless_rows(group: list[dict], bare: dict[tuple, dict], seed: int) -> list[dict]:
    """Compare a checkpoint's greedy outputs with those of the bare verifier.

    Args:
        group: parts of one checkpoint.
        bare: (role, verifier, workload) -> part of the bare verifier.
        seed: the study's seed.
    """
    names = ("compared", "identical", "control_compared", "control_identical")
    rows, total = [], Counter(dict.fromkeys(names, 0))
    for part in group:
        entry, counts = part["entry"], dict.fromkeys(names, 0)
        baseline, control = (
            bare.get((role, entry["verifier"], entry["workload"]))
            for role in ("baseline", "control")
        )
        # Sampled text differs by chance, text of another length limit by its end.
        if baseline and entry["temperature"] == 0 and all(
            baseline["entry"][c] == entry[c] for c in ("temperature", "max_tokens")
        ):  # fmt: skip
            found = statistics.compare_outputs(part["outputs"], baseline["outputs"])
            counts |= zip(names, found, strict=False)
            if control and control["entry"]["key"] != baseline["entry"]["key"]:
                found = statistics.compare_outputs(control["outputs"], baseline["outputs"])
                counts |= zip(names[2:], found, strict=True)
        total.update(counts)
        own = {"workload": entry["workload"], "key": entry["key"], "vllm": part["vllm"]}
        rows.append(own | counts)
    rows.append({"workload": POOLED} | total)
    labels = {c: group[0]["entry"][c] for c in (*LABELS, *SERVING)} | {"seed": seed}
    for row in rows:
        for share, of in (("identical", "compared"), ("control_identical", "control_compared")):
            row[share + "_share"] = row[share] / row[of] if row[of] else None
    return [labels | row for row in rows]


def latency_rows(plan: dict) -> list[dict]:
    """Return one row per latency part, with speedups against the bare verifier."""
    rows = []
    for entry in plan["latency"]:
        manifest = statistics.open_part(entry, "benchmarks", "latency")
        found = statistics.read_json(entry, "latency.json", manifest)
        row = {c: entry.get(c) for c in (*LABELS, *SERVING, "workload", "hardware", "key")}
        try:
            counted = ("requests", "failed", "incomplete", "output_tokens_per_s")
            row |= {c: found[c] for c in counted}
            for name in LATENCIES:
                row[name] = found[name]["median"]
                row |= {f"{name}_{p}": found[name][p] for p in ("p95", "p99")}
        except (KeyError, TypeError) as error:
            raise UserError(f"{entry['folder']}/latency.json lacks {error}.") from error
        rows.append(row | {"vllm": statistics.vllm_version(manifest), "seed": plan["seed"]})
    where = itemgetter("verifier", "workload", "concurrency", "hardware")
    bare = {where(row): row for row in rows if row["epoch"] is None}
    for row in rows:
        base = bare.get(where(row))
        if row["epoch"] is not None and base:
            itl, rate = row["itl_ms"], base["output_tokens_per_s"]
            row["itl_speedup"] = base["itl_ms"] / itl if itl else None
            row["throughput_speedup"] = row["output_tokens_per_s"] / rate if rate else None
    return rows


def training_rows(plan: dict) -> list[dict]:
    """Return one row per trained epoch; `own_` is validation on the verifier's own responses."""
    rows, expected = [], "expected_acceptance_length"
    for entry in plan["training"]:
        manifest = statistics.open_part(entry, "speculators")
        found = statistics.read_json(entry, "training.json", manifest)
        settings = found.get("resolved_settings", {})
        row = {
            **{c: entry.get(c) for c in LABELS}, "key": entry["key"],
            "seed": settings.get("seed"), "schedule_epochs": settings.get("schedule_epochs"),
            "device": manifest["device"]["type"], "device_count": manifest["device"]["count"],
            "wall_seconds": manifest["wall_seconds"],
        }  # fmt: skip
        row |= {k: v for k, v in found.items() if k not in row and isinstance(v, (int, float))}
        lengths, accuracies = (found.get(n, {}) for n in (expected, "accuracy_by_position"))
        for split, metrics in found.get("validation", {}).items():
            loss, short, prefix = (
                ("validation_loss", "val_", "") if split == "validation"
                else (f"{split}_loss", f"{split}_", f"{split}_")
            )  # fmt: skip
            row |= {loss: metrics.get("loss"), f"{prefix}{expected}": lengths.get(split)}
            row |= {f"{short}acc_{i}": v for i, v in enumerate(accuracies.get(split, []), 1)}
        rows.append(row)
    return rows


def table_columns(plan: dict, training: list[dict]) -> dict[str, list[str]]:
    """Return the columns of every table; k and training.json decide how many there are."""
    k = max((e["k"] for e in plan["acceptance"]), default=0)
    tail = ["schedule_epochs", "max_tokens", "concurrency", "samples", "seed", "vllm", "key"]
    shares = [c + s for c in ("", "control_") for s in ("compared", "identical", "identical_share")]
    first = [
        *LABELS, "steps", "tokens", "supervised_tokens", "train_seconds", "train_loss",
        "validation_loss", "expected_acceptance_length", "lr_at_end", "schedule_epochs",
    ]  # fmt: skip
    last = ["device", "device_count", "wall_seconds", "seed", "key"]
    return {
        "acceptance": [
            *LABELS, "workload", "k", "temperature", "prompts", "drafts", "drafted", "accepted",
            "acceptance_length", "ci_low", "ci_high", "acceptance_rate",
            *(f"position_{i}" for i in range(1, k + 1)), "failed", "dropped_overlap", "flagged",
            *tail,
        ],
        "lossless": [
            *LABELS, "workload", "k", "temperature", *shares, *(c for c in tail if c != "samples"),
        ],
        "latency": [
            *LABELS, "workload", "concurrency", "requests", "failed", "incomplete",
            *(n + s for n in LATENCIES for s in ("", "_p95", "_p99")), "output_tokens_per_s",
            "itl_speedup", "throughput_speedup", "hardware", "k", "temperature", "max_tokens",
            "schedule_epochs", "seed", "vllm", "key",
        ],
        "training": first + sorted({c for r in training for c in r} - {*first, *last}) + last,
        "index": ["stage", "name", "key", "folder"],
    }  # fmt: skip


def _length_lines(rows: list[dict]) -> list[str]:
    workloads = list(dict.fromkeys(r["workload"] for r in rows))
    lines = ["epoch  " + "  ".join(f"{w:>6}" for w in workloads) + "  95 % interval of macro"]
    for epoch in dict.fromkeys(r["epoch"] for r in rows):
        cells = {r["workload"]: r for r in rows if r["epoch"] == epoch}
        line = f"{epoch:>5}  "
        for workload in workloads:
            row = cells.get(workload, {"acceptance_length": None, "flagged": False})
            value = row["acceptance_length"]
            text = ("-" if value is None else f"{value:.3f}") + "*" * row["flagged"]
            line += f"{text:>{max(6, len(workload))}}  "
        low, high = cells[MACRO]["ci_low"], cells[MACRO]["ci_high"]
        lines.append(line + ("-" if low is None else f"{low:.3f} to {high:.3f}"))
    return lines


def overview(made: dict[str, list[dict]], min_prompts: int) -> list[str]:
    """Return the tables' gist as lines for the terminal."""
    lines, group = [], itemgetter("verifier", "algorithm", "strategy")
    for name in dict.fromkeys(map(group, made["acceptance"])):
        rows = [r for r in made["acceptance"] if group(r) == name]
        lines.append(f"acceptance length, {' / '.join(name)}, k = {rows[0]['k']}:")
        lines += _length_lines(rows)
    if any(r["flagged"] for r in made["acceptance"]):
        lines.append(f"* fewer than {min_prompts} prompts")
    for row in made["latency"]:
        if row.get("itl_speedup") is not None:
            lines.append(
                f"latency, {row['workload']}, concurrency {row['concurrency']}, "
                f"{'/'.join(group(row))} epoch {row['epoch']}: {row['itl_ms']:.2f} ms per token, "
                f"{row['itl_speedup']:.2f} times as fast as without, throughput "
                f"{row['throughput_speedup'] or 0:.2f} times"
            )
    pooled = [r for r in made["lossless"] if r["workload"] == POOLED]
    for verifier in dict.fromkeys(r["verifier"] for r in pooled):
        own = [r for r in pooled if r["verifier"] == verifier]
        same, compared = (sum(r[c] for r in own) for c in ("identical", "compared"))
        if not compared:
            why = "this needs temperature 0 and the bare verifier's outputs"
            lines.append(f"losslessness, {verifier}: nothing compared ({why})")
            continue
        control = f"{own[0]['control_identical']} of {own[0]['control_compared']}"
        lines.append(
            f"losslessness, {verifier}: {same} of {compared} greedy outputs identical; control of "
            f"two batch sizes: {control if own[0]['control_compared'] else 'not measured'}"
        )
    return lines


def main(args) -> None:
    """Write all tables to `args.out` and the index to `args.index`."""
    plan = statistics.read_plan(args.plan)
    prompts, overlap = results.read_prompts(plan)
    parts = [results.read_requests(entry, prompts, overlap) for entry in plan["acceptance"]]
    bare = {
        (p["entry"]["role"], p["entry"]["verifier"], p["entry"]["workload"]): p
        for p in parts if p["entry"]["role"] != "checkpoint"
    }  # fmt: skip
    training, checkpoint = training_rows(plan), itemgetter(*LABELS[:1], *LABELS[2:])
    samples = {checkpoint(row): row.get("rows") for row in training}
    made: dict[str, list[dict]] = {"acceptance": [], "lossless": []}
    for group in results.checkpoints(parts):
        trained = samples.get(checkpoint(group[0]["entry"]))
        made["acceptance"] += results.acceptance_rows(group, plan, trained)
        made["lossless"] += lossless_rows(group, bare, plan["seed"])
    made |= {"latency": latency_rows(plan), "training": training, "index": plan["index"]}
    for name, columns in table_columns(plan, training).items():
        target = args.index if name == "index" else args.out / f"{name}.csv"
        results.write(made[name], columns, target, args.out / f"{name}.parquet")
    lines = plan.get("notices", []) + overview(made, plan["bench"]["min_prompts"])
    with store.replacing(args.out / "summary.txt") as temporary:
        temporary.write_text("\n".join(lines) + "\n")
    cli.log.info("tables: %d rows in %s", sum(map(len, made.values())), args.out)


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.add_argument("--plan", type=Path, required=True, help="parts of the study (JSON)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tables")
    parser.add_argument("--index", type=Path, default=Path("results/index.csv"),
                        help="file for names, keys and folders of all parts")  # fmt: skip
    cli.run(main, parser.parse_args())
