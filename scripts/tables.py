#!/usr/bin/env python3
"""Last stage, tables: all measured parts of a study as CSV and parquet.

Reads the raw counters of every part that the plan lists and derives acceptance
lengths with bootstrap intervals, losslessness, latency with speedups, and training
curves. Rows are in the order of the plan. `--index` gets names, keys and folders.
"""

import csv
import sys
from collections import Counter, defaultdict
from operator import itemgetter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path[0] = str(Path(__file__).resolve().parents[1])
from scripts.lib import acceptance, cli, statistics, store, tables
from scripts.lib.errors import UserError
from scripts.lib.statistics import MACRO, POOLED

LABELS = ("verifier", "model", "algorithm", "strategy", "epoch")
SERVING = ("k", "temperature", "concurrency", "max_tokens", "schedule_epochs")
LATENCIES = ("ttft_ms", "itl_ms", "latency_ms")
INTEGERS = {
    "epoch", "k", "prompts", "drafts", "drafted", "accepted", "failed", "dropped_overlap",
    "schedule_epochs", "max_tokens", "concurrency", "seed", "samples", "compared", "identical",
    "control_compared", "control_identical", "requests", "incomplete", "steps", "tokens",
    "supervised_tokens", "total_steps", "rows", "validation_rows", "trainable_parameters",
    "device_count",
}  # fmt: skip
TEXTS = {
    "verifier", "model", "algorithm", "strategy", "workload", "vllm", "key", "hardware", "device",
    "stage", "name", "folder",
}  # fmt: skip


def schema(columns: list[str]) -> pa.Schema:
    """Return the schema of a table; columns that are not listed above are numbers."""
    return pa.schema([
        (c, pa.int64() if c in INTEGERS else pa.string() if c in TEXTS
         else pa.bool_() if c == "flagged" else pa.float64())
        for c in columns
    ])  # fmt: skip


