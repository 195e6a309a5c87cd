"""Tables and report: statistics against slow obvious code, on synthetic parts."""

import csv
import itertools
import json
import random
import re
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts import answers, report
from scripts import tables as make
from scripts.lib import acceptance, statistics, store, tables
from scripts.lib.errors import UserError
from scripts.lib.identity import part_key
from scripts.lib.prompts import prompt_id

K, WORKLOADS = 3, ("coding", "qa")
WORDS = [f"w{i}" for i in range(400)]


def prompt(text: str) -> dict:
    messages = [{"role": "user", "content": text}]
    return {"prompt_id": prompt_id(messages), "rank": 0, "messages": messages, "source": "test"}


def make_part(root: Path, stage: str, settings: dict, *table, texts=None) -> dict:
    """Make a finished part of a table (rows, schema, name) and texts; return folder and key."""
    key = part_key(stage, settings, {})
    with store.Part(root / stage / key, stage, settings, {}) as part:
        files = list(texts or {})
        for file, text in (texts or {}).items():
            (part.folder / file).write_text(text)
        if table:
            rows, table_schema, name = table
            tables.write(part.folder / name, rows, table_schema, part.metadata())
            files.append(name)
        part.finish(files, facts={"rows": len(rows) if table else 0})
    return {"folder": str(part.folder), "key": key}


def request(row: dict, generator: random.Random, k: int, skill: float, text_seed: int) -> dict:
    """Return a plausible request; its output depends on prompt and `text_seed` only."""
    steps = [0] * (generator.randint(5, 20) if k else 0)
    for i in range(len(steps)):
        while steps[i] < k and generator.random() < skill:
            steps[i] += 1
    return {
        "prompt_id": row["prompt_id"], "status": "ok", "finish_reason": "stop", "prompt_tokens": 5,
        "output_ids": [text_seed, *row["prompt_id"].encode()[:4]], "drafts": len(steps),
        "drafted": k * len(steps), "accepted": sum(steps),
        "accepted_per_position": acceptance.per_position(steps, k), "seconds": 0.1,
    }  # fmt: skip


BARE = {
    "verifier": "v", "model": "package m 1", "algorithm": None, "strategy": None, "epoch": None,
    "schedule_epochs": None,
}  # fmt: skip
TRAINED = BARE | {"algorithm": "eagle3", "strategy": "self", "schedule_epochs": 4}
SHARED = " ".join(WORDS[:13])
OVERLAP = prompt(SHARED.upper().replace(" ", ", "))


def make_prompts(root: Path, stage: str, name: str, rows: list[dict]) -> dict:
    return make_part(root, stage, {"name": name}, rows, tables.PROMPTS, "prompts.parquet")


def make_acceptance(root: Path, labels: dict, serving: dict, workload: str, made: list) -> dict:
    settings = {"kind": "acceptance", "temperature": 0, "max_tokens": 64} | serving
    keyed = settings | {"workload": workload, "epoch": labels["epoch"]}
    part = make_part(root, "benchmarks", keyed, made, acceptance.REQUESTS, "requests.parquet")
    return labels | settings | {"workload": workload} | part


def make_latency(root: Path, labels: dict, k: int, concurrency: int) -> dict:
    """A part whose tokens take 10 ms per request in flight, 8 ms with a speculator."""
    base = (8.0 if k else 10.0) * concurrency
    numbers = {"median": base, "mean": base, "p95": 2 * base, "p99": 3 * base}
    summary = dict.fromkeys(("ttft_ms", "itl_ms", "latency_ms"), numbers)
    summary |= {"requests": 4, "failed": 0, "incomplete": 1, "output_tokens_per_s": 1000 / base}
    settings = {"kind": "latency", "k": k, "concurrency": concurrency, "hardware": "cpu"}
    settings |= {"temperature": 0, "max_tokens": 48}
    part = make_part(root, "benchmarks", settings, texts={"latency.json": json.dumps(summary)})
    return labels | settings | {"workload": "coding"} | part


