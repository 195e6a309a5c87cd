"""Responses: how answers are judged, seeded, split, and resumed."""

import hashlib
import random
from types import SimpleNamespace

import pytest
from helpers import new_part

from scripts import responses
from scripts.lib import tables

SETTINGS = {
    "temperature": 0.5,
    "top_p": 1,
    "top_k": 0,
    "stop": [],
    "strip": False,
    "max_tokens": 9,
    "max_model_len": 99,
    "seed": 0,
}
RUNTIME = {"device": "cpu"}


# -- judging -------------------------------------------------------------------------


def is_loop(ids):
    """Whether the last half repeats one period of at most 32 tokens, by definition."""
    tail = ids[len(ids) // 2 :]
    return any(
        len(tail) >= 2 * p and all(tail[i] == tail[i % p] for i in range(len(tail)))
        for p in range(1, 33)
    )


@pytest.mark.parametrize("period", [1, 2, 7, 31, 32, 33, 40])
@pytest.mark.parametrize("length", [64, 100, 129, 300])
def test_loops_are_found_by_their_period(period, length):
    ids = [i % period for i in range(length)]
    assert (responses.status_of("x", ids, "length") == "loop") == is_loop(ids)
    if period <= 7 or (period <= 32 and length >= 129):
        assert responses.status_of("x", ids, "length") == "loop"
    varied = [*ids[:-1], 999]
    assert responses.status_of("x", varied, "length") == "ok"


def test_random_answers_are_judged_as_by_definition():
    draw = random.Random(0)
    for _ in range(200):
        period = draw.randint(1, 40)
        cycle = [draw.randint(0, 3) for _ in range(period)]
        ids = [draw.randint(0, 3) for _ in range(draw.randint(0, 80))]
        ids += (cycle * 99)[: draw.randint(64, 200)]
        found = responses.status_of("x", ids, "length") == "loop"
        assert found == is_loop(ids)


@pytest.mark.parametrize(
    "content, ids, finish, expected",
    [
        ("", [], "stop", "empty"),
        (" \n\t", [1, 2], "stop", "empty"),
        ("", [5] * 200, "length", "empty"),
        ("x", [5] * 200, "stop", "ok"),  # it ended by itself
        ("x", [5] * 63, "length", "ok"),  # too short to judge
        ("x", [5] * 64, "length", "loop"),
        ("x", [5] * 40 + list(range(60)), "length", "ok"),  # it got out of the loop
        ("x", list(range(100)) + [1, 2, 3] * 40, "length", "loop"),
        ("x", [], "length", "ok"),
    ],
)
def test_status(content, ids, finish, expected):
    assert responses.status_of(content, ids, finish) == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        ("plain answer", ("", "plain answer")),
        ("<think>\nwhy\n</think>\n\nanswer\n", ("why", "answer")),
        ("why\n</think>\n\nanswer", ("why", "answer")),  # the template wrote the opening tag
        ("<think></think>answer", ("", "answer")),
        ("<think>a <think> b</think>c </think> d", ("a <think> b", "c </think> d")),
        ("<think>why</think>", ("why", "")),
        ("", ("", "")),
    ],
)
def test_reasoning_is_split_off(text, expected):
    assert responses.split_reasoning(text) == expected


# -- seeds ---------------------------------------------------------------------------


def test_seed_depends_on_the_configured_seed_and_the_prompt_alone():
    ids = [hashlib.sha256(str(i).encode()).hexdigest()[:32] for i in range(500)]
    seeds = [responses.prompt_seed(0, i) for i in ids]
    assert seeds == [responses.prompt_seed(0, i) for i in ids]
    assert len(set(seeds)) == len(ids)
    assert not set(seeds) & {responses.prompt_seed(1, i) for i in ids}
    assert all(0 <= s < 2**31 for s in seeds)
    # Uniform: about half of them lie in each half of the range.
    assert 200 < sum(s >= 2**30 for s in seeds) < 300


# -- resuming ------------------------------------------------------------------------


def prompt_rows(count):
    return [
        {"prompt_id": f"{i:032x}", "rank": i, "messages": [{"role": "user", "content": f"q{i}"}],
         "source": "s"} for i in range(count)
    ]  # fmt: skip


def answer_row(row, content):
    return row | {
        "reasoning": "", "content": content, "finish_reason": "stop", "prompt_tokens": 1,
        "response_tokens": 1, "seed": 1, "status": "ok",
    }  # fmt: skip


class FakeEngine:
    """Answers what it is asked, in reverse order; dies after `limit` answers."""

    def __init__(self, monkeypatch, limit=None):
        self.asked, self.limit = [], limit
        monkeypatch.setattr(responses.engine, "build", lambda *a, **k: self)
        monkeypatch.setattr(responses, "add_requests", self.add)
        monkeypatch.setattr(responses.engine, "step_until_done", self.steps)

    def add(self, _llm, rows, *_):
        for row in rows:
            row["seed"], row["prompt_tokens"] = 7, 3
        self.asked = [row["prompt_id"] for row in rows]
        return {}

    def steps(self, _llm):
        for number, identifier in enumerate(reversed(self.asked)):
            if number == self.limit:
                raise KeyboardInterrupt
            answer = SimpleNamespace(
                text=f"<think>t</think>to {identifier}", token_ids=[1, 2], finish_reason="stop"
            )
            yield SimpleNamespace(request_id=f"{identifier}-abc", outputs=[answer])


def generate(part, count):
    return responses.generate(prompt_rows(count), SETTINGS, "", "", RUNTIME, part)


def test_interrupted_generation_keeps_its_answers_and_asks_only_for_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(responses, "FLUSH_ROWS", 3)
    part = new_part(tmp_path, "responses", SETTINGS)
    broken = FakeEngine(monkeypatch, limit=7)
    with pytest.raises(KeyboardInterrupt):
        generate(part, 10)
    assert len(broken.asked) == 10
    kept = responses.finished_rows(part.work)
    assert set(kept) == {f"{i:032x}" for i in range(3, 10)}

    second = FakeEngine(monkeypatch)
    answers = generate(part, 10)
    assert second.asked == [f"{i:032x}" for i in range(3)]
    assert set(answers) == {f"{i:032x}" for i in range(10)}
    for identifier, row in answers.items():
        assert (row["reasoning"], row["content"]) == ("t", f"to {identifier}")
        assert (row["seed"], row["response_tokens"], row["status"]) == (7, 2, "ok")
        assert row["messages"] == [{"role": "user", "content": f"q{row['rank']}"}]
    assert responses.finished_rows(part.work).keys() == answers.keys()

    # A third attempt finds everything and starts no engine.
    third = FakeEngine(monkeypatch)
    assert generate(part, 10).keys() == answers.keys() and third.asked == []


def test_finished_rows_join_all_parts_and_ignore_half_written_files(tmp_path):
    part, rows = new_part(tmp_path, "responses", SETTINGS), prompt_rows(5)
    assert responses.finished_rows(part.work) == {}
    for number, chosen in enumerate((rows[:2], rows[2:4])):
        tables.write(
            part.work / f"part-{number:05d}.parquet",
            [answer_row(r, f"a{r['rank']}") for r in chosen], tables.RESPONSES, part.metadata(),
        )  # fmt: skip
    (part.work / ".part-00002.parquet.123.tmp").write_bytes(b"PAR1 half")
    found = responses.finished_rows(part.work)
    assert {i: r["content"] for i, r in found.items()} == {
        r["prompt_id"]: f"a{r['rank']}" for r in rows[:4]
    }
