"""Benchmarks: counters, cross-checks, latency reports; no server is started."""

import argparse
import json
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import new_part

from scripts import benchmarks
from scripts.lib import acceptance, latency, server, store, tables
from scripts.lib.errors import UserError

K = 3


# -- the server's counters -------------------------------------------------------------

PROMETHEUS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="verifier"} 10.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="verifier"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="verifier"} 30.0
vllm:spec_decode_num_draft_tokens_created{engine="0",model_name="verifier"} 1.7e+09
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="verifier"} 1.2e+01
vllm:spec_decode_num_accepted_tokens_created{engine="0",model_name="verifier"} 1.7e+09
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="v",position="0"} 7.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="v",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="2",engine="0",model_name="v"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",position="0"} 1.7e+09
vllm:generation_tokens_total{engine="0",model_name="verifier"} 999.0
"""


def test_counters_are_read_and_time_stamps_are_not():
    assert server.parse_counters(PROMETHEUS) == {
        "drafts": 10, "drafted": 30, "accepted": 12, "accepted_0": 7, "accepted_1": 4,
        "accepted_2": 1,
    }  # fmt: skip


def test_counters_of_several_engines_add_up():
    two = PROMETHEUS + PROMETHEUS.replace('engine="0"', 'engine="1"').replace(" 10.0", " 5.0")
    one, both = server.parse_counters(PROMETHEUS), server.parse_counters(two)
    assert both["drafts"] == 15 and both["accepted_1"] == 8 and both["drafted"] == 60
    assert both.keys() == one.keys()


def test_counters_of_a_server_without_speculation_are_empty():
    assert server.parse_counters("# TYPE x counter\nvllm:generation_tokens_total 5.0\n") == {}
    plain = "vllm:spec_decode_num_drafts_total 1.234567e+06\n"
    assert server.parse_counters(plain) == {"drafts": 1234567}


# -- requests --------------------------------------------------------------------------


def test_positions_count_the_steps_that_got_that_far():
    draw = random.Random(0)
    for _ in range(50):
        steps = [draw.randint(0, K) for _ in range(draw.randint(0, 30))]
        expected = [0] * K
        for accepted in steps:
            for position in range(accepted):
                expected[position] += 1
        assert acceptance.per_position(steps, K) == expected
        assert sum(expected) == sum(steps)


def reply(steps=(2, 0, 3), ids=(1, 2, 3), **override):
    """A chat completion as vLLM returns it."""
    metrics = None
    if steps is not None:
        metrics = {
            "num_spec_steps": len(steps), "num_draft_tokens": K * len(steps),
            "num_accepted_draft_tokens": sum(steps), "per_step_accepted": list(steps),
        } | override  # fmt: skip
    extra = {"token_ids": list(ids) if ids is not None else None}
    return SimpleNamespace(
        choices=[SimpleNamespace(finish_reason="length", model_extra=extra)],
        usage=SimpleNamespace(prompt_tokens=11),
        model_extra={"metrics": {"speculative_decoding": metrics}} if metrics else None,
    )


def row_of(answer, k=K, identifier="p"):
    return acceptance.request_row({"prompt_id": identifier}, answer, k, 1.5)


def test_request_row_holds_the_raw_counters():
    assert row_of(reply()) == {
        "prompt_id": "p", "status": "ok", "error": None, "finish_reason": "length",
        "prompt_tokens": 11, "output_ids": [1, 2, 3], "drafts": 3, "drafted": 9, "accepted": 5,
        "accepted_per_position": [2, 2, 1], "seconds": 1.5,
    }  # fmt: skip


def test_request_without_speculation_has_zero_counters():
    row = row_of(reply(steps=None), k=0)
    assert (row["drafts"], row["drafted"], row["accepted"]) == (0, 0, 0)
    assert row["accepted_per_position"] == [] and row["output_ids"] == [1, 2, 3]


def test_answer_of_one_token_has_no_draft_to_count():
    row = row_of(reply(steps=None, ids=[7]))
    assert row["drafts"] == 0 and row["accepted_per_position"] == [0, 0, 0]


@pytest.mark.parametrize(
    "answer, message",
    [
        (reply(ids=None), "no token ids"),
        (reply(steps=None), "no per-request speculative metrics"),
        (reply(num_accepted_draft_tokens=6), "totals differ"),
        (reply(num_spec_steps=4), "totals differ"),
        (reply(steps=(4, 0, 0)), "totals differ"),  # more accepted than k
    ],
)
def test_reply_that_contradicts_itself_is_refused(answer, message):
    with pytest.raises(UserError, match=message):
        row_of(answer)


def rows_and_counters():
    rows = [row_of(reply(steps)) for steps in ((2, 0, 3), (1,), (), (3, 3))]
    return rows, Counter(
        drafts=6, drafted=18, accepted=12, accepted_0=5, accepted_1=4, accepted_2=3
    )


def test_sums_of_the_requests_match_the_server():
    acceptance.check_against_server(*rows_and_counters(), K)


@pytest.mark.parametrize("name", ["drafts", "drafted", "accepted", "accepted_0", "accepted_2"])
@pytest.mark.parametrize("difference", [1, -1])
def test_sums_that_do_not_match_the_server_are_refused(name, difference):
    rows, counted = rows_and_counters()
    counted[name] += difference
    with pytest.raises(UserError, match="per position" if "_" in name else name):
        acceptance.check_against_server(rows, counted, K)


def test_positions_swapped_by_the_server_are_refused():
    rows, counted = rows_and_counters()
    counted["accepted_0"], counted["accepted_1"] = counted["accepted_1"], counted["accepted_0"]
    with pytest.raises(UserError, match="per position"):
        acceptance.check_against_server(rows, counted, K)


def test_counters_that_break_the_identity_are_refused():
    rows, counted = rows_and_counters()
    rows[0]["accepted"] += 1
    counted["accepted"] += 1
    with pytest.raises(UserError, match="contradict"):
        acceptance.check_against_server(rows, counted, K)


class FakeServer:
    """Counts from 100 on, as a server that has already worked."""

    url, key, found = "http://127.0.0.1:1", "secret-of-the-server", {"method": "eagle3"}

    def __init__(self, counted):
        start = Counter(dict.fromkeys(counted, 100))
        self.readings = iter([start, start + counted])

    def counters(self):
        return next(self.readings)


def measure(monkeypatch, counted, answer, k=K):
    async def ask_all(*_):
        return answer() if callable(answer) else answer

    monkeypatch.setattr(acceptance, "_ask_all", ask_all)
    return acceptance.measure(FakeServer(counted), [], {"k": k}, {})


def test_measure_compares_with_what_the_server_counted_meanwhile(monkeypatch):
    rows, counted = rows_and_counters()
    assert measure(monkeypatch, counted, rows) == rows
    with pytest.raises(UserError, match="drafts"):
        measure(monkeypatch, counted + Counter(drafts=1), rows)
    assert measure(monkeypatch, Counter(), rows, k=0) == rows


def test_error_of_one_request_comes_out_as_a_plain_user_error(monkeypatch):
    def fail():
        raise ExceptionGroup("tasks", [UserError("server ended"), UserError("server ended")])

    with pytest.raises(UserError, match="server ended"):
        measure(monkeypatch, Counter(), fail)


# -- the stage -------------------------------------------------------------------------

SETTINGS = {"kind": "acceptance", "k": K, "temperature": 0, "concurrency": 4, "seed": 0}


def acceptance_parts(root):
    return [new_part(root, "benchmarks", SETTINGS, {"workload": w}) for w in ("w1", "w2")]


def stage_args(ceiling=0.5):
    runtime = {"device": "cpu", "threads": 2}
    return argparse.Namespace(runtime=runtime, max_lost_share=ceiling)


def test_every_workload_gets_the_rows_of_its_own_prompts(tmp_path, monkeypatch):
    parts = acceptance_parts(tmp_path)
    prompts = {"w1": [{"prompt_id": "a"}, {"prompt_id": "b"}], "w2": [{"prompt_id": "b"}]}
    steps = iter([(3, 3), (1,), (0,)])

    def answers(_server, asked, *_):
        return [row_of(reply(next(steps)), identifier=p["prompt_id"]) for p in asked]

    monkeypatch.setattr(acceptance, "measure", answers)
    for part in parts:
        part.__enter__()
    benchmarks.measure_acceptance(parts, prompts, FakeServer(Counter()), stage_args())
    read = [
        tables.read(p.folder, "requests.parquet", "benchmarks", acceptance.REQUESTS) for p in parts
    ]
    assert [[(r["prompt_id"], r["accepted"]) for r in rows] for rows in read] == [
        [("a", 6), ("b", 1)], [("b", 0)],
    ]  # fmt: skip
    facts = [store.read_manifest(p.folder)["facts"] for p in parts]
    assert [(f["drafts"], f["drafted"], f["accepted"]) for f in facts] == [(3, 9, 7), (1, 3, 0)]


@pytest.mark.parametrize("ceiling", [0.5, 0.2])
def test_failed_requests_are_counted_and_have_a_ceiling(tmp_path, monkeypatch, ceiling):
    part = acceptance_parts(tmp_path)[0]
    failed = {"prompt_id": "b", "status": "error", "error": "APIError: x", "seconds": 1.0}
    good = [row_of(reply((2, 1)), identifier=i) for i in "acd"]
    monkeypatch.setattr(acceptance, "measure", lambda *_: [good[0], failed, *good[1:]])
    prompts = {"w1": [{"prompt_id": i} for i in "abcd"]}
    with part:
        arguments = [part], prompts, FakeServer(Counter()), stage_args(ceiling)
        if ceiling < 0.25:
            with pytest.raises(UserError, match=r"1 of 4 rows lost \(error: 1\)"):
                benchmarks.measure_acceptance(*arguments)
            assert not part.finished
            return
        benchmarks.measure_acceptance(*arguments)
    manifest = store.read_manifest(part.folder, "benchmarks")
    assert manifest["counts"] == {"ok": 3, "error": 1} and manifest["facts"]["accepted"] == 9


@pytest.mark.parametrize("k, temperature, device, refused", [
    (3, 0.7, "cpu", True), (3, 0, "cpu", False), (0, 0.7, "cpu", False), (3, 0.7, "cuda", False),
])  # fmt: skip
def test_sampling_with_speculation_on_cpu_is_refused(k, temperature, device, refused):
    call = {"k": k, "temperature": temperature}, {"device": device}
    if not refused:
        return benchmarks.refuse_broken_sampling(*call)
    with pytest.raises(UserError, match="temperature"):
        benchmarks.refuse_broken_sampling(*call)


def test_speculative_method_is_explicit_whatever_the_path_says():
    checkpoint = Path("/x/medusa-mtp-dflash/checkpoint")
    methods = {
        "eagle3": {"method": "eagle3", "parallel_drafting": False},
        "peagle": {"method": "eagle3", "parallel_drafting": True},
        "dflash": {"method": "dflash"},
    }  # fmt: skip
    for algorithm, method in methods.items():
        assert server.speculative_config(algorithm, checkpoint, 5) == method | {
            "model": str(checkpoint), "num_speculative_tokens": 5,
        }  # fmt: skip
    with pytest.raises(UserError, match="'unheard-of'"):
        server.speculative_config("unheard-of", Path("/x/eagle3"), 5)


@pytest.mark.parametrize("found, passes", [
    ({"method": "eagle3", "num_speculative_tokens": 3, "parallel_drafting": False}, True),
    ({"method": "eagle", "num_speculative_tokens": 3}, False),
    ({"method": "eagle3", "num_speculative_tokens": 5}, False),
    ({}, False),
])  # fmt: skip
@pytest.mark.parametrize("asked", [True, False])
def test_server_that_speculates_otherwise_than_asked_is_refused(tmp_path, found, passes, asked):
    runtime = {"max_num_seqs": 4, "enforce_eager": True}
    wanted = {"method": "eagle3", "model": "/m", "num_speculative_tokens": 3} if asked else None
    started = server.Server("/v", "t", runtime, tmp_path / "s.log", 99, wanted)
    started.get = lambda path, timeout=30: json.dumps(
        {"data": [{"id": server.MODEL_NAME}]} if path == "/v1/models"
        else {"vllm_config": {"speculative_config": found or None}}
    )  # fmt: skip
    if passes if asked else not found:
        started._check_identity()
        assert started.found == found
    else:
        with pytest.raises(UserError, match=r"vLLM (runs with|speculates)"):
            started._check_identity()


def test_servers_key_is_not_on_its_command_line(tmp_path):
    runtime = {"max_num_seqs": 4, "enforce_eager": True}
    started = server.Server("/v", "t", runtime, tmp_path / "s.log", 99)
    assert len(started.key) >= 16 and not any(started.key in a for a in started.command)


# -- latency ---------------------------------------------------------------------------

LATENCY = {
    "requests_per_stream": 4, "concurrency": 3, "max_tokens": 48, "max_seconds": 60, "seed": 5,
    "temperature": 0,
}  # fmt: skip


def guidellm_command(tmp_path):
    paths = tmp_path / "d.jsonl", tmp_path / "r.json"
    return latency.command(FakeServer(Counter()), "/models/v", *paths, LATENCY)


def test_guidellm_command_asks_for_one_fixed_concurrency(tmp_path):
    file = Path(guidellm_command(tmp_path)[-1])
    words = json.loads(file.read_text())
    text = " ".join(words)
    assert words[0] == "run"
    assert "kind=concurrent,streams=3" in words
    assert "kind=max_requests,count=12" in words and "kind=max_duration,seconds=60" in words
    assert f"kind=json_file,path={tmp_path}/d.jsonl" in words
    assert FakeServer.url in text and "/models/v" in text


def test_guidellm_command_does_not_show_the_servers_key(tmp_path):
    """Every user of the node can read command lines."""
    words = guidellm_command(tmp_path)
    assert not any(FakeServer.key in word for word in words)
    assert FakeServer.key in Path(words[-1]).read_text()
    assert Path(words[-1]).stat().st_mode & 0o077 == 0


def test_request_file_has_one_line_per_request_and_repeats_the_prompts_in_turn(tmp_path):
    turns = [{"role": "system", "content": "Be\nbrief."}, {"role": "user", "content": "Ünï?"}]
    prompts = [{"messages": turns}, {"messages": [{"role": "user", "content": "b"}]}]
    latency.write_data(tmp_path / "d.jsonl", prompts, LATENCY)
    rows = [json.loads(line) for line in (tmp_path / "d.jsonl").read_text().splitlines()]
    assert len(rows) == 12
    assert all(row["output_tokens_count"] == 48 for row in rows)
    assert [row["prompt"] for row in rows] == ["Be\nbrief.\n\nÜnï?", "b"] * 6


def report(successful=4, **override):
    def values(scale):
        return {"successful": {
            "median": 2.0 * scale, "mean": 3.0 * scale,
            "percentiles": {"p50": 2.0 * scale, "p95": 8.0 * scale, "p99": 9.0 * scale},
        }, "total": {"mean": 77.0 * scale}}  # fmt: skip

    metrics = {
        "request_totals": {"successful": successful, "errored": 2, "incomplete": 1, "total": 7},
        "time_to_first_token_ms": values(1), "inter_token_latency_ms": values(10),
        "request_latency": values(100), "output_tokens_per_second": values(1000),
    }  # fmt: skip
    return {"benchmarks": [{"metrics": metrics}]} | override


def test_summary_keeps_counts_and_converts_units():
    summary = latency.summarise(report())
    assert (summary["requests"], summary["failed"], summary["incomplete"]) == (4, 2, 1)
    assert summary["ttft_ms"] == {"median": 2, "mean": 3, "p95": 8, "p99": 9}
    assert summary["itl_ms"]["p95"] == 80 and summary["itl_ms"]["median"] == 20
    assert summary["latency_ms"]["p99"] == 900_000  # GuideLLM reports it in seconds
    assert summary["output_tokens_per_s"] == 77_000


@pytest.mark.parametrize("bad", [report(0), report(benchmarks=[]), report(benchmarks=[1, 2])])
def test_report_without_exactly_one_useful_benchmark_is_refused(bad):
    with pytest.raises(UserError, match="GuideLLM"):
        latency.summarise(bad)
