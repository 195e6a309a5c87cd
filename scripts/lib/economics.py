"""The speed-up model of speculative decoding, and what it means for a number of GPUs.

S = L / (1 + k c + v): L is the acceptance length (bonus token included), c the time of
one draft step and v the extra time of verifying k + 1 tokens instead of one, both as
shares of the bare verifier's step. A drafter that proposes all tokens in one pass has
1 + c + v. (Leviathan et al. 2023, arXiv 2211.17192, with the measured L in the place
of their independent acceptances.) Below L = 1 + k c + v speculation slows serving down.

A step with a speculator emits L tokens, one without emits one. So measured times
between tokens give 1 + k c + v = L x (time with) / (time without) in one number. Only
measurements at several k can tell c from v.
"""

import math
from collections.abc import Iterable, Sequence

# Differences of a few percent are noise. 1 + k c + v cannot be below 1, so that a number
# further below says that the two latencies do not belong together.
NOISE = 0.05
PARALLEL = ("peagle", "dflash", "dflash2", "dspark")  # one pass drafts all k tokens


def break_even(length: float, with_ms: float, without_ms: float) -> float:
    """Return 1 + k c + v: the acceptance length at which speculation changes nothing.

    Args:
        length: acceptance length.
        with_ms, without_ms: time between output tokens with and without the speculator.
    """
    return length * with_ms / without_ms


def speedup(length: float, overhead: float) -> float:
    """Return the model's speed-up of the time between tokens (`overhead`: 1 + k c + v)."""
    return length / overhead


def plausible(overhead: float | None) -> bool:
    """Return whether a measured 1 + k c + v can be true, or is unknown."""
    return overhead is None or overhead >= 1 - NOISE


def separate(points: Iterable[tuple[int, float]]) -> tuple[float, float] | None:
    """Fit overhead = 1 + k c + v to measurements at several k by least squares.

    What verifying one more token costs grows with k as well and is therefore in c; v is
    the part that does not depend on k.

    Args:
        points: (k, 1 + k c + v).

    Returns:
        (c, v), or None with fewer than two different k.
    """
    own = list(points)
    mean_k = sum(k for k, _ in own) / max(len(own), 1)
    spread = sum((k - mean_k) ** 2 for k, _ in own)
    if not spread:
        return None
    mean = sum(value for _, value in own) / len(own)
    slope = sum((k - mean_k) * (value - mean) for k, value in own) / spread
    return slope, mean - slope * mean_k - 1


def best_throughput(rows: Iterable[dict], target_ms: float) -> float | None:
    """Return the highest tokens per second among loads whose time per token meets a target."""
    met = [r["output_tokens_per_s"] for r in rows if 0 < (r["itl_ms"] or 0) <= target_ms]
    return max((v for v in met if v), default=None)


def gpus_needed(gpus: int, gain: float, per_engine: int = 1) -> int:
    """Return how many GPUs give the same throughput: ceil(gpus / gain) in whole engines.

    Args:
        gpus: in use without speculation.
        gain: throughput with the speculator, over that without.
        per_engine: GPUs of one engine (tensor-parallel size).
    """
    # An exact quotient must not become one engine more by rounding.
    return per_engine * math.ceil(gpus / gain / per_engine - 1e-9)


def payback_hours(cost: float, gpus_saved: int, price_per_hour: float) -> float | None:
    """Return after how many hours of serving the saved GPUs have paid `cost`; None for never."""
    saved = gpus_saved * price_per_hour
    return cost / saved if saved > 0 else None


def kv_bytes_per_token(config: dict) -> int | None:
    """Return the bytes of KV cache that a draft model takes per token of context.

    Keys and values of every layer: 2 x layers x KV heads x head size x bytes of a number.

    Args:
        config: `config.json` of a checkpoint in Speculators' format, or of a bare draft.

    Returns:
        None when the config does not say.
    """
    layer = config.get("transformer_layer_config") or config
    heads = layer.get("num_key_value_heads") or layer.get("num_attention_heads")
    size = layer.get("head_dim")
    if not size and layer.get("hidden_size") and layer.get("num_attention_heads"):
        size = layer["hidden_size"] // layer["num_attention_heads"]
    layers = layer.get("num_hidden_layers")
    kind = str(config.get("dtype") or config.get("torch_dtype") or layer.get("dtype") or "bfloat16")
    width = 4 if kind.endswith("float32") else 2
    return 2 * layers * heads * size * width if layers and heads and size else None


