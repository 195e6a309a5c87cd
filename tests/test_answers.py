"""Answer tables: against slow obvious loops, on synthetic studies; their report and figures."""

import csv
import itertools
import json
import random
import re
from argparse import Namespace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from test_tables import find, make_part, make_prompts, prompt, request, requests_of, rewrite

from scripts import answers, report
from scripts import tables as make
from scripts.lib import acceptance, figures, results, statistics, store, tables
from scripts.lib.errors import UserError
from scripts.lib.identity import digest

SEED, RESAMPLES, K = 7, 200, 3
WORDS = [f"w{i}" for i in range(400)]


class Study:
    """A plan with parts on disk, built piece by piece; fake numbers, real formats."""

    def __init__(self, root: Path, workloads: dict[str, int], algorithm="eagle3", min_prompts=5):
        self.root, self.algorithm = root, algorithm
        generator = random.Random(1)
        self.prompts = {
            w: [prompt(f"{w} {' '.join(generator.sample(WORDS, 20))}") for _ in range(n)]
            for w, n in workloads.items()
        }
        self.plan: dict = {
            "study": "synthetic", "seed": SEED, "notices": [],
            "bench": {
                "bootstrap_samples": RESAMPLES, "min_prompts": min_prompts, "overlap_ngram": 13},
            "acceptance": [], "latency": [], "training": [], "strategies": [], "index": [],
            "pools": [{"pool": "p"} | make_prompts(root, "prompts", "p", [prompt("hello")])],
            "workloads": [
                {"workload": w} | make_prompts(root, "workloads", w, rows)
                for w, rows in self.prompts.items()
            ],
        }  # fmt: skip

    def responses(self, name, lengths, first=0, wall=10.0, device=("cpu", 2), verifiers=1) -> dict:
        """Make a responses part; a negative length is an answer cut at that many tokens."""
        rows = [
            {"prompt_id": f"{rank:032x}", "rank": first + rank, "messages": [], "seed": 0,
             "finish_reason": "stop" if length > 0 else "length", "prompt_tokens": 3,
             "response_tokens": abs(length), "content": "x", "reasoning": "", "status": "ok"}
            for rank, length in enumerate(lengths)
        ]  # fmt: skip
        part = make_part(self.root, "responses", {"name": name}, rows, tables.RESPONSES,
                         "responses.parquet")  # fmt: skip
        path = Path(part["folder"]) / "manifest.json"
        changed = {"wall_seconds": wall, "device": {"type": device[0], "count": device[1]}}
        store.write_json(path, json.loads(path.read_text()) | changed)
        stop = first + len(lengths)
        return part | {"first": first, "stop": stop, "verifiers": verifiers}

    def strategy(self, name, responses, relation="self", start=None, own=None, verifier="v"):
        samples = sum(p["stop"] - p["first"] for p in responses)
        own = samples if own is None and relation == "self" else own or 0
        self.plan["strategies"].append({
            "verifier": verifier, "strategy": name, "relation": relation,
            "teachers": [f"of-{name}"],
            "start": start and {"strategy": start[0], "epoch": start[1]}, "samples": samples,
            "own_samples": own, "responses": responses})  # fmt: skip

    def train(self, name, epoch, chain=(), tokens=1000, benchmarked=True, listed=True,
              verifier="v", **extra) -> dict:  # fmt: skip
        """Make a speculators part; one that is not listed is a start of others only."""
        found = {
            "epoch": epoch, "steps": 20, "tokens": tokens, "rows": 10, "train_seconds": 2.5,
            "validation": {"validation": {"loss": 5.0 - epoch}}, "resolved_settings": {},
            "vocab_coverage": {"train": 0.9, "validation": 0.8},
        } | extra  # fmt: skip
        lines = ["epoch,step,loss", *(f"{epoch},{s},{9 / s}" for s in range(1, 21))]
        texts = {"training.json": json.dumps(found), "steps.csv": "\n".join(lines)}
        settings = {"name": name, "epoch": epoch, "verifier": verifier, "for": self.algorithm}
        part = make_part(self.root, "speculators", settings, texts=texts)
        self.plan["index"].append({"stage": "speculators", "name": name} | part)
        labels = self.labels(name, epoch, verifier)
        entry = labels | part | {"chain": [*chain, part["key"]], "benchmarked": benchmarked}
        if listed:
            self.plan["training"].append(entry)
        return entry

    def labels(self, name, epoch, verifier="v") -> dict:
        return {
            "verifier": verifier, "model": f"model of {verifier}", "algorithm": self.algorithm,
            "strategy": name, "epoch": epoch, "schedule_epochs": 4,
        }  # fmt: skip

    def measure(self, name, epoch, skill, k=K, verifier="v") -> None:
        """Make a checkpoint's acceptance parts; prompts differ in difficulty, alike for all."""
        for workload, rows in self.prompts.items():
            generator = random.Random(f"{name}{epoch}{workload}{verifier}{self.algorithm}")
            made = []
            for row in rows:
                ease = random.Random(row["prompt_id"]).uniform(-0.2, 0.2)
                made.append(request(row, generator, k, min(max(skill + ease, 0.02), 0.98), 1))
            settings = {"kind": "acceptance", "temperature": 0, "max_tokens": 64, "k": k,
                        "concurrency": 32}  # fmt: skip
            keyed = settings | {"workload": workload, "epoch": epoch, "name": name,
                                "verifier": verifier, "algorithm": self.algorithm}  # fmt: skip
            part = make_part(self.root, "benchmarks", keyed, made, acceptance.REQUESTS,
                             "requests.parquet")  # fmt: skip
            self.plan["acceptance"].append(
                self.labels(name, epoch, verifier) | settings | part
                | {"workload": workload, "role": "checkpoint"}
            )  # fmt: skip

    def alias(self, name, other, epoch) -> None:
        """Give a checkpoint a second name: equal keys."""
        for kind in ("acceptance", "training"):
            for entry in list(self.plan[kind]):
                if (entry["strategy"], entry["epoch"]) == (other, epoch):
                    self.plan[kind].append(entry | {"strategy": name})

    def run(self, name="out", plan=None) -> dict[str, list[dict]]:
        out = self.root / name
        store.write_json(out / "plan.json", plan or self.plan)
        answers.main(Namespace(plan=out / "plan.json", out=out))
        return {
            t: pq.read_table(out / f"{t}.parquet").to_pylist() for t in ("strategies", "epochs")
        }

    def entry(self, name, epoch, workload) -> dict:
        return find(self.plan["acceptance"], strategy=name, epoch=epoch, workload=workload)

    def report(self) -> tuple[Path, str]:
        """Make tables and report; return the folder of figures and the page."""
        found = self.root / "out"
        self.run()
        make.main(Namespace(plan=found / "plan.json", out=found, index=found / "index.csv"))
        out = self.root / "report"
        report.main(Namespace(plan=found / "plan.json", tables=found, figures=out,
                              out=out / "report.html"))  # fmt: skip
        return out, (out / "report.html").read_text()


