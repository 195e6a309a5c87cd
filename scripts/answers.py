#!/usr/bin/env python3
"""Last stage, answers: which training data is worth its price, and how many epochs.

`strategies` has one row per benchmarked checkpoint: its acceptance lengths, the
difference to training on the verifier's own responses, and what the data cost.
`epochs` has the gain of each benchmarked epoch over the one before and suggests how
many are enough (the rule: `statistics.enough_epochs`). `answers.txt` is their gist.

Differences are paired: both checkpoints answered the same prompts, and only prompts
that both answered count. Lengths at another k, temperature or length limit do not
compare. Costs include the start of a strategy, and all of its start's.
"""

import sys
from itertools import combinations
from pathlib import Path

import numpy as np

sys.path[0] = str(Path(__file__).resolve().parents[1])
from scripts.lib import cli, results, statistics, store
from scripts.lib.errors import UserError
from scripts.lib.results import LABELS
from scripts.lib.statistics import MACRO, Estimate

COMPARABLE = ("k", "temperature", "max_tokens")
GROUP = ("verifier", "algorithm", "strategy")
ENDS = ("", "_ci_low", "_ci_high")
LINES = 30  # of answers.txt
STRATEGIES = (
    [*LABELS, "relation", "teachers", "start", "own_samples", "samples", "k", "temperature"],
    ["training_tokens", "mean_response_tokens", "truncated_share", "vocab_coverage",
     "teacher_seconds", "teacher_device", "teacher_verifiers", "teacher_seconds_per_verifier",
     "train_seconds", "schedule_epochs", "seed", "vllm", "flagged", "key"],
)  # fmt: skip
EPOCHS = [
    *LABELS, "k", "temperature", *(c + end for c in (MACRO, "gain") for end in ENDS), "gain_share",
    "validation_loss", "suggested", "reason", "schedule_epochs", "seed", "vllm", "flagged", "key",
]  # fmt: skip


def column(workload: str) -> str:
    """Return a workload's column; a name that a table gives a meaning of its own is prefixed."""
    taken = {*results.INTEGERS, *results.TEXTS, *results.BOOLEANS, *STRATEGIES[1], MACRO}
    taken |= {"self_difference", "temperature"}
    return f"workload_{workload}" if workload in taken else workload


def cells(name: str, estimate: Estimate) -> dict[str, float | None]:
    """Return the three columns of an estimate: value and ends of its interval."""
    return {name + end: value for end, value in zip(ENDS, estimate, strict=True)}


def read_trainings(plan: dict) -> dict[str, dict]:
    """Return `training.json` of all speculators that lead to the plan's, by key.

    Raises:
        UserError: when the plan knows no folder of a key, or a file lacks a number.
    """
    folders = {r["key"]: r["folder"] for r in plan["index"] if r["stage"] == "speculators"}
    folders |= {e["key"]: e["folder"] for e in plan["training"]}
    found: dict[str, dict] = {}
    for key in dict.fromkeys(k for e in plan["training"] for k in [*e["chain"], e["key"]]):
        if key not in folders:
            raise UserError(
                f"{plan['path']} lists no folder of the speculators part {key}. Remove it and "
                "run again."
            )
        part = {"key": key, "folder": folders[key]}
        manifest = statistics.open_part(part, "speculators")
        found[key] = statistics.read_json(part, "training.json", manifest)
        for name in ("tokens", "train_seconds"):
            if not isinstance(found[key].get(name), (int, float)):
                raise UserError(
                    f"{folders[key]}/training.json: no number {name}. Remove the folder; the next "
                    "run makes it again."
                )
    return found


def with_starts(plan: dict, verifier: str, strategy: str) -> list[dict]:
    """Return the plan's row of a strategy, of its start, of that one's start, and so on.

    Raises:
        UserError: when the plan lacks one, or the starts go round in a circle.
    """
    rows = {r["strategy"]: r for r in plan["strategies"] if r["verifier"] == verifier}
    found: list[dict] = []
    name: str | None = strategy
    while name is not None:
        if name not in rows or rows[name] in found:
            raise UserError(
                f"{plan['path']} lists no strategy {name} of verifier {verifier}, or it starts "
                "from itself. Remove the file and run again."
            )
        found.append(rows[name])
        name = (rows[name]["start"] or {}).get("strategy")
    return found