def make_training(root: Path, labels: dict) -> dict:
    epoch = labels["epoch"]
    first = 200 * (epoch - 1) + 1
    lines = [f"{epoch},{step},{10 / (1 + 0.02 * step)}" for step in range(first, first + 200)]
    found = {
        "epoch": epoch, "steps": 200, "tokens": 5000, "supervised_tokens": 3000, "rows": 99,
        "train_seconds": 12.5, "train_loss": 5.0, "lr_at_end": 1e-4,
        "resolved_settings": {"seed": 0, "schedule_epochs": 4},
        "validation": {
            "validation": {"loss": 4.5 - epoch, "full_acc_0": 0.1},
            "own": {"loss": 5.5 - epoch},
        },
        "expected_acceptance_length": {"validation": 1.7, "own": 1.4},
        "accuracy_by_position": {"validation": [0.5, 0.2], "own": [0.4]},
    }  # fmt: skip
    texts = {
        "training.json": json.dumps(found),
        "steps.csv": "\n".join(["epoch,step,loss", *lines]),
    }
    part = make_part(root, "speculators", {"epoch": epoch}, texts=texts)
    return labels | part | {"chain": [part["key"]], "benchmarked": True}


@pytest.fixture
def plan(tmp_path) -> dict:
    """Two epochs, two workloads, one overlap, one failed request, one differing output."""
    generator = random.Random(1)
    sets = {
        w: [prompt(f"{w} {' '.join(generator.sample(WORDS, 20))}") for _ in range(n)]
        for w, n in zip(WORKLOADS, (12, 4), strict=True)
    }
    sets["coding"][0] = OVERLAP
    pool = [prompt(f"before it {SHARED} after"), prompt("hello")]
    result = {
        "study": "synthetic", "seed": 7,
        "bench": {"bootstrap_samples": 300, "min_prompts": 5, "overlap_ngram": 13},
        "acceptance": [], "latency": [], "training": [],
        "strategies": [{
            "verifier": "v", "strategy": "self", "relation": "self", "teachers": ["v"],
            "start": None, "samples": 99, "own_samples": 99, "responses": []}],
        "pools": [{"pool": "p"} | make_prompts(tmp_path, "prompts", "p", pool)],
        "workloads": [
            {"workload": w} | make_prompts(tmp_path, "workloads", w, rows)
            for w, rows in sets.items()
        ],
    }  # fmt: skip
    asked = [(BARE, 0, 32, "baseline"), (BARE, 0, 8, "control")]
    asked += [(TRAINED | {"epoch": e}, K, 32, "checkpoint") for e in (1, 2)]
    for labels, k, concurrency, role in asked:
        serving = {"k": k, "concurrency": concurrency}
        for workload, rows in sets.items():
            skill = 0.2 + 0.2 * (labels["epoch"] or 0)
            made = [request(r, generator, k, skill, 1) for r in rows]
            if labels["epoch"] == 2 and workload == "coding":
                made[1]["output_ids"] = [9]
                made[2] = {"prompt_id": rows[2]["prompt_id"], "status": "error", "error": "timeout"}
            entry = make_acceptance(tmp_path, labels, serving, workload, made)
            result["acceptance"].append(entry | {"role": role})
        if role == "baseline" or labels["epoch"] == 2:
            result["latency"] += [make_latency(tmp_path, labels, k, c) for c in (1, 8)]
        if k:
            result["training"].append(make_training(tmp_path, labels))
    result["index"] = [
        {"stage": "benchmarks", "name": "n", "key": e["key"], "folder": e["folder"]}
        for e in result["acceptance"]
    ]
    return result


def run_tables(root: Path, plan: dict, name: str = "out") -> dict[str, list[dict]]:
    """Write the tables of a plan and return them."""
    out = root / name
    store.write_json(out / "plan.json", plan)
    make.main(Namespace(plan=out / "plan.json", out=out, index=out / "index.csv"))
    answers.main(Namespace(plan=out / "plan.json", out=out))
    return {t: pq.read_table(out / f"{t}.parquet").to_pylist() for t in (*report.TABLES, "index")}


def requests_of(entry: dict) -> list[dict]:
    return pq.read_table(Path(entry["folder"]) / "requests.parquet").to_pylist()


def find(rows: list[dict], **labels) -> dict:
    (row,) = [r for r in rows if all(r[k] == v for k, v in labels.items())]
    return row