def slow_difference(study: Study, one: tuple, other: tuple) -> dict[str, tuple]:
    """Recompute paired differences with loops; the stream as the documentation says."""
    draws, points = {}, {}
    for workload in study.plan["workloads"]:
        name, key = workload["workload"], json.loads(
            (Path(workload["folder"]) / "manifest.json").read_text())["key"]  # fmt: skip
        rows = [
            {
                r["prompt_id"]: r
                for r in requests_of(study.entry(*side, name))
                if r["status"] == "ok"
            }
            for side in (one, other)
        ]
        both = sorted(p for p in rows[0] if p in rows[1])
        if not both:
            continue

        def length(own, chosen, both=both):
            drafts = sum(own[both[i]]["drafts"] for i in chosen)
            return 1 + sum(own[both[i]]["accepted"] for i in chosen) / drafts

        generator = np.random.default_rng(int(digest([SEED, key]), 16))
        chosen = generator.integers(0, len(both), size=(RESAMPLES, len(both))).tolist()
        points[name] = length(rows[0], range(len(both))) - length(rows[1], range(len(both)))
        draws[name] = [length(rows[0], c) - length(rows[1], c) for c in chosen]
    points["macro"] = sum(points.values()) / len(points)
    draws["macro"] = [sum(d) / len(d) for d in zip(*draws.values(), strict=True)]
    return {n: (points[n], *np.percentile(draws[n], [2.5, 97.5])) for n in points}


def estimate(row: dict, name: str) -> tuple:
    return tuple(row[name + end] for end in ("", "_ci_low", "_ci_high"))