class Responses:
    """What the plan's response parts hold and cost; each is opened once."""

    def __init__(self) -> None:
        self._opened: dict[str, tuple[np.ndarray, float, str] | None] = {}

    def _open(self, part: dict) -> tuple[np.ndarray, float, str] | None:
        """Return rows [n, 3] of (rank, tokens, cut or not), device-seconds and device.

        None for a part that was removed: intermediate data may be, once all that needs
        it is made, and must not be generated again for a table.

        Raises:
            UserError: when it is damaged.
        """
        key, folder = part["key"], part["folder"]
        if key in self._opened:
            return self._opened[key]
        if not (Path(folder) / store.MANIFEST).exists():
            cli.log.info("answers: %s is gone; what depends on it stays empty", folder)
            self._opened[key] = None
            return None
        columns = ["rank", "response_tokens", "finish_reason"]
        table = results.read_columns(part, "responses", "responses.parquet", columns)
        ranks, lengths, reasons = (table[c].to_pylist() for c in columns)
        manifest = store.read_manifest(folder, "responses")
        try:
            rows = np.array([ranks, lengths, [r == "length" for r in reasons]], np.int64).T
            device = manifest["device"]
            seconds = float(manifest["wall_seconds"]) * device["count"]
            self._opened[key] = rows, seconds, device["type"]
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{folder}: no usable lengths, wall_seconds and device ({error}). Remove the "
                "folder; the next run makes it again."
            ) from error
        return self._opened[key]

    def texts(self, strategy: dict) -> dict:
        """Return length and truncation of a strategy's own data; empty when some is gone."""
        kept: list[np.ndarray] = [np.zeros((0, 3), np.int64)]
        for part in strategy["responses"]:
            found = self._open(part)
            if found is None:
                return {}
            ranks = found[0][:, 0]
            kept.append(found[0][(part["first"] <= ranks) & (ranks < part["stop"])])
        rows = np.concatenate(kept)
        if not len(rows):
            return {}
        _, tokens, cut = rows.mean(axis=0)
        return {"mean_response_tokens": float(tokens), "truncated_share": float(cut)}

    def cost(self, strategies: list[dict]) -> dict:
        """Return what the distinct parts of some strategies cost; empty when some are gone.

        Whole parts count, whatever share of their rows is used: that is what was computed.
        """
        parts = {p["key"]: p for row in strategies for p in row["responses"]}
        found = {key: self._open(part) for key, part in parts.items()}
        opened = {key: value for key, value in found.items() if value is not None}
        if not parts or len(opened) < len(parts):
            return {}
        seconds = {key: value[1] for key, value in opened.items()}
        shares = {key: part["verifiers"] for key, part in parts.items()}
        return {
            "teacher_seconds": sum(seconds.values()),
            "teacher_device": ", ".join(sorted({v[2] for v in opened.values()})),
            "teacher_verifiers": min(shares.values()),
            "teacher_seconds_per_verifier": sum(seconds[k] / shares[k] for k in parts),
        }


class Checkpoint:
    """One benchmarked checkpoint: its parts, estimates and labels.

    Args:
        group: its acceptance parts (`results.read_requests`), one per workload.
        plan: the study's plan.
        workloads: workload -> key of the workload's part.
    """

    def __init__(self, group: list[dict], plan: dict, workloads: dict[str, str]):
        self.entry, self.plan = group[0]["entry"], plan
        self.parts = {p["entry"]["workload"]: p for p in group}
        self.rows = {r["workload"]: r for r in results.acceptance_rows(group, plan, None)}
        self._workloads = workloads

    def comparable(self, other: "Checkpoint") -> bool:
        """Return whether both were measured in the same way."""
        return all(self.entry[c] == other.entry[c] for c in COMPARABLE)

    def _counters(self, other: "Checkpoint") -> dict:
        """Return (workload key, workload) -> counters of the prompts that both answered."""
        result = {}
        for workload in self.parts.keys() & other.parts.keys():
            parts = self.parts[workload], other.parts[workload]
            lines = [dict(zip(p["prompts"], p["values"], strict=True)) for p in parts]
            both = sorted(lines[0].keys() & lines[1].keys())
            if both:
                one, two = (np.stack([own[p] for p in both]) for own in lines)
                result[self._workloads[workload], workload] = (one, two)
        return result

    def minus(self, other: "Checkpoint") -> dict[str, Estimate]:
        """Return the paired difference by workload and as macro mean; see `difference`."""
        found = statistics.difference(
            self._counters(other), self.plan["bench"]["bootstrap_samples"], self.plan["seed"]
        )
        keys = [{w: p["entry"]["key"] for w, p in c.parts.items()} for c in (self, other)]
        if keys[0] == keys[1]:  # one measurement under two names differs by nothing at all
            return {w: v if v[0] is None else (0.0, 0.0, 0.0) for w, v in found.items()}
        return found

    def lengths(self, name: str, workload: str) -> dict:
        """Return acceptance length and interval of a workload or the macro mean as columns."""
        row = self.rows[workload]
        return cells(name, (row["acceptance_length"], row["ci_low"], row["ci_high"]))


