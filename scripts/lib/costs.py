"""What parts cost: device-seconds, tokens, bytes and money, read from their manifests.

A part counts once, whoever shares it. Parts that one job made together (the layers of a
token shard, the measurements of a checkpoint) ran at the same time, so their time is the
union of their intervals and not the sum.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from scripts.lib import store
from scripts.lib.errors import UserError

# What the names in a part's path mean; names that only number parts of one group are "".
NAMES = {
    "models": ("model",),
    "prompts": ("pool", ""),
    "workloads": ("workload",),
    "responses": ("teacher", "pool", ""),
    "tokens": ("verifier", "teacher", "pool", ""),
    "hidden_states": ("verifier", "teacher", "pool", "", ""),
    "vocab": ("verifier", "size"),
    "speculators": ("verifier", "algorithm", "strategy", ""),
}
TOGETHER = {"hidden_states": ("tokens",), "benchmarks": ("speculator", "model")}
LABELS = ("verifier", "teacher", "pool", "algorithm", "strategy")
COLUMNS = [
    "stage", "group", *LABELS, "parts", "unknown_parts", "device", "device_seconds",
    "input_tokens", "output_tokens", "bytes", "price_per_hour", "money", "currency", "verifiers",
    "device_seconds_per_verifier", "money_per_verifier", "device_seconds_saved", "money_saved",
    "note",
]  # fmt: skip
# (stage -> facts of a manifest): tokens that went in, and that came out.
TOKENS = {
    "responses": ("prompt_tokens", "response_tokens"),
    "tokens": ("", "tokens"),
    "hidden_states": ("total_tokens", ""),
    "speculators": ("tokens", ""),
}


@dataclass(frozen=True, eq=False)
class Part:
    """A part of the plan and, if it is in the store, its manifest.

    Attributes:
        labels: what its names mean (verifier, teacher, ...).
        group: the readable name of what it is a piece of.
    """

    stage: str
    key: str
    folder: str
    names: tuple[str, ...]
    labels: dict
    group: str

    @cached_property
    def manifest(self) -> dict | None:
        """The manifest, or None where the part was removed or is not made yet."""
        if not (Path(self.folder) / store.MANIFEST).exists():
            return None
        return store.read_manifest(Path(self.folder), self.stage)

    @property
    def device(self) -> str | None:
        """The type of device that made it."""
        return self.manifest["device"]["type"] if self.manifest else None

    @property
    def job(self) -> tuple:
        """Parts with equal values may have been made by one job."""
        assert self.manifest is not None
        roles = [r for r in TOGETHER.get(self.stage, ()) if r in self.manifest["inputs"]]
        return (self.stage, self.manifest["inputs"][roles[0]]) if roles else (self.key,)


def open_parts(plan: dict) -> dict[str, Part]:
    """Return the parts of a plan by key, in its order.

    Args:
        plan: as `labels.study_labels` writes it.
    """
    measured = {e["key"]: e for e in [*plan["acceptance"], *plan["latency"]][::-1]}
    found: dict[str, Part] = {}
    for row in plan["index"]:
        names, stage = tuple(row["name"].split("/")), row["stage"]
        if stage in NAMES:
            pairs = [(c, n) for c, n in zip(NAMES[stage], names, strict=True) if c]
            labels, group = dict(pairs), "/".join(n for _, n in pairs)
        else:
            entry = measured.get(row["key"], {"verifier": names[0]})
            labels = {c: entry.get(c) for c in ("verifier", "algorithm", "strategy")}
            group = "/".join(v or "" for v in labels.values()).rstrip("/")
        part = Part(stage, row["key"], row["folder"], names, labels, group)
        found.setdefault(row["key"], part)
    return found


def sharing(plan: dict) -> dict[tuple[str, ...], set[str]]:
    """Return names of a responses part -> the study's verifiers that read it."""
    result: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for row in plan["index"]:
        if row["stage"] == "tokens":
            verifier, *source = row["name"].split("/")
            result[tuple(source)].add(verifier)
    return result


def union_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of (start, end) intervals, in their unit."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _attempts(manifest: dict) -> list[tuple[str, float, float]]:
    """Return (host, start, end) of all attempts at a part, in seconds since 1970."""
    earlier = manifest.get("earlier_attempts", [])
    last = manifest["wall_seconds"] - sum(a["seconds"] for a in earlier)
    found = [(a["host"], a["start"], a["seconds"]) for a in earlier]
    result = []
    for host, text, seconds in [*found, (manifest["host"], manifest["start"], last)]:
        start = datetime.fromisoformat(text).timestamp()
        result.append((host, start, start + seconds))
    return result


