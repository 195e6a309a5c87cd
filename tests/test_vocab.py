"""Vocabulary: what is counted, which rows are read, and the coverage reported."""

import argparse
import random
from collections import Counter

import pytest
from helpers import finished_table, new_part
from safetensors.torch import load_file

from scripts import vocab
from scripts.lib import samples, store, tables
from scripts.lib.errors import UserError
from scripts.lib.identity import part_key

VOCAB_SIZE = 60


def token_rows(ranks, seed=0):
    draw = random.Random(seed)
    rows = []
    for rank in ranks:
        length = draw.randint(2, 9)
        ids = [min(int(draw.expovariate(0.1)), VOCAB_SIZE - 1) for _ in range(length)]
        mask = [draw.random() < 0.5 for _ in range(length)]
        rows.append(
            {"prompt_id": f"{rank:032x}", "rank": rank, "input_ids": ids, "loss_mask": mask}
        )
    return rows


def tokens_part(root, pool, index, rows):
    """Finish a tokens part at .../<pool>/shard-NNNNN/<key>; return its folder."""
    settings = {"pool": pool, "index": index}
    folder = root / "tokens" / pool / f"shard-{index:05d}" / part_key("tokens", settings, {})
    part = store.Part(folder, "tokens", settings, {})
    return finished_table(part, "tokens.parquet", rows, tables.TOKENS)


def model_part(root):
    part = new_part(root, "models", {"source": "test"})
    with part:
        facts = {"path": "model", "chat_template": "", "vocab_size": VOCAB_SIZE}
        store.write_json(part.folder / "model.json", facts)
        part.finish(["model.json"])
    return part.folder


def make(root, shards, size, asked):
    settings, model = {"size": size, "ranks": asked}, model_part(root)
    keys = {"model": model.name, "tokens": [s.name for s in shards]}
    out = root / "vocab" / part_key("vocab", settings, keys)
    vocab.main(argparse.Namespace(out=out, settings=settings, model=model, tokens=shards))
    return load_file(out / "vocab.safetensors"), store.read_manifest(out, "vocab")["facts"]


def test_only_supervised_tokens_are_counted():
    rows = token_rows(range(50))
    expected = {}
    for row in rows:
        for position, token in enumerate(row["input_ids"]):
            if row["loss_mask"][position]:
                expected[token] = expected.get(token, 0) + 1
    assert samples.count_tokens(rows) == expected
    assert samples.count_tokens([]) == {}


def test_row_whose_mask_has_another_length_is_refused():
    with pytest.raises(ValueError):
        samples.count_tokens([{"input_ids": [1, 2], "loss_mask": [True]}])


@pytest.mark.parametrize("size", [1, 7, 15, VOCAB_SIZE])
def test_mapping_and_coverage_equal_a_slow_computation(tmp_path, size):
    rows = token_rows(range(20))
    shards = [tokens_part(tmp_path, "p", i, rows[10 * i : 10 * i + 10]) for i in range(2)]
    mapping, facts = make(tmp_path, shards, size, [[0, 10], [10, 15]])
    kept = [
        t for r in rows[:15] for t, keep in zip(r["input_ids"], r["loss_mask"], strict=True) if keep
    ]
    by_count = sorted(range(VOCAB_SIZE), key=lambda t: (-kept.count(t), t))
    chosen = sorted(by_count[:size])
    assert [t for t in range(VOCAB_SIZE) if mapping["t2d"][t]] == chosen
    assert [d + int(shift) for d, shift in enumerate(mapping["d2t"])] == chosen
    assert facts["tokens"] == len(kept) and facts["distinct_tokens"] == len(set(kept))
    assert facts["coverage"] == pytest.approx(sum(t in chosen for t in kept) / len(kept), abs=1e-6)
    assert facts["size"] == size


def test_vocabulary_larger_than_the_models_is_refused(tmp_path):
    shard = tokens_part(tmp_path, "p", 0, token_rows(range(10)))
    with pytest.raises(UserError, match=f"{VOCAB_SIZE + 1} exceeds .* {VOCAB_SIZE}"):
        make(tmp_path, [shard], VOCAB_SIZE + 1, [[0, 10]])