def group_by(checkpoints: list[Checkpoint], *names: str) -> dict[tuple, list[Checkpoint]]:
    """Return checkpoints by labels, in the order of their first appearance."""
    result: dict[tuple, list[Checkpoint]] = {}
    for checkpoint in checkpoints:
        result.setdefault(tuple(checkpoint.entry[n] for n in names), []).append(checkpoint)
    return result


def training_of(plan: dict, labels: dict) -> dict:
    """Return the plan's training entry of a checkpoint's labels.

    Raises:
        UserError: when there is none.
    """
    names = (*GROUP, "epoch")
    for entry in plan["training"]:
        if all(entry[c] == labels[c] for c in names):
            return entry
    raise UserError(
        f"{plan['path']} benchmarks {'/'.join(str(labels[c]) for c in names)} and lists no "
        "training of it. Remove the file and run again."
    )


def same_or_last(candidates: list[Checkpoint], checkpoint: Checkpoint) -> Checkpoint | None:
    """Return the candidate of a checkpoint's epoch, or the one of the last epoch."""
    comparable = [c for c in candidates if c.comparable(checkpoint)]
    same = [c for c in comparable if c.entry["epoch"] == checkpoint.entry["epoch"]]
    return same[0] if same else max(comparable, key=lambda c: c.entry["epoch"], default=None)


def strategy_rows(checkpoints: list[Checkpoint], plan: dict, trainings: dict) -> list[dict]:
    """Return the rows of strategies.csv, in the order of the plan.

    Args:
        checkpoints: all benchmarked ones.
        plan: the study's plan.
        trainings: key of a speculators part -> its `training.json`.

    Raises:
        UserError: when the plan lacks a strategy or training, or a part is damaged.
    """
    responses, rows = Responses(), []
    panels = group_by(checkpoints, "verifier", "algorithm")
    for checkpoint in checkpoints:
        labels = checkpoint.entry
        panel = panels[labels["verifier"], labels["algorithm"]]
        # Of what was benchmarked, in its order: the sentences choose from the same rows.
        names = dict.fromkeys(c.entry["strategy"] for c in panel)
        plain = results.reference([with_starts(plan, labels["verifier"], n)[0] for n in names])
        candidates = [c for c in panel if c.entry["strategy"] == plain]
        other = same_or_last(candidates, checkpoint)
        lineage = with_starts(plan, labels["verifier"], labels["strategy"])
        training = training_of(plan, labels)
        chain = [trainings[key] for key in training["chain"]]
        row, macro = lineage[0], checkpoint.rows[MACRO]
        start = row["start"]
        line = {c: labels[c] for c in (*LABELS, "k", "temperature", "schedule_epochs")} | {
            "relation": row["relation"], "teachers": "+".join(row["teachers"]),
            "start": f"{start['strategy']}/epoch-{start['epoch']}" if start else None,
            "own_samples": row["own_samples"], "samples": row["samples"],
            "training_tokens": sum(t["tokens"] for t in chain),
            "train_seconds": sum(t["train_seconds"] for t in chain),
            "vocab_coverage": chain[-1].get("vocab_coverage", {}).get("train"),
            "seed": plan["seed"], "vllm": macro["vllm"], "flagged": macro["flagged"],
            "prompts": macro["prompts"], "key": training["key"],
        } | responses.texts(row) | responses.cost(lineage)  # fmt: skip
        found = checkpoint.minus(other) if other else {}
        line["self_epoch"] = other and other.entry["epoch"]
        for workload in (*checkpoint.parts, MACRO):
            name = MACRO if workload == MACRO else column(workload)
            beside = "self_difference" if workload == MACRO else f"{name}_self_difference"
            line |= checkpoint.lengths(name, workload)
            line |= cells(beside, found.get(workload, (None, None, None)))
        rows.append(line)
    return rows