def test_rows_equal_plain_sums_and_plain_loop_bootstrap(plan, tmp_path):
    rows = run_tables(tmp_path, plan)["acceptance"]
    assert [(r["epoch"], r["workload"]) for r in rows] == [
        (e, w) for e in (1, 2) for w in (*WORKLOADS, "macro", "pooled")
    ]
    overlap = OVERLAP["prompt_id"]
    draws, lengths = {}, {}
    for entry in (e for e in plan["acceptance"] if e["epoch"] == 2):
        kept = [r for r in requests_of(entry) if r["prompt_id"] != overlap and r["status"] == "ok"]
        row = find(rows, epoch=2, workload=entry["workload"])
        drafts, accepted = sum(r["drafts"] for r in kept), sum(r["accepted"] for r in kept)
        lengths[entry["workload"]] = row["acceptance_length"]
        assert row["acceptance_length"] == pytest.approx(1 + accepted / drafts)
        assert row["acceptance_rate"] == pytest.approx(accepted / sum(r["drafted"] for r in kept))
        assert sum(row[f"position_{i}"] for i in (1, 2, 3)) == pytest.approx(accepted / drafts)
        assert row["prompts"] + row["failed"] + row["dropped_overlap"] == len(requests_of(entry))
        draws[entry["workload"]] = [
            (sum(kept[i]["drafts"] for i in chosen), sum(kept[i]["accepted"] for i in chosen))
            for chosen in statistics.resample_indices(len(kept), 300, 7, entry["key"]).tolist()
        ]
        low, high = np.percentile([1 + a / d for d, a in draws[entry["workload"]]], [2.5, 97.5])
        assert (row["ci_low"], row["ci_high"]) == (pytest.approx(low), pytest.approx(high))
    coding = find(rows, epoch=2, workload="coding")
    assert (coding["prompts"], coding["failed"], coding["dropped_overlap"]) == (10, 1, 1)
    pairs = list(zip(draws["coding"], draws["qa"], strict=True))
    macro, pooled = (find(rows, epoch=2, workload=w) for w in ("macro", "pooled"))
    assert macro["acceptance_length"] == pytest.approx(sum(lengths.values()) / 2)
    assert pooled["acceptance_length"] == pytest.approx(1 + pooled["accepted"] / pooled["drafts"])
    expected = {
        "macro": [((1 + a[1] / a[0]) + (1 + b[1] / b[0])) / 2 for a, b in pairs],
        "pooled": [1 + (a[1] + b[1]) / (a[0] + b[0]) for a, b in pairs],
    }
    for row in (macro, pooled):
        low, high = np.percentile(expected[row["workload"]], [2.5, 97.5])
        assert (row["ci_low"], row["ci_high"]) == (pytest.approx(low), pytest.approx(high))
    flags = [find(rows, epoch=2, workload=w)["flagged"] for w in (*WORKLOADS, "macro", "pooled")]
    assert flags == [False, True, True, False]
    assert macro["samples"] == 99 and coding["vllm"] and macro["vllm"] == coding["vllm"]


def test_bootstrap_closed_cases():
    same = np.array([[10, 30, 5, 3, 1, 1]] * 4)
    one = statistics.summarise({("a", "w"): same}, 200, 0)
    assert (
        one["a", "w"]["ci_low"]
        == one["a", "w"]["ci_high"]
        == one["macro"]["acceptance_length"]
        == 1.5
    )
    two = np.array([[10, 10, 0, 0], [10, 10, 10, 10]])  # lengths 1 and 2, each alone in 1/4
    both = statistics.summarise({("a", "w"): two}, 2000, 0)["a", "w"]
    assert (both["ci_low"], both["acceptance_length"], both["ci_high"]) == (1.0, 1.5, 2.0)
    drawn = 1 + np.divide(*statistics.resampled_sums(two, 4000, 0, "a").T[[2, 0]])
    shares = [np.mean(drawn == v) for v in (1, 1.5, 2)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.03)
    single = statistics.summarise({("a", "w"): two[:1], ("b", "x"): two}, 50, 0)
    assert single["a", "w"]["ci_low"] is None and single["macro"]["ci_low"] is None
    nothing = statistics.summarise({("a", "w"): np.zeros((3, 4), int), ("b", "x"): two}, 50, 0)
    assert nothing["a", "w"]["acceptance_length"] is None
    assert nothing["macro"]["acceptance_length"] == nothing["pooled"]["acceptance_length"] == 1.5


