"""Parquet files of the contracts: schemas, writing with metadata, checked reading."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from scripts.lib import store
from scripts.lib.errors import UserError
from scripts.lib.identity import CONTRACTS

_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))

PROMPTS = pa.schema([
    ("prompt_id", pa.string()), ("rank", pa.int64()), ("messages", _MESSAGES),
    ("source", pa.string()),
])  # fmt: skip

RESPONSES = pa.schema([
    ("prompt_id", pa.string()), ("rank", pa.int64()), ("messages", _MESSAGES),
    ("reasoning", pa.string()), ("content", pa.string()), ("finish_reason", pa.string()),
    ("prompt_tokens", pa.int32()), ("response_tokens", pa.int32()), ("seed", pa.int64()),
    ("status", pa.string()),
])  # fmt: skip

TOKENS = pa.schema([
    ("prompt_id", pa.string()), ("rank", pa.int64()),
    ("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.bool_())),
])  # fmt: skip


def write(path: Path, rows: list[dict], schema: pa.Schema, metadata: dict[str, str]) -> None:
    """Write rows as one zstd parquet file that is either absent or whole."""
    table = pa.Table.from_pylist(rows, schema=schema.with_metadata(metadata))
    with store.replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def read(folder: Path, name: str, stage: str, schema: pa.Schema) -> list[dict]:
    """Read a finished part's parquet file as rows after checking it (see `read_table`)."""
    return read_table(folder, name, stage, schema).to_pylist()


def read_table(folder: Path, name: str, stage: str, schema: pa.Schema) -> pa.Table:
    """Read a finished part's parquet file after checking it.

    Raises:
        UserError: naming file, expected and found, when contract, key, columns or
            the number of rows are not what the manifest says.
    """
    manifest = store.read_manifest(folder, stage)
    path = store.data_file(folder, name, manifest)
    try:
        with pq.ParquetFile(path) as file:  # half the time of `read_table` for a small file
            table = file.read()
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(
            f"{path} is damaged ({error}). Remove the folder {folder}; the next run makes it again."
        ) from error
    found_meta = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
    for field, expected in (("contract", str(CONTRACTS[stage])), ("key", manifest["key"])):
        if found_meta.get(field) != expected:
            raise UserError(
                f"{path}: expected {field} {expected}, found {found_meta.get(field)}. Remove "
                f"the folder {folder}; the next run makes it again."
            )
    if table.column_names != schema.names:
        raise UserError(f"{path}: expected columns {schema.names}, found {table.column_names}.")
    expected_rows = manifest["facts"]["rows"]
    if table.num_rows != expected_rows:
        raise UserError(f"{path}: expected {expected_rows} rows, found {table.num_rows}.")
    return table
