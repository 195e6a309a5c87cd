"""Costs and economics: every number against slow obvious code or a simulation."""

import itertools
import json
import math
import random
from argparse import Namespace
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from helpers import make_plan
from test_tables import find, make_latency, run_tables
from test_tables import plan as plan  # noqa: PLC0414  (a fixture)

from scripts import economics as program
from scripts.lib import costs, economics, store
from scripts.lib.errors import UserError
from scripts.lib.identity import CONTRACTS
from scripts.lib.labels import study_labels

START = 1_800_000_000  # seconds since 1970
SETTINGS = {"prices": {"h100": 3.0, "cpu": 0.5}, "currency": "EUR", "gpus": 12}
H100, CPU = "NVIDIA H100 80GB HBM3", "cpu"


def at(second: int) -> str:
    return datetime.fromtimestamp(START + second, UTC).isoformat(timespec="seconds")


def finish(node, start=0, seconds=10, device=(CPU, 2), earlier=(), host="n1", **facts) -> None:
    """Write the manifest of a node of a plan, as a job would have."""
    kept = [{"start": at(s), "seconds": n, "host": h} for s, n, h in earlier]
    wall = seconds + sum(a["seconds"] for a in kept)
    store.write_json(Path(node.manifest), {
        "stage": node.stage, "contract": CONTRACTS[node.stage], "key": node.key,
        "settings": node.settings, "inputs": node.inputs, "counts": {}, "facts": facts,
        "files": {"a.bin": {"bytes": 7, "sha256": ""}, "b/c.bin": {"bytes": 5, "sha256": ""}},
        "device": {"type": device[0], "count": device[1]}, "host": host, "versions": {},
        "start": at(start), "end": at(start + seconds), "wall_seconds": wall,
        "earlier_attempts": kept,
    })  # fmt: skip


@pytest.fixture
def made(tmp_path):
    """A laid-out study whose every part is finished after some random time.

    Returns the plan, its labels, and node -> (start, seconds, devices).
    """
    laid, generator, times = make_plan(tmp_path), random.Random(3), {}
    jobs: dict = {}
    for number, node in enumerate(laid.all_nodes()):
        job, start = number, 1000 * number
        if node.stage in ("hidden_states", "benchmarks"):  # one job, parts end one by one
            job = laid.batch_folder(node)
            start = jobs.setdefault(job, start)
        device = (CPU, 2) if node.stage == "tokens" else (H100, 4)
        times[node] = start, generator.randint(1, 90), device, job
        finish(
            node, *times[node][:3], prompt_tokens=3, response_tokens=40, tokens=50, total_tokens=60
        )
    labels = study_labels(laid) | {"economics": SETTINGS}
    return laid, json.loads(json.dumps(labels)), times


def slow_seconds(times, nodes) -> dict[str, int]:
    """Device-seconds by device: every second in which a job ran counts once."""
    busy = defaultdict(set)
    for node in nodes:
        start, seconds, device, job = times[node]
        busy[job, device].update(range(start, start + seconds))
    result: dict[str, int] = defaultdict(int)
    for (_, (name, count)), seconds in busy.items():
        result[name] += len(seconds) * count
    return dict(result)


def readers(laid, responses) -> set[str]:
    """The verifiers with tokens of a responses part."""
    return {
        names[0] for t in laid.nodes("tokens") if t.parents["responses"] is responses
        for names in t.aliases
    }  # fmt: skip