def test_interval_covers_the_truth_about_as_often_as_it_says():
    generator, hits = np.random.default_rng(0), 0
    for trial in range(200):
        skill = generator.beta(4, 4, size=60)  # prompts differ, mean 1/2
        drafts = np.full(60, 20)
        accepted = generator.binomial(drafts, skill)
        values = np.stack([drafts, drafts, accepted, accepted], axis=1)
        row = statistics.summarise({(str(trial), "w"): values}, 300, 0)["pooled"]
        hits += row["ci_low"] <= 1.5 <= row["ci_high"]
    assert 0.88 <= hits / 200 <= 0.99


def test_overlap_equals_brute_force():
    generator = random.Random(3)
    text = lambda: " ".join(generator.choice("ab") for _ in range(generator.randint(1, 12)))  # noqa: E731
    prompts, pool = [prompt(text()) for _ in range(60)], [prompt(text()) for _ in range(15)]
    for length in (1, 4, 6):
        expected = set()
        for p, q in itertools.product(prompts, pool):
            a, b = (r["messages"][0]["content"].split() for r in (p, q))
            common = any(
                a[i : i + length] == b[j : j + length]
                for i in range(len(a) - length + 1) for j in range(len(b) - length + 1)
            )  # fmt: skip
            if common or p["prompt_id"] == q["prompt_id"]:
                expected.add(p["prompt_id"])
        found = statistics.overlapping(prompts, iter(pool), length)
        assert found == expected and (
            length == 1 or 0 < len(found) < len({p["prompt_id"] for p in prompts})
        )
    folded = statistics.overlapping(
        [prompt("Say: HELLO, big world!")], [prompt("hello big, World")], 3
    )
    assert len(folded) == 1


def test_lossless_latency_training(plan, tmp_path):
    found = run_tables(tmp_path, plan)
    row = find(found["lossless"], epoch=2, workload="coding")
    assert (row["compared"], row["identical"], row["control_compared"]) == (11, 10, 12)
    row = find(found["lossless"], epoch=2, workload="pooled")
    assert (row["identical"], row["identical_share"], row["control_identical"]) == (14, 14 / 15, 16)
    bare, fast = (find(found["latency"], epoch=e, concurrency=8) for e in (None, 2))
    assert (fast["itl_speedup"], fast["throughput_speedup"]) == (pytest.approx(1.25),) * 2
    assert bare["itl_speedup"] is None and fast["ttft_ms_p99"] == 3 * 64 and fast["incomplete"] == 1
    row = find(found["training"], epoch=2)
    assert (row["val_acc_1"], row["val_acc_2"], row["validation_loss"]) == (0.5, 0.2, 2.5)
    assert (row["own_acc_1"], row["own_loss"], row["own_expected_acceptance_length"]) == (
        0.4,
        3.5,
        1.4,
    )
    assert len(found["index"]) == len(plan["index"])
    for entry in plan["acceptance"]:
        entry["temperature"] = 0.7  # sampled text cannot be compared
    row = find(run_tables(tmp_path, plan)["lossless"], epoch=2, workload="pooled")
    assert row["compared"] == 0 and row["identical_share"] is None


def test_order_of_the_plan_orders_rows_and_changes_no_number(plan, tmp_path):
    first = run_tables(tmp_path, plan, "a")
    again = run_tables(tmp_path, plan, "b")
    for name in (*report.TABLES, "index"):
        for suffix in ("csv", "parquet"):
            assert (tmp_path / f"a/{name}.{suffix}").exists() or (name, suffix) == ("index", "csv")
            assert (tmp_path / f"a/{name}.{suffix}").read_bytes() == (
                tmp_path / f"b/{name}.{suffix}").read_bytes()  # fmt: skip
    assert first == again
    shuffled = plan | {}
    for name in ("acceptance", "latency", "training", "workloads"):
        shuffled[name] = plan[name][::-1]
    other = run_tables(tmp_path, shuffled, "c")
    numbers = lambda rows: sorted(repr(sorted(r.items())) for r in rows)  # noqa: E731
    for name in report.TABLES:  # epochs of one group are always in ascending order
        assert first[name] != other[name] or name == "epochs"
        assert numbers(first[name]) == numbers(other[name])


