"""Prompts: read any common form, normalise, identify, order.

One row of a source is turned into `messages`, a list of {"role", "content"} that
ends with a user turn. Its id is a hash of the normalised messages, so the same
prompt has the same id in every pool and workload.
"""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq

from scripts.lib.errors import UserError
from scripts.lib.identity import canonical_json

_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
                   "system": "system", "tool": "tool"}  # fmt: skip


class BadRow(ValueError):
    """A row that is no usable prompt; its text is the reason that is counted."""


def to_messages(row: dict) -> list[dict[str, str]]:
    """Turn a row into messages that end with a user turn.

    Accepts plain `prompt` (text, or a list of messages), `messages` (OpenAI) and
    `conversations` (ShareGPT). A trailing assistant turn is dropped: it is the
    answer that a teacher is asked for.

    Raises:
        BadRow: when the row has none of these or its last turn is not the user's.
    """
    if isinstance(row.get("prompt"), str):
        turns = [{"role": "user", "content": row["prompt"]}]
    elif row.get("messages") is not None or isinstance(row.get("prompt"), list):
        turns = row["messages"] if row.get("messages") is not None else row["prompt"]
    elif row.get("conversations") is not None:
        turns = row["conversations"]
    else:
        raise BadRow("no prompt, messages or conversations")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise BadRow("conversation is not a list of turns")
    if row.get("messages") is None and row.get("conversations") is not None:
        turns = [
            {"role": _SHAREGPT_ROLES.get(str(t.get("from")), "unknown"), "content": t.get("value")}
            for t in turns
        ]
    messages = []
    for turn in turns:
        content = turn.get("content")
        if not isinstance(content, str):
            raise BadRow("content is not text")
        if not _encodes(content):
            raise BadRow("content is not valid Unicode")
        if turn.get("role") not in ("system", "user", "assistant"):
            raise BadRow("unsupported role")
        messages.append({"role": turn["role"], "content": content.strip()})
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] != "user":
        raise BadRow("no user turn at the end")
    if not messages[-1]["content"]:
        raise BadRow("empty prompt")
    return messages


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def prompt_id(messages: list[dict[str, str]]) -> str:
    """Return 32 hex digits that identify normalised messages (case and spaces folded)."""
    folded = [[m["role"], re.sub(r"\s+", " ", m["content"]).casefold()] for m in messages]
    return hashlib.sha256(canonical_json(folded).encode()).hexdigest()[:32]


def rank_hash(seed: int, identifier: str) -> str:
    """Return the sort key of hash order."""
    return hashlib.sha256(f"{seed}:{identifier}".encode()).hexdigest()


def read_rows(path: Path):
    """Yield (row number, row) of a JSONL or parquet file.

    Raises:
        UserError: when the file is missing, of another type or damaged.
    """
    number = 0
    try:
        if path.suffix == ".parquet":
            for number, row in enumerate(pq.read_table(path).to_pylist()):
                yield number, row
        elif path.suffix in (".jsonl", ".json"):
            with open(path, encoding="utf-8") as stream:
                for number, line in enumerate(stream):
                    if line.strip():
                        row = json.loads(line)
                        yield number, row if isinstance(row, dict) else {}
        else:
            raise UserError(f"{path}: unknown file type. Use .jsonl or .parquet.")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist. Check `path` in the configuration.") from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}, line {number + 1}, is not JSON ({error}). Mend that line."
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def load(paths: list[Path], seed: int) -> tuple[list[dict], Counter]:
    """Read, normalise, deduplicate and hash-order the prompts of one source.

    Returns:
        Rows {prompt_id, rank, messages, source} ordered by rank (0-based), and
        the number of dropped rows by reason.

    Raises:
        UserError: when nothing usable is left.
    """
    rows: dict[str, dict] = {}
    lost: Counter = Counter()
    for path in paths:
        for number, row in read_rows(path):
            try:
                messages = to_messages(row)
            except BadRow as reason:
                lost[str(reason)] += 1
                continue
            identifier = prompt_id(messages)
            if identifier in rows:
                lost["duplicate"] += 1
                continue
            source = f"{path.name}:{row.get('id', number)}"
            rows[identifier] = {
                "prompt_id": identifier, "messages": messages, "source": source}  # fmt: skip
    if not rows:
        raise UserError(
            f"{', '.join(map(str, paths))}: no usable prompt ({dict(lost) or 'empty file'}). "
            "Each row needs `prompt`, `messages` or `conversations`."
        )
    ordered = sorted(rows.values(), key=lambda r: rank_hash(seed, r["prompt_id"]))
    for rank, row in enumerate(ordered):
        row["rank"] = rank
    return ordered, lost