def test_every_part_counts_once_and_jobs_by_the_time_they_ran(made):
    laid, labels, times = made
    rows = costs.cost_rows(labels, costs.open_parts(labels))
    for stage in {n.stage for n in laid.all_nodes()}:
        nodes, own = laid.nodes(stage), [r for r in rows if r["stage"] == stage]
        assert sum(r["parts"] for r in own) == len(nodes)
        assert sum(r["bytes"] for r in own) == 12 * len(nodes)
        expected = slow_seconds(times, nodes)
        assert sum(r["device_seconds"] for r in own) == pytest.approx(sum(expected.values()))
        hours = {H100: 3.0, CPU: 0.5}
        price = sum(seconds / 3600 * hours[d] for d, seconds in expected.items())
        assert sum(r["money"] for r in own) == pytest.approx(price)
    whole = slow_seconds(times, laid.all_nodes())
    for device in (H100, CPU):
        total = find(rows, stage="total", group=device)
        assert total["device_seconds"] == pytest.approx(whole[device])
    total = find(rows, stage="total", group="all")
    assert total["money"] == pytest.approx(whole[H100] / 3600 * 3 + whole[CPU] / 3600 * 0.5)
    assert (total["parts"], total["unknown_parts"]) == (len(laid.all_nodes()), 0)
    row = find(rows, stage="responses", group="large/p")
    assert (row["teacher"], row["pool"], row["verifier"]) == ("large", "p", None)
    assert (row["input_tokens"], row["output_tokens"]) == (3 * row["parts"], 40 * row["parts"])
    states = [r for r in rows if r["stage"] == "hidden_states"]
    shards = {laid.batch_folder(n) for n in laid.nodes("hidden_states")}
    assert sum(r["input_tokens"] for r in states) == 60 * len(shards)  # layers share a prefill


def test_what_sharing_a_teacher_saved(made):
    laid, labels, times = made
    rows = costs.cost_rows(labels, costs.open_parts(labels))
    expected: dict = defaultdict(lambda: [0.0, 0.0, 0])
    for node in laid.nodes("responses"):
        seconds, count = times[node][1] * 4, len(readers(laid, node))
        mine = expected["/".join(node.names[:2])]
        mine[0] += seconds / count
        mine[1] += seconds * count - seconds  # had every verifier asked for itself
        mine[2] = max(mine[2], count)
    assert {n: v[2] for n, v in expected.items()}["large/p"] == 2
    for group, (own, saved, most) in expected.items():
        row = find(rows, stage="responses", group=group)
        assert row["device_seconds_per_verifier"] == pytest.approx(own)
        assert row["device_seconds_saved"] == pytest.approx(saved)
        assert row["money_saved"] == pytest.approx(saved / 3600 * 3)
        assert row["verifiers"] == most
    saved = sum(v[1] for v in expected.values())
    total = find(rows, stage="total", group="all")
    assert saved > 0 and total["money_saved"] == pytest.approx(saved / 3600 * 3)


def ancestors(laid, node) -> set:
    """All nodes that a node was made from, itself included, models aside."""
    found, todo = set(), [node]
    while todo:
        one = todo.pop()
        if one in found or one.stage == "models":
            continue
        found.add(one)
        todo += one.all_parents()
        if one.stage == "speculators":
            todo += laid.training_states(one)
    return found


def test_a_checkpoint_costs_all_that_it_was_made_from(made):
    laid, labels, times = made
    lineage = costs.Lineage(labels, costs.open_parts(labels))
    kinds = set()
    for verifier, checkpoint in laid.trained():
        node = laid.speculator(verifier, *checkpoint)
        nodes = ancestors(laid, node)
        assert {p.key for p in lineage.of(node.key)} == {n.key for n in nodes}
        whole, shared, unknown = lineage.seconds(node.key)
        assert whole == pytest.approx(slow_seconds(times, nodes)) and unknown == 0
        saved = sum(
            times[n][1] * 4 * (1 - 1 / len(readers(laid, n))) for n in nodes
            if n.stage == "responses"
        )  # fmt: skip
        assert shared[H100] == pytest.approx(whole[H100] - saved)
        kinds.add(saved > 0)
    assert kinds == {True, False}


def test_parts_that_are_gone_are_unknown_and_not_free(made):
    laid, labels, _ = made
    gone = laid.nodes("hidden_states")[0]
    Path(gone.manifest).unlink()
    parts = costs.open_parts(labels)
    rows = costs.cost_rows(labels, parts)
    row = find(rows, stage="hidden_states", device=None)
    assert (row["parts"], row["unknown_parts"]) == (0, 1)
    assert row.get("money") is None and row.get("device_seconds") is None
    assert "not in the store" in row["note"]
    total = find(rows, stage="total", group="all")
    assert total["unknown_parts"] == 1 and total["note"].startswith("at least: 1 part")
    lineage = costs.Lineage(labels, parts)
    for verifier, checkpoint in laid.trained():
        node = laid.speculator(verifier, *checkpoint)
        assert lineage.seconds(node.key)[2] == (gone in ancestors(laid, node))


