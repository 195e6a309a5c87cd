"""Responses: how answers are judged, seeded, split, and resumed."""

import argparse
import hashlib
import random
from types import SimpleNamespace

import pytest
from helpers import finished_table, new_part

from scripts import responses
from scripts.lib import store, tables
from scripts.lib.errors import UserError
from scripts.lib.identity import part_key

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
    "text, refused",
    [
        ("I'm sorry, but I can't help with that.", True),
        ("I\u2019m sorry, but I cannot assist with that request.", True),
        ("Sorry, I am unable to provide medical advice.", True),
        ("I can't answer that.", True),
        ("Unfortunately, I won't create such content.", True),
        ("I'm sorry, but as an AI language model, I cannot do that.", True),
        ("I'm sorry for your loss. Here is what you can do:", False),
        ("I can help with that.", False),
        ("You can't help him, I cannot share more.", False),
        ("- I can't believe they sold my seat to someone else!", False),
        ("I'm sorry I can't come tonight.", False),
    ],
)
def test_a_refusal_is_told_from_an_apology(text, refused):
    assert responses.status_of(text, [1] * 10, "stop") == ("refused" if refused else "ok")


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

    def __init__(self, monkeypatch, limit=None, text="<think>t</think>to {}"):
        self.asked, self.limit, self.text = [], limit, text
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
                text=self.text.format(identifier), token_ids=[1, 2], finish_reason="stop"
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


# -- what teachers may be told and what they may not do ---------------------------------


@pytest.mark.parametrize("strip, content", [(True, "a b"), (False, " a b\n")])
def test_white_space_around_an_answer_is_dropped_only_when_asked(
    tmp_path, monkeypatch, strip, content
):
    FakeEngine(monkeypatch, text=" a b\n")
    settings = SETTINGS | {"strip": strip}
    part = new_part(tmp_path, "responses", settings)
    answers = responses.generate(prompt_rows(1), settings, "", "", RUNTIME, part)
    assert [row["content"] for row in answers.values()] == [content]


@pytest.mark.parametrize("ceiling, passes", [(0.5, False), (1.0, True)])
def test_too_many_refusals_are_an_error_that_keeps_the_answers(
    tmp_path, monkeypatch, ceiling, passes
):
    FakeEngine(monkeypatch, text="I'm sorry, but I can't help with that.")
    monkeypatch.setattr(responses.engine, "open_model", lambda folder: ("dir", "", {}))
    prompts = new_part(tmp_path, "prompts", {"test": 1})
    prompts = finished_table(prompts, "prompts.parquet", prompt_rows(4), tables.PROMPTS)
    model = new_part(tmp_path, "models", {"source": "test"})
    with model:
        model.finish([])
    model = model.folder
    keys = {"model": model.name, "prompts": prompts.name}
    out = tmp_path / "responses" / part_key("responses", SETTINGS, keys)
    args = argparse.Namespace(
        out=out, settings=SETTINGS, model=model, prompts=prompts, runtime={"device": "cpu",
        "threads": 1}, max_lost_share=0.02, max_refused_share=ceiling,
    )  # fmt: skip
    if passes:
        responses.main(args)
        assert store.read_manifest(out, "responses")["counts"] == {"refused": 4}
    else:
        with pytest.raises(UserError, match=r"refused 4 of 4 prompts.*max_refused_share 0.5"):
            responses.main(args)
        assert not (out / "manifest.json").exists()
        assert len(responses.finished_rows(out / "work")) == 4
