"""Prompts: every form, bad rows counted, hash order, and the bundled data."""

import argparse
import hashlib
import json
import re
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import ROOT, new_part

from scripts import prompts as stage
from scripts.lib import prompts, tables
from scripts.lib.errors import UserError
from scripts.lib.identity import pin_file

DATA = ROOT / "config" / "data"
WORKLOADS = ("coding", "math_reasoning", "qa", "question", "rag", "summarization", "translation")


def write(path: Path, rows) -> Path:
    text = [r if isinstance(r, str) else json.dumps(r) for r in rows]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


def user(text):
    return {"role": "user", "content": text}


# -- forms -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": " Hi there "},
        {"prompt": [user("Hi there")]},
        {"messages": [user("Hi there\n")]},
        {"messages": [user("Hi there"), {"role": "assistant", "content": "Hello."}]},
        {"conversations": [{"from": "human", "value": "Hi there"}, {"from": "gpt", "value": "Yo"}]},
        {"conversations": [{"from": "user", "value": "Hi there"}], "messages": None, "id": 7},
    ],
    ids=str,
)
def test_every_form_gives_the_same_messages(row):
    assert prompts.to_messages(row) == [user("Hi there")]


def test_turns_before_the_last_question_are_kept():
    turns = [
        {"role": "system", "content": "Be brief."}, user("One?"),
        {"role": "assistant", "content": "1"}, user("Two?"),
    ]  # fmt: skip
    assert (
        prompts.to_messages({"messages": [*turns, {"role": "assistant", "content": "2"}]}) == turns
    )
    sharegpt = {"system": "system", "user": "human", "assistant": "gpt"}
    row = {"conversations": [{"from": sharegpt[t["role"]], "value": t["content"]} for t in turns]}
    assert prompts.to_messages(row) == turns


BAD_ROWS = [
    {},
    {"text": "x"},
    {"prompt": None},
    {"prompt": "  \n"},
    {"prompt": 5},
    {"messages": []},
    {"messages": [{"role": "assistant", "content": "x"}]},
    {"messages": [{"role": "tool", "content": "x"}]},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
    {"messages": [user("x"), {"role": "system", "content": "late"}]},
    {"conversations": [{"from": "bot", "value": "x"}]},
    {"conversations": [{"from": "tool", "value": "x"}]},
    {"messages": "not a list"},
    {"messages": ["not a turn"]},
    {"messages": 5},
    {"conversations": [None]},
    [1, 2],
    '{"prompt": "half an emoji \\ud83d"}',  # common in scraped chats; has no UTF-8 form
]


@pytest.mark.parametrize("row", BAD_ROWS, ids=str)
def test_bad_row_is_dropped_and_counted(tmp_path, row):
    path = write(tmp_path / "p.jsonl", [{"prompt": "good"}, row])
    rows, lost = prompts.load([path], 0)
    assert [r["messages"] for r in rows] == [[user("good")]]
    assert sum(lost.values()) == 1 and all(reason for reason in lost)


def test_parquet_and_jsonl_give_the_same_rows(tmp_path):
    turns = [[user(f"q{i}")] for i in range(9)]
    lines = write(tmp_path / "p.jsonl", [{"messages": t, "id": i} for i, t in enumerate(turns)])
    table = pa.table({"messages": turns, "id": list(range(9))})
    pq.write_table(table, tmp_path / "p.parquet")
    one, _ = prompts.load([lines], 3)
    two, _ = prompts.load([tmp_path / "p.parquet"], 3)
    assert [r | {"source": None} for r in one] == [r | {"source": None} for r in two]
    assert {r["source"] for r in two} == {f"p.parquet:{i}" for i in range(9)}


# -- identity and order --------------------------------------------------------------


def test_prompt_id_folds_case_and_spaces_and_nothing_else():
    def one(text, role="user"):
        return prompts.prompt_id([{"role": role, "content": text}])

    assert one("What  is\n1+1?") == one("what is 1+1?")
    different = [one("what is 1+1?"), one("what is 1+1"), one("what is 11?"), one("a", "system")]
    assert len(set(different)) == 4
    assert re.fullmatch("[0-9a-f]{32}", one("x"))
    assert prompts.prompt_id([user("a"), user("b")]) != prompts.prompt_id([user("a b")])