def test_an_unknown_price_is_empty_and_said_and_never_zero(made):
    _, labels, _ = made
    labels["economics"] = SETTINGS | {"prices": {"h100": 3.0}}
    rows = costs.cost_rows(labels, costs.open_parts(labels))
    row = find(rows, stage="tokens", group="small/large/p")
    assert row["money"] is None and row["price_per_hour"] is None and row["device_seconds"] > 0
    assert "no price is set for cpu" in row["note"]
    total = find(rows, stage="total", group="all")
    assert total["money"] is None and "no price is set for cpu" in total["note"]
    assert find(rows, stage="total", group=H100)["money"] > 0


@pytest.mark.parametrize("device, expected", [
    (H100, 2.5), ("NVIDIA A100-SXM4-80GB", 1.8), ("NVIDIA H100 PCIe", 2.0), ("cpu", 0.0),
    ("NVIDIA GH100x", None), ("NVIDIA H200", None), ("AMD", None),
])  # fmt: skip
def test_a_price_is_found_by_the_words_of_a_device(device, expected):
    prices = {"h100": 2.5, "A100": 1.8, "h100-pcie": 2.0, "cpu": 0}
    assert costs.price(device, prices) == expected


def test_a_union_of_intervals_equals_counted_seconds():
    generator = random.Random(5)
    for _ in range(200):
        pairs = [sorted(generator.choices(range(30), k=2)) for _ in range(generator.randint(0, 6))]
        seconds = {s for start, end in pairs for s in range(start, end)}
        assert costs.union_seconds(map(tuple, pairs)) == len(seconds)


def test_attempts_of_a_job_that_was_killed_count_once(tmp_path):
    laid = make_plan(tmp_path)
    job = laid.batch_folder(laid.nodes("hidden_states")[0])
    nodes = [n for n in laid.nodes("hidden_states") if laid.batch_folder(n) == job]
    assert len(nodes) > 2
    for number, node in enumerate(nodes):  # killed after 100 s, again on another node after 50
        earlier = [(0, 100, "n1"), (20, 50, "n2")]
        finish(node, 500, 30 + number, (H100, 4), earlier)
    labels = study_labels(laid) | {"economics": SETTINGS}
    parts = costs.open_parts(labels)
    found = costs.device_seconds(parts[n.key] for n in nodes)
    assert found == {H100: pytest.approx(4 * (100 + 50 + 30 + len(nodes) - 1))}
    assert costs.device_seconds([parts[nodes[0].key]]) == {H100: pytest.approx(4 * 180)}


def test_a_damaged_manifest_is_named(made):
    laid, labels, _ = made
    path = Path(laid.nodes("vocab")[0].manifest)
    store.write_json(path, json.loads(path.read_text()) | {"device": {"type": CPU}})
    with pytest.raises(UserError, match="device or times"):
        costs.cost_rows(labels, costs.open_parts(labels))


# -- the model of speed-up ---------------------------------------------------------


def simulated(accepts: list[int], step: float) -> float:
    """Seconds per token of a decoding whose steps accept so many drafts and cost `step`."""
    tokens = seconds = 0.0
    for accepted in accepts:
        tokens += accepted + 1
        seconds += step
    return seconds / tokens


def test_break_even_and_speedup_equal_a_simulation():
    generator = random.Random(2)
    k, c, v, step = 4, 0.07, 0.11, 20.0
    for skill in (0.1, 0.4, 0.9):
        accepts = []
        for _ in range(500):
            luck = [generator.random() < skill for _ in range(k)]
            accepts.append([*luck, False].index(False))
        cost = step + k * c * step + v * step
        with_ms, without_ms = simulated(accepts, cost), simulated([0] * 100, step)
        length = 1 + sum(accepts) / len(accepts)
        overhead = economics.break_even(length, with_ms, without_ms)
        assert overhead == pytest.approx(1 + k * c + v)
        assert economics.speedup(length, overhead) == pytest.approx(without_ms / with_ms)
        assert (length > overhead) == (with_ms < without_ms)


def test_several_k_separate_draft_and_verification():
    assert economics.separate([]) is None
    assert economics.separate([(3, 1.4)]) is None and economics.separate([(3, 1.4)] * 2) is None
    exact = economics.separate((k, 1 + 0.05 * k + 0.2) for k in (1, 3, 5))
    assert exact == pytest.approx((0.05, 0.2))
    noisy = [(k, 1.1 + 0.06 * k + random.Random(k).uniform(-0.1, 0.1)) for k in range(1, 8)]
    slope, intercept = np.polyfit(*zip(*noisy, strict=True), 1)
    assert economics.separate(noisy) == pytest.approx((slope, intercept - 1))