def epoch_rows(checkpoints: list[Checkpoint], plan: dict, trainings: dict) -> list[dict]:
    """Return the rows of epochs.csv (arguments as `strategy_rows`).

    Only what was benchmarked after two epochs or more has rows. `gain` is over the
    benchmarked epoch before; `gain_share` is the part of the whole gain, from first to
    last, that an epoch has reached, None unless that gain is clearly above 0.
    """
    rows: list[dict] = []
    for group in group_by(checkpoints, *GROUP, *COMPARABLE).values():
        own = {c.entry["epoch"]: c for c in sorted(group, key=lambda c: c.entry["epoch"])}
        if len(own) < 2:
            continue
        epochs = list(own)
        gains = {
            (later, earlier): own[later].minus(own[earlier])[MACRO]
            for earlier, later in combinations(epochs, 2)
        }
        suggested, reasons = statistics.enough_epochs(epochs, gains)
        macro = {e: c.rows[MACRO]["acceptance_length"] or 0.0 for e, c in own.items()}
        first, last, before = epochs[0], epochs[-1], None
        whole = macro[last] - macro[first]
        rises = (gains[last, first][1] or 0.0) > 0 and whole > 0
        for epoch, checkpoint in own.items():
            training, row = training_of(plan, checkpoint.entry), checkpoint.rows[MACRO]
            losses = trainings[training["key"]].get("validation", {}).get("validation", {})
            rows.append({
                **{c: checkpoint.entry[c] for c in
                   (*LABELS, "k", "temperature", "schedule_epochs")},
                **checkpoint.lengths(MACRO, MACRO),
                **cells("gain", gains[epoch, before] if before else (None, None, None)),
                "gain_share": (macro[epoch] - macro[first]) / whole if rises else None,
                "validation_loss": losses.get("loss"),
                "suggested": epoch == suggested, "reason": reasons[epoch], "seed": plan["seed"],
                "vllm": row["vllm"], "flagged": row["flagged"], "key": training["key"],
            })  # fmt: skip
            before = epoch
    return rows


def strategy_columns(checkpoints: list[Checkpoint]) -> list[str]:
    """Return the columns of strategies.csv; the workloads decide how many there are."""
    workloads = [column(w) for w in dict.fromkeys(w for c in checkpoints for w in c.parts)]
    lengths = [name + end for name in (*workloads, MACRO) for end in ENDS]
    compared = ["self_difference", *(f"{w}_self_difference" for w in workloads)]
    differences = [name + end for name in compared for end in ENDS]
    return [
        *STRATEGIES[0], *lengths, "prompts", *differences[:3], "self_epoch", *differences[3:],
        *STRATEGIES[1],
    ]  # fmt: skip


def gist(strategies: list[dict], epochs: list[dict], notices: list[str]) -> list[str]:
    """Return at most `LINES` lines for answers.txt; details go first when there are many."""
    found = results.sentences(strategies, epochs)
    titles = {name: " / ".join(name) for name in found}
    if not found:
        return [*notices, "No speculator was measured in this study."][:LINES]
    lines = list(notices)
    for name, told in found.items():
        lines += [f"{titles[name]}:", *(f"  {sentence}" for sentence in told)]
    if len(lines) > LINES:
        lines = [*notices, *(f"{titles[n]}: {told[0]}" for n, told in found.items())]
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], "More in strategies.csv and epochs.csv."]
    return lines


def main(args) -> None:
    """Write strategies, epochs and answers.txt to `args.out`."""
    plan = statistics.read_plan(args.plan, (*statistics.PLAN_FIELDS, "strategies"))
    prompts, overlap = results.read_prompts(plan)
    workloads = {w["workload"]: store.key_of(w["folder"]) for w in plan["workloads"]}
    measured = [e for e in plan["acceptance"] if e["role"] == "checkpoint"]
    parts = [results.read_requests(entry, prompts, overlap) for entry in measured]
    checkpoints = [Checkpoint(group, plan, workloads) for group in results.checkpoints(parts)]
    trainings = read_trainings(plan)
    made = {
        "strategies": strategy_rows(checkpoints, plan, trainings),
        "epochs": epoch_rows(checkpoints, plan, trainings),
    }
    columns = {"strategies": strategy_columns(checkpoints), "epochs": EPOCHS}
    for name, rows in made.items():
        target = args.out / f"{name}.csv"
        results.write(rows, columns[name], target, args.out / f"{name}.parquet")
    text = "\n".join(gist(made["strategies"], made["epochs"], plan.get("notices", [])))
    with store.replacing(args.out / "answers.txt") as temporary:
        temporary.write_text(text + "\n")
    cli.log.info("answers: %d rows in %s", sum(map(len, made.values())), args.out)


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.add_argument("--plan", type=Path, required=True, help="parts of the study (JSON)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tables")
    cli.run(main, parser.parse_args())
