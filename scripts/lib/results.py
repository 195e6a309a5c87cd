"""Shared by tables.py, answers.py and report.py: reading measured parts, writing tables.

Also the rows of one checkpoint in acceptance.csv, and the sentences that sum up the
answer tables.
"""

import csv
from collections import Counter, defaultdict
from operator import itemgetter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from scripts.lib import acceptance, statistics, store, tables
from scripts.lib.errors import UserError
from scripts.lib.statistics import MACRO, POOLED

LABELS = ("verifier", "model", "algorithm", "strategy", "epoch")
SERVING = ("k", "temperature", "concurrency", "max_tokens", "schedule_epochs")
INTEGERS = {
    "epoch", "k", "prompts", "drafts", "drafted", "accepted", "failed", "dropped_overlap",
    "schedule_epochs", "max_tokens", "concurrency", "seed", "samples", "compared", "identical",
    "control_compared", "control_identical", "requests", "incomplete", "steps", "tokens",
    "supervised_tokens", "total_steps", "rows", "validation_rows", "trainable_parameters",
    "device_count", "own_samples", "self_epoch", "training_tokens", "teacher_verifiers",
    "parts", "unknown_parts", "input_tokens", "output_tokens", "bytes", "verifiers", "fitted_k",
    "gpus_before", "gpus_after", "gpus_saved", "checkpoint_bytes", "kv_bytes_per_token",
    "training_unknown_parts",
}  # fmt: skip
TEXTS = {
    "verifier", "model", "algorithm", "strategy", "workload", "vllm", "key", "hardware", "device",
    "stage", "name", "folder", "relation", "teachers", "start", "teacher_device", "reason",
    "group", "teacher", "pool", "currency", "note", "model_source", "verdict",
}  # fmt: skip
BOOLEANS = {"flagged", "suggested"}