@pytest.mark.parametrize("gpus, per_engine", [(12, 1), (12, 4), (7, 2), (1, 1)])
def test_gpus_are_the_fewest_whole_engines_with_the_same_throughput(gpus, per_engine):
    for gain in (0.5, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0, 7.3):
        engines = next(n for n in range(1, 99) if n * per_engine * gain >= gpus - 1e-9)
        assert economics.gpus_needed(gpus, gain, per_engine) == engines * per_engine
    assert 3 / (0.3 / 0.1) > 1  # by rounding
    assert economics.gpus_needed(3, 0.3 / 0.1) == 1


def test_payback_is_when_the_savings_reach_the_cost():
    cost, saved, price = 1000.0, 8, 2.5
    hour = next(h for h in itertools.count() if h * saved * price >= cost)
    assert math.ceil(economics.payback_hours(cost, saved, price)) == hour
    assert economics.payback_hours(cost, 0, price) is None
    assert economics.payback_hours(cost, -2, price) is None
    assert economics.payback_hours(cost, 3, 0.0) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kv_cache_of_a_draft_equals_an_allocated_one(dtype):
    layers, heads, size = 2, 3, 64
    cache = torch.zeros(layers, 2, 1, heads, size, dtype=getattr(torch, dtype))
    config = {"num_hidden_layers": layers, "num_key_value_heads": heads, "head_dim": size}
    nested = {"transformer_layer_config": config, "dtype": f"torch.{dtype}"}
    assert economics.kv_bytes_per_token(nested) == cache.nbytes
    bare = {k: v for k, v in config.items() if k != "head_dim"} | {"dtype": dtype}
    bare |= {"hidden_size": 12 * size, "num_attention_heads": 12}
    assert economics.kv_bytes_per_token(bare) == cache.nbytes
    assert economics.kv_bytes_per_token({}) is None


def measurement(algorithm="eagle3", workload="qa", concurrency=1, k=3, itl=8.0, rate=100.0, **more):
    row = {
        "verifier": "v", "algorithm": algorithm, "strategy": algorithm and "self",
        "epoch": algorithm and 1, "workload": workload, "concurrency": concurrency,
        "hardware": "h", "k": k, "temperature": 0, "itl_ms": itl, "output_tokens_per_s": rate,
        "throughput_speedup": None, "key": f"{algorithm}{workload}{concurrency}{k}",
    }  # fmt: skip
    return row | more


def length(workload="qa", k=3, value=2.0, **more):
    row = measurement(workload=workload, k=k)
    return {c: row[c] for c in ("verifier", "algorithm", "strategy", "epoch", "temperature")} | {
        "workload": workload, "k": k, "acceptance_length": value} | more  # fmt: skip


def test_the_model_predicts_from_other_measurements_only():
    bare = [measurement(None, w, k=0, itl=10.0) for w in ("qa", "coding", "rag")]
    fast = [measurement(workload=w, itl=i) for w, i in (("qa", 8.0), ("coding", 6.0), ("rag", 4.0))]
    lengths = [length("qa", value=2.0), length("coding", value=2.5)]
    found = economics.Measurements(bare + fast, lengths)
    rows = economics.rows(found, {}, SETTINGS, {})
    qa, coding, rag = rows
    assert (qa["break_even_length"], coding["break_even_length"]) == (1.6, 1.5)
    assert qa["measured_speedup"] == 1.25 and qa["model_speedup"] == pytest.approx(2.0 / 1.5)
    assert coding["model_speedup"] == pytest.approx(2.5 / 1.6)
    assert qa["model_source"] == "1 other measurement" and qa["draft_cost"] is None
    assert rag["break_even_length"] is rag["model_speedup"] is None
    assert rag["model_source"].startswith("none") and rag["measured_speedup"] == 2.5
    (alone,) = economics.rows(economics.Measurements([bare[0], fast[0]], lengths), {}, SETTINGS, {})
    assert alone["model_source"] == "none: only this measurement"