GROUP = ("verifier", "algorithm", "strategy", "epoch")
LOAD = ("workload", "concurrency", "hardware", "temperature")
COLUMNS = [
    "verifier", "model", "algorithm", "strategy", "epoch", "workload", "concurrency", "hardware",
    "k", "temperature", "acceptance_length", "break_even_length", "itl_ms", "bare_itl_ms",
    "measured_speedup", "throughput_speedup", "model_speedup", "model_source", "draft_cost",
    "verify_cost", "fitted_k", "itl_target_ms", "gain", "gpus_before", "gpus_after", "gpus_saved",
    "checkpoint_bytes", "kv_bytes_per_token", "training_device_seconds", "training_money",
    "training_money_per_verifier", "training_unknown_parts", "price_per_hour", "currency",
    "payback_hours", "payback_hours_per_verifier", "verdict", "key",
]  # fmt: skip


def _key(row: dict, names: Sequence[str]) -> tuple:
    return tuple(row[n] for n in names)


class Measurements:
    """The latency rows of a study, each with the bare verifier's and an acceptance length.

    Args:
        latency: rows of latency.csv.
        acceptance: rows of acceptance.csv.
    """

    def __init__(self, latency: list[dict], acceptance: list[dict]):
        where = ("verifier", *LOAD)
        loads = [r for r in latency if r["concurrency"] is not None and r["itl_ms"]]
        self.bare = {_key(r, where): r for r in loads if r["algorithm"] is None}
        names = (*GROUP, "workload", "k", "temperature")
        lengths = {_key(r, names): r["acceptance_length"] for r in acceptance}
        self.rows: list[dict] = []
        for row in loads:
            base = self.bare.get(_key(row, where))
            if row["algorithm"] is None or base is None:
                continue
            length = lengths.get(_key(row, names))
            overhead = length and break_even(length, row["itl_ms"], base["itl_ms"])
            self.rows.append(row | {
                "acceptance_length": length, "break_even_length": overhead,
                "bare_itl_ms": base["itl_ms"], "measured_speedup": base["itl_ms"] / row["itl_ms"],
            })  # fmt: skip

    def separated(self, row: dict) -> tuple[tuple[float, float] | None, int]:
        """Return (c, v) of a row's checkpoint at its load, and how many k they rest on."""
        same = [r for r in self.rows if _key(r, GROUP + LOAD) == _key(row, GROUP + LOAD)]
        points = {r["k"]: r["break_even_length"] for r in same if r["break_even_length"]}
        return separate(points.items()), len(points)

    def predicted(self, row: dict) -> tuple[float | None, str]:
        """Return the model's speed-up and where its overhead comes from.

        A row's own overhead gives the measured speed-up back by definition. So the
        mean of other measurements is taken: other workloads and checkpoints of the same
        verifier, algorithm, k and load, whose steps cost the same.
        """
        same = ("verifier", "algorithm", "k", "concurrency", "hardware", "temperature")
        others = [
            r["break_even_length"] for r in self.rows
            if r is not row and _key(r, same) == _key(row, same)
            and r["break_even_length"] and plausible(r["break_even_length"])
        ]  # fmt: skip
        if not row["acceptance_length"]:
            return None, "none: no acceptance length at this k and workload"
        if not others:
            return None, "none: only this measurement"
        count = f"{len(others)} other measurement{'s' if len(others) > 1 else ''}"
        return speedup(row["acceptance_length"], sum(others) / len(others)), count

    def gain(self, row: dict, target_ms: float | None) -> tuple[float | None, str]:
        """Return the throughput gain that decides the number of GPUs, or None and why.

        With a target the best load that meets it is compared, each side at its own;
        without one both at the row's load.
        """
        if target_ms is None:
            return row["throughput_speedup"], "" if row["throughput_speedup"] else "no throughput"
        names = [n for n in LOAD if n != "concurrency"]
        same = lambda r: _key(r, ["verifier", *names]) == _key(row, ["verifier", *names])  # noqa: E731
        bare = best_throughput((r for r in self.bare.values() if same(r)), target_ms)
        group = [*GROUP, "k"]
        own = (r for r in self.rows if same(r) and _key(r, group) == _key(row, group))
        mine = best_throughput(own, target_ms)
        if bare is None and mine is None:
            return None, f"nothing meets {target_ms:g} ms per token at a measured load"
        if bare is None:
            return None, f"only with the speculator {target_ms:g} ms per token are met"
        if mine is None:
            return None, f"with the speculator {target_ms:g} ms per token are not met"
        return mine / bare, ""