def device_seconds(parts: Iterable[Part]) -> dict[str, float]:
    """Return device type -> wall seconds times devices of the parts that are in the store.

    Raises:
        UserError: when a manifest lacks a time or device.
    """
    jobs: dict[tuple, list[dict]] = defaultdict(list)
    for part in parts:
        if part.manifest is not None:
            try:
                device = part.manifest["device"]
                jobs[*part.job, device["type"], int(device["count"])].append(part.manifest)
            except (KeyError, TypeError, ValueError) as error:
                raise _unusable(part, error) from error
    result: dict[str, float] = defaultdict(float)
    for (*_, device, count), manifests in jobs.items():
        try:
            if len(manifests) == 1:
                seconds = float(manifests[0]["wall_seconds"])
            else:
                hosts = defaultdict(list)
                for host, start, end in (a for m in manifests for a in _attempts(m)):
                    hosts[host].append((start, end))
                seconds = sum(union_seconds(own) for own in hosts.values())
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"the manifest of the {manifests[0]['stage']} part {manifests[0]['key']} has no "
                f"usable times ({error}). Remove its folder; the next run makes it again."
            ) from error
        result[device] += seconds * count
    return {device: round(seconds, 3) for device, seconds in result.items()}


def _unusable(part: Part, error: Exception) -> UserError:
    return UserError(
        f"{part.folder}/{store.MANIFEST} has no usable device or times ({error}). Remove the "
        "folder; the next run makes it again."
    )


def price(device: str, prices: dict[str, float]) -> float | None:
    """Return the price of an hour of a device; None when none is set for its type.

    A price's name must be a word of the device's: "h100" is the price of "NVIDIA H100
    80GB HBM3". The longest name wins.
    """
    words = re.split(r"[^a-z0-9]+", device.lower())
    named = [n for n in prices if set(re.split(r"[^a-z0-9]+", n.lower())) <= set(words)]
    return float(prices[max(named, key=len)]) if named else None


def money(seconds: dict[str, float], prices: dict[str, float]) -> float | None:
    """Return what device-seconds by type cost; None as soon as a price is unknown."""
    total = 0.0
    for device, amount in seconds.items():
        if (hour := price(device, prices)) is None:
            return None
        total += amount / 3600 * hour
    return total


def _tokens(parts: list[Part]) -> tuple[int | None, int | None]:
    """Return tokens read and written; what several parts of one job read counts once."""
    result: list[int | None] = []
    for name in TOKENS.get(parts[0].stage, ("", "")):
        jobs = {p.job: p.manifest["facts"].get(name) for p in parts if p.manifest}
        known = [v for v in jobs.values() if v is not None]
        result.append(sum(known) if name and known else None)
    return result[0], result[1]


def _no_price(device: str) -> str:
    return f"no price is set for {device}: add it to economics.prices"


def group_row(parts: list[Part], prices: dict, currency: str, shared: dict) -> dict:
    """Return one row of costs.csv: parts of one stage and group, made on one type of device.

    Args:
        parts: all in the store, or all not.
        prices, currency: settings.
        shared: `sharing` of the plan.
    """
    first, device = parts[0], parts[0].device
    row: dict[str, Any] = {
        "stage": first.stage,
        "group": first.group,
        "currency": currency,
        "device": device,
    }
    row |= {c: first.labels.get(c) for c in LABELS} | {"parts": 0, "unknown_parts": 0}
    if device is None:
        count = len(parts)
        row["note"] = (
            f"{count} part{'s are' if count > 1 else ' is'} not in the store (removed, or not made "
            "yet): the cost is unknown"
        )
        return row | {"unknown_parts": count}
    seconds = device_seconds(parts)[device]
    incoming, outgoing = _tokens(parts)
    hour = price(device, prices)
    row |= {
        "parts": len(parts), "device_seconds": seconds, "input_tokens": incoming,
        "output_tokens": outgoing, "price_per_hour": hour,
        "bytes": sum(f["bytes"] for p in parts for f in (p.manifest or {})["files"].values()),
        "money": money({device: seconds}, prices),
        "note": None if hour is not None else _no_price(device),
    }  # fmt: skip
    if first.stage == "responses":
        readers = {p: max(1, len(shared.get(p.names, ()))) for p in parts}
        each = {p: device_seconds([p])[device] for p in parts}
        own = sum(each[p] / n for p, n in readers.items())
        saved = sum(each[p] * (n - 1) for p, n in readers.items())
        row |= {
            "verifiers": max(readers.values()), "device_seconds_per_verifier": own,
            "device_seconds_saved": saved, "money_per_verifier": money({device: own}, prices),
            "money_saved": money({device: saved}, prices),
        }  # fmt: skip
    return row