@pytest.mark.parametrize("algorithm, separated", [("eagle3", True), ("dflash", False)])
def test_c_and_v_come_from_several_k_of_a_draft_that_goes_step_by_step(algorithm, separated):
    table, lengths = [measurement(None, k=0, itl=10.0)], []
    for k, value in ((1, 1.6), (3, 2.2), (5, 2.5)):
        table.append(measurement(algorithm, k=k, itl=10.0 * (1 + 0.1 * k + 0.05) / value))
        lengths.append(length(k=k, value=value, algorithm=algorithm))
    name = ("v", algorithm, "self", 1)
    rows = economics.rows(
        economics.Measurements(table, lengths), {name: {"method": algorithm}}, SETTINGS, {}
    )
    assert [r["break_even_length"] for r in rows] == pytest.approx([1.15, 1.35, 1.55])
    for row in rows:
        if separated:
            assert (row["draft_cost"], row["verify_cost"]) == pytest.approx((0.1, 0.05))
            assert row["fitted_k"] == 3
        else:
            assert row["draft_cost"] is row["verify_cost"] is row["fitted_k"] is None


LOADS = [(1, 5.0, 100.0, 4.0, 150.0), (8, 10.0, 400.0, 9.0, 500.0), (32, 30.0, 800.0, 40.0, 700.0)]


def priced(target, loads=LOADS):
    table = []
    for concurrency, bare, bare_rate, itl, rate in loads:
        table.append(measurement(None, k=0, concurrency=concurrency, itl=bare, rate=bare_rate))
        table.append(measurement(concurrency=concurrency, itl=itl, rate=rate,
                                 throughput_speedup=rate / bare_rate))  # fmt: skip
    settings = SETTINGS | ({"itl_target_ms": target} if target else {})
    facts = {"training_money": 90.0, "training_money_per_verifier": 45.0, "method": "eagle3"}
    sizes = {r["key"]: {"per_engine": 2, "price_per_hour": 3.0} for r in table}
    measured = economics.Measurements(table, [length()])
    return economics.rows(measured, {("v", "eagle3", "self", 1): facts}, settings, sizes)


def test_gpus_and_payback_at_each_load_and_at_a_target():
    rows = priced(None)
    assert [r["gpus_after"] for r in rows] == [8, 10, 14]  # 12 / 1.5, / 1.25, / 0.875; pairs
    assert [r["payback_hours"] for r in rows] == [90 / (4 * 3), 90 / (2 * 3), None]
    assert rows[0]["payback_hours_per_verifier"] == 45 / (4 * 3)
    # At 30 ms the bare verifier serves 32 requests; the speculator only 8.
    assert {(r["gain"], r["gpus_after"]) for r in priced(30.0)} == {(500 / 800, 20)}
    assert {(r["gain"], r["gpus_after"]) for r in priced(10.0)} == {(500 / 400, 10)}
    for target, why in ((1.0, "nothing meets 1 ms"), (4.5, "only with the speculator 4.5 ms")):
        (row, *_) = priced(target)
        assert row["gain"] is row["gpus_after"] is row["payback_hours"] is None
        assert why in row["verdict"]
    (row,) = priced(20.0, [(32, 15.0, 800.0, 40.0, 700.0)])
    assert row["gain"] is None and "with the speculator 20 ms per token are not met" in row[
        "verdict"]  # fmt: skip


def test_the_verdict_says_where_speculation_slows_serving_down():
    good, mixed, bad = priced(None, [
        (1, 10.0, 100.0, 5.0, 190.0), (8, 10.0, 400.0, 9.0, 380.0), (32, 30.0, 800.0, 40.0, 700.0),
    ])  # fmt: skip
    assert "faster: with 1 in flight tokens come 2.00 times as fast" in good["verdict"]
    assert "acceptance length 2.00 is above the break-even 1.00" in good["verdict"]
    assert "12 GPUs become 8" in good["verdict"]
    assert "fewer of them per second (0.95 times)" in mixed["verdict"]
    assert bad["verdict"].startswith("slower: with 32 in flight")
    assert "1.33 times as long" in bad["verdict"] and "below the break-even" in bad["verdict"]
    assert "none is saved, training never pays back" in bad["verdict"]