@pytest.fixture
def study(tmp_path) -> Study:
    """Self at epochs 1 to 3, a cross teacher, a hybrid that starts from it, an alias."""
    made = Study(tmp_path, {"coding": 12, "qa": 8})
    own = made.responses("own", [10, 20, -30, 40])
    other = made.responses("other", [7, -9], wall=100.0, device=("H200", 1), verifiers=4)
    other_2 = made.responses("other-2", [5, 5, -5], 2, 50.0, ("A100", 2), verifiers=2)
    made.strategy("self", [own])
    made.strategy("cross", [other, other_2 | {"stop": 4}], "cross_family")
    made.strategy("hybrid", [own | {"stop": 2}], start=("cross", 2))
    made.strategy("copy", [own])
    chain = []
    for epoch, skill in ((1, 0.3), (2, 0.5), (3, 0.5)):
        chain = made.train("self", epoch, chain, 100 + epoch)["chain"]
        made.measure("self", epoch, skill)
    first = made.train("cross", 1, tokens=1000, benchmarked=False)
    second = made.train("cross", 2, first["chain"], 2000)
    made.measure("cross", 2, 0.25)
    made.train("hybrid", 1, second["chain"], 30)
    made.measure("hybrid", 1, 0.45)
    made.alias("copy", "self", 2)
    return made


def test_strategies_equal_slow_loops(study):
    rows = study.run()["strategies"]
    assert [(r["strategy"], r["epoch"]) for r in rows] == [
        ("self", 1), ("self", 2), ("self", 3), ("cross", 2), ("hybrid", 1), ("copy", 2),
    ]  # fmt: skip
    for name, epoch, self_epoch in (("cross", 2, 2), ("hybrid", 1, 1)):
        row = find(rows, strategy=name, epoch=epoch)
        expected = slow_difference(study, (name, epoch), ("self", self_epoch))
        assert row["self_epoch"] == self_epoch
        for workload, column in (
            ("macro", "self_difference"), ("coding", "coding_self_difference"),
            ("qa", "qa_self_difference"),
        ):  # fmt: skip
            assert estimate(row, column) == pytest.approx(expected[workload])
        other = find(rows, strategy="self", epoch=self_epoch)
        assert row["self_difference"] == pytest.approx(row["macro"] - other["macro"])
    # Pairing pays: the interval is narrower than that of two separate measurements.
    row, other = (find(rows, strategy=s, epoch=2) for s in ("cross", "self"))
    width = lambda r, n: r[f"{n}_ci_high"] - r[f"{n}_ci_low"]  # noqa: E731
    assert width(row, "self_difference") < width(row, "macro") + width(other, "macro")


def test_lengths_equal_those_of_the_acceptance_table(study):
    rows, out = study.run()["strategies"], study.root / "out"
    make.main(Namespace(plan=out / "plan.json", out=out, index=out / "index.csv"))
    lengths = pq.read_table(out / "acceptance.parquet").to_pylist()
    for row in rows:
        for workload in ("coding", "qa", "macro"):
            other = find(lengths, strategy=row["strategy"], epoch=row["epoch"], workload=workload)
            names = ("acceptance_length", "ci_low", "ci_high")
            assert estimate(row, workload) == tuple(other[n] for n in names)
        assert (row["prompts"], row["flagged"], row["vllm"]) == tuple(
            other[c] for c in ("prompts", "flagged", "vllm"))  # fmt: skip


def test_costs_and_data_count_a_start_once(study):
    rows = study.run()["strategies"]
    hybrid, cross, plain = (
        find(rows, strategy=s, epoch=e) for s, e in (("hybrid", 1), ("cross", 2), ("self", 3))
    )
    assert plain["training_tokens"] == 101 + 102 + 103 and plain["train_seconds"] == 7.5
    assert cross["training_tokens"] == 3000
    assert hybrid["training_tokens"] == 3030 and hybrid["train_seconds"] == 7.5
    assert (plain["teacher_seconds"], plain["teacher_device"], plain["teacher_verifiers"]) == (
        20.0, "cpu", 1)  # fmt: skip
    assert (cross["teacher_seconds"], cross["teacher_device"]) == (200.0, "A100, H200")
    assert (cross["teacher_verifiers"], cross["teacher_seconds_per_verifier"]) == (2, 75.0)
    assert (hybrid["teacher_seconds"], hybrid["teacher_device"]) == (220.0, "A100, H200, cpu")
    assert (hybrid["teacher_verifiers"], hybrid["teacher_seconds_per_verifier"]) == (1, 95.0)
    assert (plain["mean_response_tokens"], plain["truncated_share"]) == (25.0, 0.25)
    # 7, -9 and the two of the second part that lie in the range; the hybrid's own data only.
    assert (cross["mean_response_tokens"], cross["truncated_share"]) == (6.5, 0.25)
    assert (hybrid["mean_response_tokens"], hybrid["truncated_share"]) == (15.0, 0.0)
    assert (hybrid["start"], hybrid["relation"], hybrid["teachers"]) == (
        "cross/epoch-2", "self", "of-hybrid")  # fmt: skip
    assert (hybrid["own_samples"], cross["own_samples"], cross["start"]) == (2, 0, None)
    assert hybrid["vocab_coverage"] == 0.9 and hybrid["samples"] == 2
    assert hybrid["key"] == find(study.plan["training"], strategy="hybrid")["key"]


