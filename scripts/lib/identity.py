"""Identity of results: canonical JSON, keys, and pins of local inputs.

A key says what a result was made from. It is computed while Snakemake parses,
so this module imports nothing heavy and touches only small files.
"""

import hashlib
import json
import os
from pathlib import Path

from scripts.lib.errors import UserError

# Raise a stage's number when its code starts to produce different content for
# the same settings and inputs; every key downstream changes with it.
CONTRACTS = {
    "models": 1,
    "prompts": 1,
    "workloads": 1,
    "responses": 2,
    "tokens": 2,
    "hidden_states": 1,
    "vocab": 1,
    "speculators": 2,
    "benchmarks": 1,
}

KEY_LENGTH = 16
_FULL_HASH_LIMIT = 256 * 2**20
_SMALL_FILE_LIMIT = 2**20


def normalise(value):
    """Return `value` with one spelling per meaning (1.0 -> 1, tuples -> lists).

    YAML and JSON readers disagree about 1 and 1.0; a key must not.

    Raises:
        TypeError: for a value that JSON cannot hold.
    """
    if isinstance(value, dict):
        return {str(k): normalise(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [normalise(v) for v in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} has no canonical JSON form")


def canonical_json(value) -> str:
    """Serialise `value` so that equal meanings give equal text."""
    return json.dumps(
        normalise(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def digest(value) -> str:
    """Return the short sha256 (16 hex digits) of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:KEY_LENGTH]


def part_key(stage: str, settings: dict, inputs: dict) -> str:
    """Return the key of a part.

    Args:
        stage: a name in `CONTRACTS`.
        settings: what the stage reads from the configuration, and nothing else.
        inputs: role -> key, or role -> list of keys.
    """
    return digest(
        {"stage": stage, "contract": CONTRACTS[stage], "settings": settings, "inputs": inputs}
    )


def sha256_file(path: Path) -> str:
    """Return the full sha256 of a file's content in hex."""
    hasher = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(2**20):
            hasher.update(block)
    return hasher.hexdigest()


def pin_file(path: Path) -> str:
    """Pin a data file: by content up to 256 MiB, above that by size and both ends.

    Raises:
        UserError: when the file cannot be read.
    """
    try:
        size = path.stat().st_size
        if size <= _FULL_HASH_LIMIT:
            return sha256_file(path)[:KEY_LENGTH]
        with open(path, "rb") as stream:
            head = hashlib.sha256(stream.read(_SMALL_FILE_LIMIT)).hexdigest()
            stream.seek(-_SMALL_FILE_LIMIT, os.SEEK_END)
            tail = hashlib.sha256(stream.read()).hexdigest()
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}. Check the path in the configuration."
        ) from error
    return digest([size, head, tail])


def pin_tree(folder: Path) -> str:
    """Pin a local directory by its file names, sizes and the content of small files.

    Raises:
        UserError: when `folder` is not a directory with files in it.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a directory. Check the model's `path`.")
    entries = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        size = path.stat().st_size
        content = sha256_file(path) if size <= _SMALL_FILE_LIMIT else None
        entries.append([path.relative_to(folder).as_posix(), size, content])
    if not entries:
        raise UserError(f"{folder} is empty. Put the model's files there.")
    return digest(entries)