def test_a_speed_up_that_the_acceptance_length_cannot_give_is_noise():
    (row,) = priced(None, [(1, 10.0, 100.0, 4.0, 250.0)])  # length 2.0, 2.5 times as fast
    assert row["break_even_length"] == 0.8 and row["measured_speedup"] == 2.5
    assert row["verdict"].startswith("unclear") and "cannot give that" in row["verdict"]
    assert row["gpus_after"] is row["gpus_saved"] is row["payback_hours"] is None
    (near,) = priced(None, [(1, 10.0, 100.0, 4.9, 200.0)])
    assert near["break_even_length"] == pytest.approx(0.98) and near["gpus_after"] == 6


def test_the_program_writes_both_tables_from_tables_and_manifests(plan, tmp_path):
    plan |= {"economics": SETTINGS | {"currency": "EUR"}, "methods": {"eagle3": "eagle3"}}
    plan["index"] = [
        {"stage": stage, "name": f"v/{number}", "key": e["key"], "folder": e["folder"]}
        for stage, kinds in (("benchmarks", ("acceptance", "latency")),)
        for kind in kinds for number, e in enumerate(plan[kind])
    ]  # fmt: skip
    (one, two) = plan["training"]
    for epoch, entry in enumerate((one, two), 1):
        name = f"v/eagle3/self/epoch-{epoch}"
        plan["index"].append(
            {"stage": "speculators", "name": name, "key": entry["key"], "folder": entry["folder"]}
        )
    plan["latency"].append(make_latency(tmp_path, {**plan["latency"][0]}, 0, 32))
    tables = run_tables(tmp_path, plan)
    out = tmp_path / "out"
    program.main(Namespace(plan=out / "plan.json", tables=out, out=out))
    rows = pq.read_table(out / "economics.parquet").to_pylist()
    assert [r["concurrency"] for r in rows] == [1, 8]
    measured = find(tables["acceptance"], epoch=2, workload="coding")["acceptance_length"]
    for row in rows:
        assert row["acceptance_length"] == measured
        assert row["measured_speedup"] == pytest.approx(1.25)
        assert row["break_even_length"] == pytest.approx(measured / 1.25)
        manifest = store.read_manifest(Path(two["folder"]))
        spent = manifest["wall_seconds"] * manifest["device"]["count"]
        assert row["training_device_seconds"] == pytest.approx(spent)
        assert row["training_money"] == pytest.approx(spent / 3600 * 0.5)
        assert row["gpus_after"] == 10 and row["currency"] == "EUR"
        assert row["payback_hours"] == pytest.approx(row["training_money"] / (2 * 0.5))
    total = find(pq.read_table(out / "costs.parquet").to_pylist(), stage="total", group="all")
    assert total["parts"] == len(plan["index"]) and total["money"] > 0
    before = {n: (out / f"{n}.csv").read_bytes() for n in ("costs", "economics")}
    program.main(Namespace(plan=out / "plan.json", tables=out, out=out))
    assert before == {n: (out / f"{n}.csv").read_bytes() for n in before}
    (out / "latency.parquet").write_bytes(b"cut")
    with pytest.raises(UserError, match="Make the tables again"):
        program.main(Namespace(plan=out / "plan.json", tables=out, out=out))


def test_memory_of_a_checkpoint_is_read_from_the_part(tmp_path):
    folder = tmp_path / "speculators" / "x"
    config = {"num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 8}
    (folder / "checkpoint").mkdir(parents=True)
    path = folder / "checkpoint/config.json"
    path.write_text(json.dumps({"transformer_layer_config": config}))
    files = {"checkpoint/model.safetensors": 100, "checkpoint/b.safetensors": 11, "state.pt": 900}
    store.write_json(folder / "manifest.json", {
        "stage": "speculators", "contract": CONTRACTS["speculators"], "key": "k",
        "files": {n: {"bytes": b, "sha256": ""} for n, b in files.items()}})  # fmt: skip
    part = costs.Part("speculators", "k", str(folder), (), {}, "")
    assert program.memory(part) == {"checkpoint_bytes": 111, "kv_bytes_per_token": 2 * 2 * 8 * 2}
    path.write_text("{")
    with pytest.raises(UserError, match=r"config\.json is damaged"):
        program.memory(part)
    gone = costs.Part("speculators", "k", str(tmp_path / "gone"), (), {}, "")
    assert program.memory(gone) == program.memory(None) == {}