def schema(columns: list[str]) -> pa.Schema:
    """Return the schema of a table; columns that are not listed above are numbers."""
    return pa.schema([
        (c, pa.int64() if c in INTEGERS else pa.string() if c in TEXTS
         else pa.bool_() if c in BOOLEANS else pa.float64())
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


def _outputs(table: pa.Table) -> dict[str, bytes]:
    """Return prompt id -> token ids of the answered requests.

    As bytes: as lists, the outputs of a large study would not fit into memory.

    Raises:
        UserError: when an answered request has no output; its text has no file name.
    """
    good = table.filter(pc.equal(table["status"], "ok")).combine_chunks()
    lists = good["output_ids"].combine_chunks()
    if lists.null_count:
        raise UserError(f"{lists.null_count} answered requests have no output_ids")
    values, ends = lists.flatten().to_numpy(), np.cumsum(pc.list_value_length(lists))
    starts = np.concatenate([[0], ends[:-1]]).astype(int) if len(ends) else []
    ids = good["prompt_id"].to_pylist()
    return {i: values[a:b].tobytes() for i, a, b in zip(ids, starts, ends, strict=True)}


def read_requests(entry: dict, prompts: dict[str, list[str]], overlap: set[str]) -> dict:
    """Read a part of requests and reduce it to what the tables need.

    Returns:
        {"entry", "vllm", "values": counters of the prompts that count, "prompts": their
        ids, "outputs": prompt id -> output, "failed", "dropped"}. Values, failed and
        dropped add up to the workload.

    Raises:
        UserError: when the requests are not the workload's or contradict themselves.
    """
    folder, manifest = entry["folder"], statistics.open_part(entry, "benchmarks", "acceptance")
    table = tables.read_table(folder, "requests.parquet", "benchmarks", acceptance.REQUESTS)
    rows = table.drop_columns(["output_ids"]).to_pylist()
    expected = prompts.get(entry["workload"])
    if expected is None:
        raise UserError(f"{folder}: the plan lists no workload {entry['workload']}.")
    if Counter(expected) != Counter(r["prompt_id"] for r in rows):
        raise UserError(
            f"{folder}: {len(rows)} requests are not the {len(expected)} prompts of workload "
            f"{entry['workload']}. Remove the folder; the next run makes it again."
        )
    kept = [r for r in rows if r["prompt_id"] not in overlap]
    counted = [r for r in kept if r["status"] == "ok"]
    try:
        values = statistics.counters(counted, entry["k"])
        outputs = _outputs(table)
    except (UserError, TypeError, ValueError) as error:
        raise UserError(
            f"{folder}/requests.parquet: {error}. Remove the folder; the next run makes it again."
        ) from error
    return {
        "entry": entry, "values": values, "prompts": [r["prompt_id"] for r in counted],
        "outputs": outputs, "vllm": statistics.vllm_version(manifest),
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


def read_columns(entry: dict, stage: str, name: str, columns: list[str]) -> pa.Table:
    """Read some columns of a part's parquet file: texts of a large study are left on disk.

    Args:
        entry: folder and key of the part.
        stage: of the part.
        name: the data file.
        columns: to read.

    Raises:
        UserError: when the part or its file is missing, damaged, or of another key.
    """
    manifest = statistics.open_part(entry, stage)
    path = store.data_file(entry["folder"], name, manifest)
    try:
        table = pq.read_table(path, columns=columns)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is damaged ({error}). Remove the folder {entry['folder']}; the next run "
            "makes it again."
        ) from error
    if table.column_names != columns:
        raise UserError(f"{path}: expected columns {columns}, found {table.column_names}.")
    return table


def last_epochs(rows: list[dict]) -> dict[tuple[str, str], list[dict]]:
    """Return (verifier, algorithm) -> each strategy's row of its last benchmarked epoch."""
    panels: dict[tuple[str, str], dict[str, dict]] = defaultdict(dict)
    for row in rows:
        own = panels[row["verifier"], row["algorithm"]]
        if row["strategy"] not in own or row["epoch"] > own[row["strategy"]]["epoch"]:
            own[row["strategy"]] = row
    return {name: list(own.values()) for name, own in panels.items()}


def equal_epochs(rows: list[dict]) -> dict[tuple[str, str], list[dict]]:
    """Return (verifier, algorithm) -> each strategy's row at an epoch that all have.

    That is the latest one benchmarked for every strategy of the panel: a strategy that
    was trained for longer would win by that alone. Without one, the last epochs.
    """
    found = last_epochs(rows)
    for name, last in found.items():
        panel = [r for r in rows if (r["verifier"], r["algorithm"]) == name]
        epochs = [{r["epoch"] for r in panel if r["strategy"] == one["strategy"]} for one in last]
        if common := set.intersection(*epochs):
            own: dict[str, dict] = {}
            for row in panel:
                if row["epoch"] == max(common):
                    own.setdefault(row["strategy"], row)
            found[name] = list(own.values())
    return found


def reference(rows: list[dict]) -> str | None:
    """Return the strategy that others are compared with, the verifier's plain own data.

    It has relation "self" and no start; among several the one called "self", else the
    first.

    Args:
        rows: strategies of one verifier and algorithm with "strategy", "relation", "start".
    """
    own = [r["strategy"] for r in rows if r["relation"] == "self" and not r["start"]]
    return "self" if "self" in own else own[0] if own else None


def signed(value: float, low: float | None, high: float | None) -> str:
    """Return a difference with its interval as text: +0.120 (0.080 to 0.160)."""
    return f"{value:+.3f} ({'no interval' if low is None else f'{low:.3f} to {high:.3f}'})"


def verdict(low: float | None, high: float | None) -> str:
    """Return what an interval of a difference says."""
    if low is None or high is None:
        return "too few prompts to tell"
    return "higher" if low > 0 else "lower" if high < 0 else "no clear difference"


def _best(rows: list[dict]) -> str:
    best = max(rows, key=itemgetter("macro"))
    low, high = best["macro_ci_low"], best["macro_ci_high"]
    weak = "; too few prompts in a workload: a hint, not a result" if best["flagged"] else ""
    which = "highest" if len(rows) > 1 else "only measured"
    return (
        f"{best['strategy']} has the {which} macro acceptance length: {best['macro']:.3f} after "
        f"epoch {best['epoch']} (95 % interval "
        f"{'none' if low is None else f'{low:.3f} to {high:.3f}'}, k = {best['k']}{weak})."
    )


def _differences(rows: list[dict]) -> str:
    name = reference(rows)
    if name is None:
        return "Nothing to compare with: no strategy uses the verifier's own responses alone."
    compared = [r for r in rows if r["strategy"] != name and r["self_difference"] is not None]
    (plain,) = (r for r in rows if r["strategy"] == name)
    last, one_epoch = plain["epoch"], len({r["epoch"] for r in rows}) == 1
    text = []
    for row in sorted(compared, key=itemgetter("self_difference"), reverse=True):
        low, high = (row[f"self_difference_ci_{end}"] for end in ("low", "high"))
        if row["key"] == plain["key"]:
            text.append(f"{row['strategy']} is the same training")
            continue
        # Of self it is the same epoch if that was measured, which need not be its last.
        if (row["epoch"], row["self_epoch"]) == (last, last):
            at = ""
        elif row["epoch"] == row["self_epoch"]:
            at = f", both at epoch {row['epoch']}"
        else:
            at = f", epoch {row['epoch']} against epoch {row['self_epoch']}"
        found = signed(row["self_difference"], low, high)
        text.append(f"{row['strategy']} {found}, {verdict(low, high)}{at}")
    when = f", all after epoch {last}" if one_epoch else f" (epoch {last})"
    return f"Against {name}{when}: " + "; ".join(text) + "." if text else ""


def _epochs(rows: list[dict]) -> str:
    enough, rising, unclear = [], [], []
    by_strategy = defaultdict(list)
    for row in rows:
        by_strategy[row["strategy"]].append(row)
    for name, own in by_strategy.items():
        last = max(r["epoch"] for r in own)
        chosen = [r["epoch"] for r in own if r["suggested"]]
        if not chosen:
            unclear.append(name)
        elif chosen[0] == last:
            rising.append(f"{name} (epoch {last})")
        else:
            enough.append(f"{name} {chosen[0]} of {last}")
    text = [f"enough for {', '.join(enough)}"] if enough else []
    text += [f"still rising at the last one measured: {', '.join(rising)}"] if rising else []
    text += [f"too few prompts to tell: {', '.join(unclear)}"] if unclear else []
    return f"Epochs: {'; '.join(text)}." if text else ""


def sentences(strategies: list[dict], epochs: list[dict]) -> dict[tuple[str, str], list[str]]:
    """Sum up the answer tables.

    Args:
        strategies: rows of strategies.csv.
        epochs: rows of epochs.csv.

    Returns:
        (verifier, algorithm) -> the best strategy, the others' differences to the
        verifier's own data, and how many epochs are enough: up to three sentences.
    """
    result = {}
    equal = equal_epochs(strategies)
    for (verifier, algorithm), rows in last_epochs(strategies).items():
        measured = [r for r in rows if r["macro"] is not None]
        compared = [r for r in equal[verifier, algorithm] if r["macro"] is not None]
        own = [r for r in epochs if (r["verifier"], r["algorithm"]) == (verifier, algorithm)]
        found = [_best(measured), _differences(compared or measured)] if measured else []
        found.append(_epochs(own))
        result[verifier, algorithm] = [s for s in found if s] or ["no token was drafted."]
    return result