def test_hash_order_depends_on_seed_and_ids_alone(tmp_path):
    texts = [f"question {i}" for i in range(40)]
    forward = write(tmp_path / "a.jsonl", [{"prompt": t} for t in texts])
    backward = write(tmp_path / "b.jsonl", [{"prompt": t} for t in reversed(texts)])
    halves = [
        write(tmp_path / "c.jsonl", [{"prompt": t} for t in texts[20:]]),
        write(tmp_path / "d.jsonl", [{"prompt": t} for t in texts[:20]]),
    ]
    orders = [
        [r["prompt_id"] for r in prompts.load(p, 5)[0]] for p in ([forward], [backward], halves)
    ]
    assert orders[0] == orders[1] == orders[2]
    by_hash = sorted(orders[0], key=lambda i: hashlib.sha256(f"5:{i}".encode()).digest())
    assert orders[0] == by_hash
    assert [r["prompt_id"] for r in prompts.load([forward], 6)[0]] != orders[0]
    assert [r["rank"] for r in prompts.load([forward], 5)[0]] == list(range(40))


def test_new_prompts_do_not_reorder_the_old_ones(tmp_path):
    few = write(tmp_path / "few.jsonl", [{"prompt": f"q {i}"} for i in range(20)])
    many = write(tmp_path / "many.jsonl", [{"prompt": f"q {i}"} for i in range(50)])
    old = [r["prompt_id"] for r in prompts.load([few], 0)[0]]
    new = [r["prompt_id"] for r in prompts.load([many], 0)[0]]
    assert [i for i in new if i in set(old)] == old


def test_duplicates_across_files_and_spellings_are_dropped_and_counted(tmp_path):
    one = write(
        tmp_path / "a.jsonl", [{"prompt": "Same"}, {"prompt": "other"}, {"prompt": "same "}]
    )
    two = write(tmp_path / "b.jsonl", [{"messages": [user("SAME")]}])
    rows, lost = prompts.load([one, two], 0)
    assert len(rows) == 2 and lost == {"duplicate": 2}


# -- failures ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("p.jsonl", None, "does not exist"),
        ("p.jsonl", "", "no usable prompt"),
        ("p.jsonl", '{"text": 1}\n{"text": 2}\n', r"no usable prompt.*: 2"),
        ("p.jsonl", '{"prompt": "a"}\n\n{"prompt": \n{"prompt": "b"}\n', r"line 3\b"),
        ("p.csv", "prompt\na\n", "unknown file type"),
        ("p.parquet", "no parquet", "cannot be read"),
    ],
)
def test_unusable_source_is_a_user_error_that_names_it(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message) as error:
        prompts.load([tmp_path / name], 0)
    assert name in str(error.value)


# -- the stage -----------------------------------------------------------------------


def make(root, source, kind, **settings):
    settings = {"pins": [pin_file(source)], "seed": 0} | settings
    part = new_part(root, kind, settings)
    args = argparse.Namespace(
        out=part.folder, stage=kind, settings=settings, source=[source], max_lost_share=0.4
    )
    stage.main(args)
    return tables.read(part.folder, "prompts.parquet", kind, tables.PROMPTS)


def test_shards_cut_the_hash_order_and_any_number_of_samples_is_a_prefix(tmp_path):
    source = write(tmp_path / "p.jsonl", [{"prompt": f"q {i}"} for i in range(25)])
    ordered, _ = prompts.load([source], 0)
    shards = [make(tmp_path, source, "prompts", size=10, index=i) for i in range(3)]
    assert [len(s) for s in shards] == [10, 10, 5]
    assert [row for shard in shards for row in shard] == ordered
    with pytest.raises(UserError, match=r"25 usable prompts.*more than 30"):
        make(tmp_path, source, "prompts", size=10, index=3)