def cost_rows(plan: dict, parts: dict[str, Part]) -> list[dict]:
    """Return the rows of costs.csv, in the order of the plan, and totals.

    Totals are by device type, and one of all money. What sharing saved is in the rows
    of `responses` and in the totals: the seconds it would have taken more, had every
    verifier of the study asked its teacher itself.

    Args:
        plan: the study's plan, with "economics".
        parts: `open_parts(plan)`.
    """
    settings, shared = plan["economics"], sharing(plan)
    prices, currency = settings["prices"], settings["currency"]
    groups: dict[tuple, list[Part]] = defaultdict(list)
    for part in parts.values():
        groups[part.stage, part.group, part.device].append(part)
    rows = [group_row(group, prices, currency, shared) for group in groups.values()]
    return rows + _totals(rows, prices, currency)


def _totals(rows: list[dict], prices: dict, currency: str) -> list[dict]:
    result: list[dict[str, Any]] = []
    summed = ("device_seconds", "device_seconds_saved")
    for device in dict.fromkeys(r["device"] for r in rows if r["device"]):
        own = [r for r in rows if r["device"] == device]
        line: dict[str, Any] = {c: sum(r.get(c) or 0.0 for r in own) for c in summed}
        hour = price(device, prices)
        result.append(line | {
            "stage": "total", "group": device, "device": device, "currency": currency,
            "parts": sum(r["parts"] for r in own), "unknown_parts": 0, "price_per_hour": hour,
            "bytes": sum(r["bytes"] for r in own),
            "money": money({device: line["device_seconds"]}, prices),
            "money_saved": money({device: line["device_seconds_saved"]}, prices),
            "note": None if hour is not None else _no_price(device),
        })  # fmt: skip
    lacking = [r["device"] for r in result if r["money"] is None]
    unknown = sum(r["unknown_parts"] for r in rows)
    notes = [_no_price(device) for device in lacking]
    if unknown:
        notes.append(f"at least: {unknown} parts are not in the store")
    whole: dict = {
        c: None if lacking else sum(r[c] or 0.0 for r in result) for c in ("money", "money_saved")
    }
    whole |= {"parts": sum(r["parts"] for r in rows), "unknown_parts": unknown}
    whole |= {"bytes": sum(r.get("bytes") or 0 for r in rows), "note": "; ".join(notes) or None}
    return [*result, {"stage": "total", "group": "all", "currency": currency} | whole]


class Lineage:
    """What a checkpoint was made from, as its manifests say.

    Args:
        plan: the study's plan.
        parts: `open_parts(plan)`.
    """

    def __init__(self, plan: dict, parts: dict[str, Part]):
        self._parts, self._shared = parts, sharing(plan)
        self._states: dict[tuple[str, ...], list[Part]] = defaultdict(list)
        for part in parts.values():
            if part.stage == "hidden_states":
                self._states[part.names].append(part)
        self._seen: dict[str, frozenset[Part]] = {}

    def of(self, key: str) -> frozenset[Part]:
        """Return a part and all that it was made from, models aside.

        Of a part that is not in the store, its inputs are not known either.
        """
        if key not in self._parts:
            return frozenset()
        if key not in self._seen:
            part = self._parts[key]
            found = {part} if part.stage != "models" else set()
            inputs = part.manifest["inputs"] if part.manifest else {}
            roles = {r: v if isinstance(v, list) else [v] for r, v in inputs.items()}
            layers = roles.pop("hidden_states", [])[2:]  # after contract and dtype
            for value in (v for values in roles.values() for v in values):
                found |= self.of(value)
            for tokens in [*roles.get("tokens", []), *roles.get("own_tokens", [])]:
                if part.stage == "speculators" and tokens in self._parts:
                    found |= self._states_of(self._parts[tokens], [*layers, "-1"])
            self._seen[key] = frozenset(found)
        return self._seen[key]

    def _states_of(self, tokens: Part, layers: list[str]) -> set[Part]:
        found = set()
        for layer in map(int, layers):
            name = f"layer-{layer:03d}" if layer >= 0 else "layer-last"
            for part in self._states[*tokens.names, name]:
                if part.manifest is None or part.manifest["inputs"]["tokens"] == tokens.key:
                    found.add(part)
        return found

    def seconds(self, key: str) -> tuple[dict[str, float], dict[str, float], int]:
        """Return what making a part took, with all that it was made from.

        Returns:
            Device type -> device-seconds; the same with each teacher's divided by the
            verifiers of the study that share it; how many parts are not in the store.
        """
        parts = self.of(key)
        responses = [p for p in parts if p.stage == "responses" and p.manifest]
        whole, shared = device_seconds(parts), device_seconds(p for p in parts - {*responses})
        for part in responses:
            readers = max(1, len(self._shared.get(part.names, ())))
            for device, amount in device_seconds([part]).items():
                shared[device] = shared.get(device, 0.0) + amount / readers
        return whole, shared, sum(p.manifest is None for p in parts)
