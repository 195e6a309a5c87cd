"""Samples: which rows of token shards a consumer reads, and the validation split."""

import hashlib
from collections import Counter
from pathlib import Path

from scripts.lib import tables
from scripts.lib.errors import UserError


def read_tokens(folders: list[Path], ranks: list[list[int]]) -> list[dict]:
    """Read the rows of a range of ranks from each token shard.

    Args:
        folders: finished tokens parts, in plan order.
        ranks: per folder [first rank, rank to stop before]. Dropped rows count as taken,
            so that a subset is a prefix whatever was dropped.

    Returns:
        Token rows; each also has `shard` (index into `folders`) and `row` (index
        in its shard's file, the same as in the shard's hidden states).

    Raises:
        UserError: when the shards have fewer prompts than asked for.
    """
    rows, lacking, short = [], 0, ""
    for shard, (folder, (first, stop)) in enumerate(zip(folders, ranks, strict=True)):
        found = tables.read(folder, "tokens.parquet", "tokens", tables.TOKENS)
        for number, row in enumerate(found):
            if first <= row["rank"] < stop:
                rows.append(row | {"shard": shard, "row": number})
        end = max((row["rank"] + 1 for row in found), default=first)
        if end < stop:
            lacking, short = lacking + stop - max(end, first), f"{folder} ends at rank {end}"
    asked = sum(stop - first for first, stop in ranks)
    # Rows at the very end may have been dropped; more than a few mean a short pool.
    if lacking > 0.05 * asked:
        raise UserError(
            f"{asked} prompts are asked for, {lacking} of them do not exist: {short}. Lower "
            "the sample count of that pool, or add prompts."
        )
    return rows


def count_tokens(rows: list[dict]) -> Counter:
    """Count the supervised token ids of token rows."""
    counter: Counter = Counter()
    for row in rows:
        counter.update(
            i for i, keep in zip(row["input_ids"], row["loss_mask"], strict=True) if keep
        )
    return counter


def coverage(counter: Counter, t2d) -> float:
    """Return the share of counted tokens that a draft vocabulary ([verifier vocab] bool) holds."""
    return sum(n for token, n in counter.items() if bool(t2d[token])) / counter.total()


def is_validation(prompt_id: str, share: float) -> bool:
    """Return whether a prompt belongs to the validation split.

    Depends on the prompt alone: every strategy, teacher and verifier holds out the
    same conversations.
    """
    value = int(hashlib.sha256(f"validation:{prompt_id}".encode()).hexdigest()[:8], 16)
    return value < share * 2**32


def check_disjoint(train: list[dict], validation: list[dict]) -> None:
    """Assert that no conversation is on both sides.

    Raises:
        UserError: when one is, or when a side is empty.
    """
    if not train or not validation:
        raise UserError(
            f"{len(train)} training and {len(validation)} validation rows: both must have some. "
            "Raise the sample count or `validation.share`."
        )
    assert not {r["prompt_id"] for r in train} & {r["prompt_id"] for r in validation}