def verdict(row: dict, why_no_gain: str) -> str:
    """Return in plain words what a row says about serving with the speculator.

    Args:
        row: of economics.csv, less the verdict.
        why_no_gain: why the number of GPUs is unknown, or "".
    """
    at, ratio = f"with {row['concurrency']} in flight", row["measured_speedup"]
    length, even = row["acceptance_length"], row["break_even_length"]
    because = ""
    if length:
        side = "above" if length > even else "below" if length < even else "at"
        because = f" (acceptance length {length:.2f} is {side} the break-even {even:.2f})"
    if ratio < 1:
        text = f"slower: {at} speculation makes a token take {1 / ratio:.2f} times as long{because}"
    else:
        text = f"faster: {at} tokens come {ratio:.2f} times as fast{because}"
    if not plausible(even):
        return (
            f"unclear: {at} tokens seem to come {ratio:.2f} times as fast, but an acceptance "
            f"length of {length:.2f} cannot give that: the noise of the latencies is larger than "
            "the effect. Measure more requests (benchmark.latency.requests_per_stream)"
        )
    through = row["throughput_speedup"]
    if through and ratio >= 1 > through:
        text += f", but the server gives fewer of them per second ({through:.2f} times)"
    before, after = row["gpus_before"], row["gpus_after"]
    if after is None:
        return f"{text}; GPUs: {why_no_gain}"
    if after >= before:
        return f"{text}; {before} GPUs become {after}: none is saved, training never pays back"
    return f"{text}; {before} GPUs become {after}"


def rows(
    measured: Measurements, checkpoints: dict[tuple, dict], settings: dict, sizes: dict[str, dict]
) -> list[dict]:
    """Return the rows of economics.csv, in the order of latency.csv.

    Args:
        measured: the study's.
        checkpoints: (verifier, algorithm, strategy, epoch) -> training costs and memory
            as columns, with "method", the algorithm's own name.
        settings: "economics" of the configuration.
        sizes: key of a latency part -> GPUs of its engine, its device's price (columns
            "per_engine" and "price_per_hour").
    """
    result: list[dict] = []
    target = settings.get("itl_target_ms")
    for row in measured.rows:
        facts = dict(checkpoints.get(_key(row, GROUP), {}))
        method, serving = facts.pop("method", None), sizes.get(row["key"], {})
        fit, count = (None, 0) if method in PARALLEL else measured.separated(row)
        predicted, source = measured.predicted(row)
        gain, why = measured.gain(row, target)
        before = settings["gpus"]
        after = None
        if gain and plausible(row["break_even_length"]):
            after = gpus_needed(before, gain, serving.get("per_engine", 1))
        line = row | facts | {
            "model_speedup": predicted, "model_source": source, "itl_target_ms": target,
            "draft_cost": fit and fit[0], "verify_cost": fit and fit[1],
            "fitted_k": count if fit else None, "gain": gain, "gpus_before": before,
            "gpus_after": after, "gpus_saved": None if after is None else before - after,
            "price_per_hour": serving.get("price_per_hour"), "currency": settings["currency"],
        }  # fmt: skip
        hour = line["price_per_hour"]
        for end in ("", "_per_verifier"):
            cost = line.get(f"training_money{end}")
            hours = None
            if cost is not None and after is not None and hour is not None:
                hours = payback_hours(cost, before - after, hour)
            line[f"payback_hours{end}"] = hours
        line["verdict"] = verdict(line, why)
        result.append({c: line.get(c) for c in COLUMNS})
    return result