def test_a_start_outside_the_study_is_found_in_the_index(tmp_path):
    study = Study(tmp_path, {"qa": 4})
    part = study.responses("r", [3])
    study.strategy("hidden", [part], "cross_family")
    study.strategy("hybrid", [part], start=("hidden", 1))
    start = study.train("hidden", 1, tokens=5, listed=False)
    study.train("hybrid", 1, start["chain"], 6)
    study.measure("hybrid", 1, 0.5)
    (row,) = study.run()["strategies"]
    assert row["training_tokens"] == 11
    assert row["teacher_seconds"] == 20.0  # the same part twice: once
    assert row["self_difference"] is None and row["self_epoch"] is None
    text = (tmp_path / "out/answers.txt").read_text()
    assert "Nothing to compare with" in text


def test_an_alias_of_self_differs_by_exactly_nothing(study):
    row = find(study.run()["strategies"], strategy="copy")
    for name in ("self_difference", "coding_self_difference", "qa_self_difference"):
        assert estimate(row, name) == (0.0, 0.0, 0.0)
    assert row["key"] == find(study.plan["training"], strategy="self", epoch=2)["key"]


def test_order_of_the_plan_changes_no_number(study):
    first, shuffled = study.run("a"), dict(study.plan)
    for name in ("acceptance", "training", "workloads", "strategies", "index"):
        shuffled[name] = study.plan[name][::-1]
    other = study.run("b", shuffled)
    numbers = lambda rows: sorted(repr(sorted(r.items(), key=str)) for r in rows)  # noqa: E731
    for name in first:
        assert numbers(first[name]) == numbers(other[name])
    # Nor does what else is in the study.
    fewer = dict(study.plan, acceptance=[
        e for e in study.plan["acceptance"] if e["strategy"] in ("self", "cross")])  # fmt: skip
    smaller = study.run("c", fewer)["strategies"]
    assert find(smaller, strategy="cross") == find(first["strategies"], strategy="cross")
    assert first == study.run("d")
    for table in ("strategies.csv", "strategies.parquet", "epochs.csv", "answers.txt"):
        assert (study.root / "a" / table).read_bytes() == (study.root / "d" / table).read_bytes()


def test_a_prompt_that_one_side_failed_counts_for_neither(study):
    lost = requests_of(study.entry("cross", 2, "qa"))[3]["prompt_id"]

    def fail(rows):
        rows[3] = {"prompt_id": lost, "status": "error", "error": "timeout"}

    rewrite(study.entry("cross", 2, "qa"), fail)
    rewrite(study.entry("cross", 2, "coding"), lambda rows: rows.reverse())
    row = find(study.run()["strategies"], strategy="cross")
    expected = slow_difference(study, ("cross", 2), ("self", 2))
    assert estimate(row, "self_difference") == pytest.approx(expected["macro"])
    assert estimate(row, "qa_self_difference") == pytest.approx(expected["qa"])
    assert row["prompts"] == 19