def test_vocabulary_that_the_data_cannot_fill_is_refused(tmp_path):
    rows = token_rows(range(3))
    distinct = len(samples.count_tokens(rows))
    assert distinct < VOCAB_SIZE - 1
    shard = tokens_part(tmp_path, "p", 0, rows)
    with pytest.raises(UserError, match=f"{distinct + 1} cannot be filled.* 3 rows.* {distinct} "):
        make(tmp_path, [shard], distinct + 1, [[0, 3]])
    assert not list((tmp_path / "vocab").rglob("manifest.json"))


# -- which rows a consumer reads ---------------------------------------------------------


def test_rows_are_those_of_the_asked_ranks_of_each_shard(tmp_path):
    p, q = token_rows(range(20)), token_rows(range(10), seed=1)
    shards = [
        tokens_part(tmp_path, "p", 0, p[:10]),
        tokens_part(tmp_path, "p", 1, p[10:]),
        tokens_part(tmp_path, "q", 0, q),
    ]
    rows = samples.read_tokens(shards, [[0, 10], [10, 13], [0, 4]])
    assert [(r["shard"], r["row"], r["rank"]) for r in rows] == [
        *((0, i, i) for i in range(10)), *((1, i, 10 + i) for i in range(3)),
        *((2, i, i) for i in range(4)),
    ]  # fmt: skip
    for row in rows:
        original = (p if row["shard"] < 2 else q)[row["rank"]]
        assert {k: row[k] for k in original} == original


def test_dropped_rows_count_as_taken_so_that_a_subset_stays_a_prefix(tmp_path):
    rows = token_rows(r for r in range(20) if r != 3)
    shard = tokens_part(tmp_path, "p", 0, rows)
    assert [r["rank"] for r in samples.read_tokens([shard], [[0, 5]])] == [0, 1, 2, 4]
    assert samples.read_tokens([shard], [[0, 5]])[-1]["row"] == 3


def test_a_stretch_may_begin_and_end_inside_a_shard(tmp_path):
    shards = [tokens_part(tmp_path, "p", i, token_rows(range(10 * i, 10 * i + 10))) for i in (0, 1)]
    rows = samples.read_tokens(shards, [[7, 10], [10, 12]])
    assert [(r["shard"], r["row"], r["rank"]) for r in rows] == [
        (0, 7, 7), (0, 8, 8), (0, 9, 9), (1, 0, 10), (1, 1, 11)]  # fmt: skip


def test_pool_that_is_too_short_is_a_user_error(tmp_path):
    shard = tokens_part(tmp_path, "p", 0, token_rows(range(10)))
    with pytest.raises(UserError, match=f"20 prompts .* 10 of them .*{shard}.*rank 10"):
        samples.read_tokens([shard], [[0, 20]])


def test_validation_split_depends_on_the_prompt_alone_and_has_the_asked_share():
    ids = [f"{i:032x}" for i in range(4000)]
    held = {i for i in ids if samples.is_validation(i, 0.05)}
    assert 140 < len(held) < 260  # 200 expected, 14 is one standard deviation
    assert held <= {i for i in ids if samples.is_validation(i, 0.1)}
    assert not any(samples.is_validation(i, 0) for i in ids)
    assert all(samples.is_validation(i, 1) for i in ids)
    assert Counter(samples.is_validation(i, 0.05) for i in ids)[True] == len(held)


@pytest.mark.parametrize("train, validation", [([], ["a"]), (["a"], [])])
def test_empty_side_of_the_split_is_a_user_error(train, validation):
    sides = [[{"prompt_id": i} for i in side] for side in (train, validation)]
    with pytest.raises(UserError, match="validation"):
        samples.check_disjoint(*sides)


def test_conversation_on_both_sides_is_refused():
    with pytest.raises(AssertionError):
        samples.check_disjoint([{"prompt_id": "a"}], [{"prompt_id": "a"}, {"prompt_id": "b"}])