def write(rows: list[dict], columns: list[str], csv_path: Path, parquet_path: Path) -> None:
    """Write a table as CSV and as parquet, each either whole or not at all."""
    table = pa.Table.from_pylist(rows, schema=schema(columns))
    with store.replacing(csv_path) as temporary, open(temporary, "w", newline="") as stream:
        writer = csv.DictWriter(stream, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table.to_pylist())
    with store.replacing(parquet_path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def read_prompts(plan: dict) -> tuple[dict[str, list[str]], set[str]]:
    """Return workload -> prompt ids, and the ids of prompts that a pool also holds."""
    workloads = {
        w["workload"]: tables.read(w["folder"], "prompts.parquet", "workloads", tables.PROMPTS)
        for w in plan["workloads"]
    }
    pool = (
        row for p in plan["pools"]
        for row in tables.read(p["folder"], "prompts.parquet", "prompts", tables.PROMPTS)
    )  # fmt: skip
    everything = [row for rows in workloads.values() for row in rows]
    overlap = statistics.overlapping(everything, pool, plan["bench"]["overlap_ngram"])
    return {w: [r["prompt_id"] for r in rows] for w, rows in workloads.items()}, overlap


def read_requests(entry: dict, prompts: dict[str, list[str]], overlap: set[str]) -> dict:
    """Read a part of requests and reduce it to what the tables need.

    Returns:
        {"entry", "vllm", "values": counters of the prompts that count, "outputs":
        prompt id -> output, "failed", "dropped"}. Values, failed and dropped add up
        to the workload.

    Raises:
        UserError: when the requests are not the workload's or contradict themselves.
    """
    folder, manifest = entry["folder"], statistics.open_part(entry, "benchmarks", "acceptance")
    rows = tables.read(folder, "requests.parquet", "benchmarks", acceptance.REQUESTS)
    expected = prompts.get(entry["workload"])
    if expected is None:
        raise UserError(f"{folder}: the plan lists no workload {entry['workload']}.")
    if Counter(expected) != Counter(r["prompt_id"] for r in rows):
        raise UserError(
            f"{folder}: {len(rows)} requests are not the {len(expected)} prompts of workload "
            f"{entry['workload']}. Remove the folder; the next run makes it again."
        )
    kept = [r for r in rows if r["prompt_id"] not in overlap]
    good = [r for r in rows if r["status"] == "ok"]
    try:
        values = statistics.counters([r for r in kept if r["status"] == "ok"], entry["k"])
        # As bytes: the outputs of a large study would not fit into memory as lists.
        outputs = {r["prompt_id"]: np.array(r["output_ids"], np.int32).tobytes() for r in good}
    except (UserError, TypeError, ValueError) as error:
        raise UserError(
            f"{folder}/requests.parquet: {error}. Remove the folder; the next run makes it again."
        ) from error
    return {
        "entry": entry, "values": values, "outputs": outputs,
        "vllm": statistics.vllm_version(manifest),
        "failed": len(kept) - len(values), "dropped": len(rows) - len(kept),
    }  # fmt: skip


def checkpoints(parts: list[dict]) -> list[list[dict]]:
    """Group checkpoint parts by everything but the workload, in the order of the plan."""
    groups = defaultdict(list)
    for part in parts:
        if part["entry"]["role"] == "checkpoint":
            groups[tuple(part["entry"][c] for c in (*LABELS, *SERVING))].append(part)
    return list(groups.values())


def acceptance_rows(group: list[dict], plan: dict, samples: int | None) -> list[dict]:
    """Return the rows of one checkpoint: its workloads, macro mean, draft-weighted mean."""
    bench, entry = plan["bench"], group[0]["entry"]
    estimates = statistics.summarise(
        {(p["entry"]["key"], p["entry"]["workload"]): p["values"] for p in group},
        bench["bootstrap_samples"], plan["seed"],
    )  # fmt: skip
    common = {c: entry[c] for c in (*LABELS, *SERVING)} | {"seed": plan["seed"], "samples": samples}
    rows = []
    for part in group:
        key, workload = part["entry"]["key"], part["entry"]["workload"]
        rows.append(common | estimates[key, workload] | {
            "workload": workload, "prompts": len(part["values"]), "key": key,
            "failed": part["failed"], "dropped_overlap": part["dropped"], "vllm": part["vllm"],
            "flagged": len(part["values"]) < bench["min_prompts"]})  # fmt: skip
    counts = {c: sum(r[c] for r in rows) for c in ("prompts", "failed", "dropped_overlap")}
    counts["vllm"] = ", ".join(sorted({p["vllm"] for p in group if p["vllm"]})) or None
    # A macro mean is as weak as its weakest workload, a pooled one as its total.
    few = counts["prompts"] < bench["min_prompts"]
    weak = {MACRO: any(r["flagged"] for r in rows), POOLED: few}
    summary = [common | estimates[w] | counts | {"workload": w, "flagged": weak[w]} for w in weak]
    return rows + summary


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
        lengths = found.get("expected_acceptance_length", {})
        for split, metrics in found.get("validation", {}).items():
            loss, short, prefix = (
                ("validation_loss", "val_", "") if split == "validation"
                else (f"{split}_loss", f"{split}_", f"{split}_")
            )  # fmt: skip
            row |= {loss: metrics.get("loss"), f"{prefix}{expected}": lengths.get(split)}
            row |= {
                f"{short}acc_{int(name.removeprefix('full_acc_')) + 1}": value
                for name, value in metrics.items() if name.startswith("full_acc_")
            }  # fmt: skip
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
    prompts, overlap = read_prompts(plan)
    parts = [read_requests(entry, prompts, overlap) for entry in plan["acceptance"]]
    bare = {
        (p["entry"]["role"], p["entry"]["verifier"], p["entry"]["workload"]): p
        for p in parts if p["entry"]["role"] != "checkpoint"
    }  # fmt: skip
    training, checkpoint = training_rows(plan), itemgetter(*LABELS[:1], *LABELS[2:])
    samples = {checkpoint(row): row.get("rows") for row in training}
    made: dict[str, list[dict]] = {"acceptance": [], "lossless": []}
    for group in checkpoints(parts):
        trained = samples.get(checkpoint(group[0]["entry"]))
        made["acceptance"] += acceptance_rows(group, plan, trained)
        made["lossless"] += lossless_rows(group, bare, plan["seed"])
    made |= {"latency": latency_rows(plan), "training": training, "index": plan["index"]}
    for name, columns in table_columns(plan, training).items():
        target = args.index if name == "index" else args.out / f"{name}.csv"
        write(made[name], columns, target, args.out / f"{name}.parquet")
    text = "\n".join(overview(made, plan["bench"]["min_prompts"])) + "\n"
    with store.replacing(args.out / "summary.txt") as temporary:
        temporary.write_text(text)
    cli.log.info("tables: %d rows in %s", sum(map(len, made.values())), args.out)


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.add_argument("--plan", type=Path, required=True, help="parts of the study (JSON)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tables")
    parser.add_argument("--index", type=Path, default=Path("results/index.csv"),
                        help="file for names, keys and folders of all parts")  # fmt: skip
    cli.run(main, parser.parse_args())