def test_a_single_prompt_has_no_interval(tmp_path):
    study = Study(tmp_path, {"coding": 6, "qa": 1})
    part = study.responses("r", [3])
    for name, relation in (("self", "self"), ("cross", "cross_family")):
        study.strategy(name, [part], relation)
        for epoch in (1, 2):
            study.train(name, epoch)
            study.measure(name, epoch, 0.5)
    study.alias("copy", "self", 1)
    study.strategy("copy", [part])
    found = study.run()
    row = find(found["strategies"], strategy="cross", epoch=1)
    assert row["self_difference"] is not None
    assert estimate(row, "qa_self_difference")[1:] == (None, None)
    assert estimate(row, "self_difference")[1:] == (None, None)
    assert None not in estimate(row, "coding_self_difference")
    assert estimate(find(found["strategies"], strategy="copy"), "self_difference") == (0, 0, 0)
    for row in found["epochs"]:
        assert not row["suggested"] and row["gain_share"] is None and "too few" in row["reason"]
    assert "too few prompts to tell: self, cross" in (tmp_path / "out/answers.txt").read_text()


def test_lengths_at_another_k_do_not_compare(tmp_path):
    study = Study(tmp_path, {"qa": 6})
    part = study.responses("r", [3])
    study.strategy("self", [part])
    study.strategy("cross", [part], "cross_family")
    for name, k in (("self", 3), ("cross", 2)):
        study.train(name, 1)
        study.measure(name, 1, 0.5, k)
    row = find(study.run()["strategies"], strategy="cross")
    assert row["macro"] is not None and row["k"] == 2
    for name in ("self_difference", "qa_self_difference", "self_epoch"):
        assert row[name] is None
    study.measure("self", 1, 0.5, 2)  # measured at both, the fitting one is taken
    row = find(study.run()["strategies"], strategy="cross")
    assert row["self_epoch"] == 1 and row["self_difference"] is not None


def test_self_is_compared_at_its_last_epoch_when_the_same_was_not_measured(study):
    study.train("cross", 4)
    study.measure("cross", 4, 0.4)
    row = find(study.run()["strategies"], strategy="cross", epoch=4)
    assert row["self_epoch"] == 3
    expected = slow_difference(study, ("cross", 4), ("self", 3))["macro"]
    assert estimate(row, "self_difference") == pytest.approx(expected)
    assert "epoch 4 against epoch 3" in (study.root / "out/answers.txt").read_text()


def test_strategies_are_compared_at_the_latest_epoch_that_all_have(tmp_path):
    study = Study(tmp_path, {"qa": 12})
    part = study.responses("r", [3])
    study.strategy("self", [part])
    study.strategy("cross", [part], "cross_family")
    study.strategy("late", [part], "cross_family")
    for name, epochs in (("self", 4), ("cross", 3), ("late", 2)):
        for epoch in range(1, epochs + 1):
            study.train(name, epoch)
            if (name, epoch) != ("late", 1):
                study.measure(name, epoch, 0.4 + 0.1 * epoch)
    rows = study.run()["strategies"]
    (equal,) = results.equal_epochs(rows).values()
    assert [(r["strategy"], r["epoch"]) for r in equal] == [("self", 2), ("cross", 2), ("late", 2)]
    (last,) = results.last_epochs(rows).values()
    assert {(r["strategy"], r["epoch"]) for r in last} == {("self", 4), ("cross", 3), ("late", 2)}
    text = (study.root / "out/answers.txt").read_text()
    assert "Against self, all after epoch 2: " in text and "after epoch 4" in text

    without = [r for r in rows if (r["strategy"], r["epoch"]) != ("late", 2)]
    without.append(next(r for r in rows if r["strategy"] == "late") | {"epoch": 5})
    (equal,) = results.equal_epochs(without).values()
    assert {(r["strategy"], r["epoch"]) for r in equal} == {("self", 4), ("cross", 3), ("late", 5)}


def test_which_strategy_is_the_reference():
    row = lambda n, relation="self", start=None: {  # noqa: E731
        "strategy": n, "relation": relation, "start": start}  # fmt: skip
    assert results.reference([row("a"), row("self"), row("b")]) == "self"
    assert results.reference([row("x", "cross_family"), row("b"), row("a")]) == "b"
    assert results.reference([row("self", start="x/epoch-1"), row("a")]) == "a"
    assert results.reference([row("x", "mixture")]) is None


def slow_choice(epochs, gains):
    for epoch in epochs:
        if not any(gains[later, epoch][1] > 0 for later in epochs if later > epoch):
            return epoch