def test_workload_takes_the_first_prompts_and_refuses_too_few(tmp_path):
    source = write(tmp_path / "p.jsonl", [{"prompt": f"q {i}"} for i in range(25)])
    assert make(tmp_path, source, "workloads", prompts=7) == prompts.load([source], 0)[0][:7]
    with pytest.raises(UserError, match="25 usable prompts"):
        make(tmp_path, source, "workloads", prompts=26)


def test_source_that_changed_after_planning_is_refused(tmp_path):
    source = write(tmp_path / "p.jsonl", [{"prompt": "q"}])
    with pytest.raises(UserError, match="changed"):
        make(tmp_path, source, "prompts", size=1, index=0, pins=["0" * 16])


def test_stage_counts_what_it_dropped_and_refuses_to_drop_much(tmp_path):
    source = write(
        tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "A"}, {"prompt": "b"}, {"x": 1}]
    )
    make(tmp_path, source, "prompts", size=5, index=0)
    (manifest,) = (json.loads(p.read_text()) for p in tmp_path.rglob("manifest.json"))
    dropped = {k: v for k, v in manifest["counts"].items() if k.startswith("dropped")}
    assert manifest["counts"]["ok"] == 2 and sum(dropped.values()) == 2 and len(dropped) == 2
    # Duplicates are no loss: nobody misses them.
    worse = write(tmp_path / "q.jsonl", [{"prompt": "a"}, {"prompt": "A"}, {"x": 1}])
    with pytest.raises(UserError, match="1 of 2 rows lost"):
        make(tmp_path, worse, "prompts", size=5, index=0)


def test_part_that_another_workflow_finished_is_left_alone(tmp_path):
    source = write(tmp_path / "p.jsonl", [{"prompt": "q"}])
    make(tmp_path, source, "prompts", size=5, index=0)
    (path,) = tmp_path.rglob("prompts.parquet")
    before = path.stat().st_mtime_ns
    make(tmp_path, source, "prompts", size=5, index=0)
    assert path.stat().st_mtime_ns == before


# -- bundled data --------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundled():
    files = {p: None for p in [*sorted(DATA.glob("pool-*.jsonl")), *DATA.glob("workloads/*.jsonl")]}
    rows = {}
    for path in files:
        rows[path.stem], lost = prompts.load([path], 0)
        assert not lost, (path, lost)
    return rows


def words(row):
    return [
        w for m in row["messages"] if m["role"] == "user"
        for w in re.findall(r"\w+", m["content"].lower())
    ]  # fmt: skip


def pool_rows(bundled):
    return [row for name, rows in bundled.items() if name.startswith("pool-") for row in rows]


def test_bundled_pool_and_workloads_are_large_enough_and_without_duplicates(bundled):
    pool = pool_rows(bundled)
    assert len({r["prompt_id"] for r in pool}) == len(pool) >= 300
    assert {n for n in bundled if not n.startswith("pool-")} == set(WORKLOADS)
    assert all(len(bundled[w]) >= 20 for w in WORKLOADS)
    evaluation = Counter(r["prompt_id"] for w in WORKLOADS for r in bundled[w])
    assert max(evaluation.values()) == 1


def test_no_bundled_workload_prompt_occurs_in_the_pool(bundled):
    def grams(row, length=13):
        found = words(row)
        return {tuple(found[i : i + length]) for i in range(len(found) - length + 1)}

    pool = pool_rows(bundled)
    ids, seen = {r["prompt_id"] for r in pool}, set().union(*(grams(r) for r in pool))
    assert len(seen) > 5000  # the check has something to find
    for workload in WORKLOADS:
        for row in bundled[workload]:
            assert row["prompt_id"] not in ids, row["messages"]
            assert not grams(row) & seen, (workload, sorted(grams(row) & seen)[:1])


def test_bundled_pool_is_not_filled_from_templates(bundled):
    starts = Counter(tuple(words(row)[:5]) for row in pool_rows(bundled))
    assert starts.most_common(1)[0][1] <= 4, starts.most_common(3)