def test_csv_equals_parquet(plan, tmp_path):
    rows = run_tables(tmp_path, plan)["acceptance"]
    with open(tmp_path / "out/acceptance.csv", newline="") as stream:
        read = list(csv.DictReader(stream))
    assert [{k: "" if v is None else str(v) for k, v in r.items()} for r in rows] == read


def rewrite(entry: dict, change) -> None:
    """Change the requests of a finished part, with a manifest that fits."""
    folder, rows = Path(entry["folder"]), requests_of(entry)
    change(rows)
    path = folder / "requests.parquet"
    meta = {k.decode(): v.decode() for k, v in pq.read_schema(path).metadata.items()}
    tables.write(path, rows, acceptance.REQUESTS, meta)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["requests.parquet"]["bytes"] = path.stat().st_size
    manifest["facts"]["rows"] = len(rows)
    (folder / "manifest.json").write_text(json.dumps(manifest))


CHANGES = {
    "fewer": lambda rows: rows.pop(),
    "twice": lambda rows: rows.__setitem__(0, rows[1]),
    "other": lambda rows: rows[0].update(prompt_id="0" * 32),
    "sum": lambda rows: rows[-1].update(accepted=rows[-1]["accepted"] + 1),
    "empty": lambda rows: rows[-1].update(drafts=None),
    "positions": lambda rows: rows[-1].update(accepted_per_position=[0]),
    "no output": lambda rows: rows[-1].update(output_ids=None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_wrong_requests_are_refused(plan, tmp_path, name):
    entry = plan["acceptance"][-1]
    rewrite(entry, CHANGES[name])
    with pytest.raises(UserError, match=re.escape(entry["folder"])):
        run_tables(tmp_path, plan)


def test_damaged_files_are_refused(plan, tmp_path):
    path = Path(plan["acceptance"][-1]["folder"]) / "requests.parquet"
    whole = path.read_bytes()
    for content in (whole[:-100], b"\0" * len(whole)):
        path.write_bytes(content)
        with pytest.raises(UserError, match=re.escape(str(path))):
            run_tables(tmp_path, plan)
    path.write_bytes(whole)
    wrong = plan | {"acceptance": [plan["acceptance"][0] | {"key": "0" * 16}]}
    with pytest.raises(UserError, match="expected the acceptance part"):
        run_tables(tmp_path, wrong)
    plan["acceptance"][0] |= {c: plan["latency"][0][c] for c in ("folder", "key")}
    with pytest.raises(UserError, match="found latency"):
        run_tables(tmp_path, plan)
    with pytest.raises(UserError, match="does not exist"):
        statistics.read_plan(tmp_path / "none.json")


def run_report(root: Path, name: str) -> Path:
    out = root / name
    report.main(Namespace(plan=root / "out/plan.json", tables=root / "out", figures=out,
                          out=out / "report.html"))  # fmt: skip
    return out


def test_report_is_whole_offline_and_repeatable(plan, tmp_path):
    found = run_tables(tmp_path, plan)
    first = run_report(tmp_path, "r")
    html = (first / "report.html").read_text()
    before = {p.name: p.read_bytes() for p in first.iterdir()}
    run_report(tmp_path, "r")
    assert before == {p.name: p.read_bytes() for p in first.iterdir()}
    assert len(before) == 9
    macro = find(found["acceptance"], epoch=2, workload="macro")
    assert f"acceptance length of {macro['acceptance_length']:.3f}" in html
    assert "14 of 15 greedy outputs" in html and "1.25 times as fast" in html
    assert not re.search(r"(src|href)=\"(?!data:)|url\(|<script|<link", html)
    plain = re.sub(r"<[^>]*>|data:[^\"]*", " ", html)
    assert not re.search(r"(?i)\bacceptance\b(?! (length|rate))", plain)


def test_study_without_latency_and_without_checkpoints(plan, tmp_path):
    bare = plan | {
        "acceptance": [e for e in plan["acceptance"] if e["role"] != "checkpoint"],
        "latency": [], "training": [],
    }  # fmt: skip
    found = run_tables(tmp_path, bare)
    assert not found["acceptance"] and (tmp_path / "out/latency.csv").read_text().startswith(
        "verifier"
    )
    assert [p.name for p in run_report(tmp_path, "r").iterdir()] == ["report.html"]