def test_epochs_equal_slow_loops(study):
    rows = study.run()["epochs"]
    assert [(r["strategy"], r["epoch"]) for r in rows] == [("self", e) for e in (1, 2, 3)]
    gains = {
        (b, a): slow_difference(study, ("self", b), ("self", a))["macro"]
        for a, b in itertools.combinations((1, 2, 3), 2)
    }
    lengths = {r["epoch"]: r["macro"] for r in rows}
    assert estimate(rows[0], "gain") == (None, None, None)
    assert estimate(rows[1], "gain") == pytest.approx(gains[2, 1])
    assert estimate(rows[2], "gain") == pytest.approx(gains[3, 2])
    assert gains[3, 1][1] > 0  # the fixture is made so
    for row in rows:
        share = (lengths[row["epoch"]] - lengths[1]) / (lengths[3] - lengths[1])
        assert row["gain_share"] == pytest.approx(share)
        assert row["validation_loss"] == 5.0 - row["epoch"]
    assert [r["epoch"] for r in rows if r["suggested"]] == [slow_choice([1, 2, 3], gains)] == [2]
    assert rows[1]["reason"] == (
        f"no later epoch is better: epoch 3 against 2 gives {gains[3, 2][0]:+.3f} "
        f"({gains[3, 2][1]:.3f} to {gains[3, 2][2]:.3f})"
    )
    assert rows[0]["reason"].startswith("a later epoch is better: epoch ")
    assert rows[2]["reason"].startswith("an earlier epoch is as good: epoch 3 against 2")


def test_epochs_that_were_skipped_and_order(tmp_path):
    study = Study(tmp_path, {"qa": 30})
    study.strategy("self", [study.responses("r", [3])])
    for epoch, skill in ((5, 0.7), (1, 0.2), (3, 0.45)):
        study.train("self", epoch)
        study.measure("self", epoch, skill)
    study.train("self", 2, benchmarked=False)
    rows = study.run()["epochs"]
    assert [(r["epoch"], r["suggested"]) for r in rows] == [(1, False), (3, False), (5, True)]
    assert rows[2]["reason"].startswith("the curve still rises, more epochs may pay: epoch 5 agai")
    expected = slow_difference(study, ("self", 5), ("self", 3))["macro"]
    assert estimate(rows[2], "gain") == pytest.approx(expected)
    text = (tmp_path / "out/answers.txt").read_text()
    assert "still rising at the last one measured: self (epoch 5)" in text


def test_the_rule_for_epochs_in_closed_cases():
    clear, none, worse = (0.1, 0.05, 0.2), (0.01, -0.02, 0.04), (-0.1, -0.2, -0.05)
    choose = lambda *rows: statistics.enough_epochs(  # noqa: E731
        [1, 2, 3], dict(zip([(2, 1), (3, 1), (3, 2)], rows, strict=True))
    )[0]
    assert choose(none, none, none) == 1
    assert choose(clear, clear, none) == 2
    assert choose(clear, clear, clear) == 3
    assert choose(none, clear, none) == 2  # epoch 1 is beaten by 3, 2 is not
    assert choose(worse, none, clear) == 1
    assert choose(clear, none, worse) == 2
    assert choose(clear, (0.1, None, None), none) is None
    generator = random.Random(2)
    for _ in range(50):
        gains = {}
        for a, b in itertools.combinations(range(1, 6), 2):
            point = generator.uniform(-1, 1)
            gains[b, a] = (point, point - 0.3, point + 0.3)
        chosen, reasons = statistics.enough_epochs(list(range(1, 6)), gains)
        assert chosen == slow_choice(range(1, 6), gains) and set(reasons) == set(range(1, 6))


def test_difference_in_closed_cases():
    low, high = np.array([[10, 30, 5, 5]] * 4), np.array([[10, 30, 15, 9]] * 4)
    found = statistics.difference({("a", "w"): (high, low)}, 100, 0)
    assert found["w"] == found["macro"] == (1.0, 1.0, 1.0)
    empty = np.zeros((4, 4), int)
    found = statistics.difference({("a", "w"): (high, low), ("b", "x"): (empty, low)}, 100, 0)
    assert found["x"] == (None, None, None) and found["macro"] == (1.0, 1.0, 1.0)
    found = statistics.difference({("a", "w"): (high, low), ("b", "x"): (high[:1], low[:1])}, 50, 0)
    assert found["x"] == (1.0, None, None) == found["macro"] and found["w"][1] == 1.0
    assert statistics.difference({}, 50, 0) == {"macro": (None, None, None)}


def test_paired_intervals_cover_the_truth_and_are_narrow():
    generator, hits, narrow = np.random.default_rng(0), 0, 0
    for trial in range(150):
        ease = generator.beta(4, 4, size=60) * 0.8
        drafts = np.full(60, 80)
        sides = []
        for gain in (0.1, 0.0):
            accepted = generator.binomial(drafts, ease + gain)
            sides.append(np.stack([drafts, drafts, accepted, accepted], axis=1))
        _, low, high = statistics.difference({(str(trial), "w"): (sides[0], sides[1])}, 300, 0)["w"]
        alone = statistics.summarise({(str(trial), "w"): sides[0]}, 300, 0)["pooled"]
        hits += low <= 0.1 <= high
        narrow += high - low < alone["ci_high"] - alone["ci_low"]
    assert 0.88 <= hits / 150 <= 0.99 and narrow > 140


def test_removed_responses_leave_cells_empty_and_damaged_ones_stop(study):
    other = study.plan["strategies"][1]["responses"][0]
    manifest = Path(other["folder"]) / "manifest.json"
    whole = manifest.read_text()
    manifest.unlink()
    rows = study.run()["strategies"]
    for name in ("cross", "hybrid"):
        row = find(rows, strategy=name)
        assert row["teacher_seconds"] is row["teacher_device"] is row["teacher_verifiers"] is None
    assert find(rows, strategy="cross")["mean_response_tokens"] is None
    assert find(rows, strategy="hybrid")["mean_response_tokens"] == 15.0
    assert find(rows, strategy="self", epoch=1)["teacher_seconds"] == 20.0
    manifest.write_text(json.dumps(json.loads(whole) | {"device": None}))
    with pytest.raises(UserError, match=re.escape(other["folder"])):
        study.run()
    manifest.write_text(whole)
    data = Path(other["folder"]) / "responses.parquet"
    data.write_bytes(b"\0" * data.stat().st_size)
    with pytest.raises(UserError, match=f"{re.escape(str(data))} is damaged"):
        study.run()
    data.unlink()
    with pytest.raises(UserError, match=f"{re.escape(str(data))} is missing"):
        study.run()


def test_a_plan_or_training_that_lacks_something_is_refused(study):
    plan = lambda **changed: study.plan | changed  # noqa: E731
    lacking = {k: v for k, v in study.plan.items() if k != "strategies"}
    with pytest.raises(UserError, match="lacks strategies"):
        study.run(plan=lacking)
    with pytest.raises(UserError, match=r"out/plan\.json lists no strategy cross of verifier v"):
        study.run(plan=plan(strategies=[
            s for s in study.plan["strategies"] if s["strategy"] != "cross"]))  # fmt: skip
    circle = [s | {"start": {"strategy": s["strategy"], "epoch": 1}}
              for s in study.plan["strategies"]]  # fmt: skip
    with pytest.raises(UserError, match="starts from itself"):
        study.run(plan=plan(strategies=circle))
    with pytest.raises(UserError, match=r"out/plan\.json benchmarks .* lists no training"):
        study.run(plan=plan(training=study.plan["training"][1:]))
    with pytest.raises(UserError, match=r"out/plan\.json lists no folder .* 0000"):
        training = [e | {"chain": ["0000", e["key"]]} for e in study.plan["training"]]
        study.run(plan=plan(training=training))
    study.train("hybrid", 2, tokens="many")
    with pytest.raises(UserError, match=r"training\.json: no number tokens"):
        study.run()


def test_workloads_with_names_that_columns_have(tmp_path):
    study = Study(tmp_path, {"prompts": 4, "key": 4})
    study.strategy("self", [study.responses("r", [3])])
    study.train("self", 1)
    study.measure("self", 1, 0.5)
    (row,) = study.run()["strategies"]
    assert row["prompts"] == 8 and row["key"] == study.plan["training"][0]["key"]
    lengths = [row[f"workload_{w}"] for w in ("prompts", "key")]
    assert row["macro"] == pytest.approx(sum(lengths) / 2)
    assert row["workload_key_self_difference"] == 0.0


def test_csv_equals_parquet_and_a_study_without_checkpoints_has_headers(study):
    found = study.run()
    for name, rows in found.items():
        with open(study.root / f"out/{name}.csv", newline="") as stream:
            read = list(csv.DictReader(stream))
        assert [{k: "" if v is None else str(v) for k, v in r.items()} for r in rows] == read
    bare = study.plan | {"acceptance": [], "training": [], "strategies": []}
    assert study.run("bare", bare) == {"strategies": [], "epochs": []}
    assert (study.root / "bare/strategies.csv").read_text().startswith("verifier,model")
    assert (study.root / "bare/answers.txt").read_text().startswith("No speculator was measured")


def test_answers_are_plain_and_short(study):
    study.plan["notices"] = ["Strategy x was left out: it has no teacher."]
    found = study.run()
    lines = (study.root / "out/answers.txt").read_text().splitlines()
    assert lines[0] == study.plan["notices"][0] and lines[1] == "v / eagle3:"
    best = find(found["strategies"], strategy="self", epoch=3)
    cross = find(found["strategies"], strategy="cross")
    hybrid = find(found["strategies"], strategy="hybrid")
    most = max((best, cross, hybrid, find(found["strategies"], strategy="copy")),
               key=lambda r: r["macro"])  # fmt: skip
    assert lines[2].startswith(f"  {most['strategy']} has the highest macro acceptance length: ")
    assert f"cross {cross['self_difference']:+.3f} (" in lines[3] and ", lower" in lines[3]
    assert lines[4] == "  Epochs: enough for self 2 of 3."
    many = [
        row | {"verifier": f"v{i}"} for i in range(40) for row in found["strategies"]
    ]  # fmt: skip
    lines = answers.gist(many, [], ["notice"])
    assert len(lines) == answers.LINES and lines[0] == "notice" and "strategies.csv" in lines[-1]
    medium = [r for r in many if r["verifier"] in {f"v{i}" for i in range(15)}]
    assert len(answers.gist(medium, [], [])) == 15


def test_the_report_answers_first(study):
    study.plan["notices"] = ["Strategy <x> was left out."]
    out, html = study.report()
    plain = re.sub(r"<style>.*?</style>|data:[^\"]*", " ", html, flags=re.S)
    order = [plain.index(text) for text in (
        "Strategy &lt;x&gt; was left out.", "highest macro acceptance length",
        "Which data to pay for</h2>", "How many epochs</h2>", "What was run</h2>",
        "Acceptance length</h2>")]  # fmt: skip
    assert order == sorted(order)
    assert "reference" in plain and "teacher seconds" in plain
    made = {p.stem for p in out.glob("*.png")}
    assert {"acceptance_by_strategy", "acceptance_by_own_samples"} <= made
    assert not re.search(r"(?i)\bacceptance\b(?! (length|rate))", re.sub(r"<[^>]*>", " ", plain))
    assert "Strategy <x> was left out." in (study.root / "out/summary.txt").read_text()
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    study.report()
    assert before == {p.name: p.read_bytes() for p in out.iterdir()}


def test_figures_are_drawn_only_where_there_is_something_to_compare(study):
    study.run()
    make.main(Namespace(plan=study.root / "out/plan.json", out=study.root / "out",
                        index=study.root / "out/index.csv"))  # fmt: skip
    found = report.read_tables(study.root / "out")
    figure = figures.draw_strategies(found)
    assert [a.get_title() for a in figure.axes] == ["v / eagle3 / after the last epochs"]
    # Two workloads and macro, four strategies, their last epochs, bars from 1.
    drawn = figure.axes[0].patches
    heights = sorted(1 + bar.get_height() for bar in drawn if np.isfinite(bar.get_height()))
    last = [find(found["strategies"], strategy=s, epoch=e)
            for s, e in (("self", 3), ("cross", 2), ("hybrid", 1), ("copy", 2))]  # fmt: skip
    assert heights == pytest.approx(sorted(r[w] for r in last for w in ("coding", "qa", "macro")))
    figure = figures.draw_own_samples(found)
    (line,) = [ln for ln in figure.axes[0].lines if ln.get_label().startswith("after")]
    start, hybrid = (find(found["strategies"], strategy=s) for s in ("cross", "hybrid"))
    assert line.get_xydata().tolist() == [[0, start["macro"]], [2, hybrid["macro"]]]
    alone = {n: [r for r in rows if r.get("strategy") == "self"] for n, rows in found.items()}
    assert figures.draw_strategies(alone) is None and figures.draw_own_samples(alone) is None


def test_sixteen_series_look_different():
    shown = figures.styles([f"s{i}" for i in range(16)])
    looks = {(s["facecolor"], s["hatch"]) for s in shown.values()}
    assert len(looks) == 16
    assert len({s["facecolor"] for s in list(shown.values())[:8]}) == 8
