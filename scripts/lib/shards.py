"""Hidden-state shards: one safetensors file per token shard and layer.

Tensors of a file: `states` [tokens, hidden] (bfloat16, all rows one after the
other), `offsets` [rows + 1] (int64), `prompt_ids` [rows, 16] (uint8). The writer
knows all sizes beforehand, so rows can arrive in any order, memory stays bounded
by one row, and an interrupted file is continued where it stopped.
"""

import json
import os
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from scripts.lib import store
from scripts.lib.errors import UserError
from scripts.lib.identity import CONTRACTS

FILE = "states.safetensors"
_BYTES = {torch.bfloat16: 2}
_NAMES = {torch.bfloat16: "BF16"}


class ShardWriter:
    """Writes one layer's rows into a file of known size, resumably.

    Args:
        path: final path; until `close` the data is at `<path>.part`.
        prompt_ids: [rows] ids of 32 hex digits.
        lengths: [rows] tokens per row.
        hidden: size of a state.
        metadata: text metadata of the file.
    """

    def __init__(self, path: Path, prompt_ids, lengths, hidden: int, metadata: dict[str, str]):
        self.path, self.hidden, self.dtype = path, hidden, torch.bfloat16
        self.part = path.with_name(path.name + ".part")
        self.marks = path.with_name(path.name + ".rows")
        self.offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        ids = np.frombuffer(bytes.fromhex("".join(prompt_ids)), dtype=np.uint8)
        small = self.offsets.tobytes() + ids.tobytes()
        states_bytes = int(self.offsets[-1]) * hidden * _BYTES[self.dtype]
        header: dict[str, dict] = {"__metadata__": metadata}
        for name, dtype, shape, start, size in (
            ("offsets", "I64", [len(self.offsets)], 0, self.offsets.nbytes),
            ("prompt_ids", "U8", [len(prompt_ids), 16], self.offsets.nbytes, ids.nbytes),
            (
                "states",
                _NAMES[self.dtype],
                [int(self.offsets[-1]), hidden],
                len(small),
                states_bytes,
            ),
        ):
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        head = len(text).to_bytes(8, "little") + text + small
        self.start = len(head)
        size = self.start + states_bytes
        if not self._resumable(head, size, len(prompt_ids)):
            self.marks.unlink(missing_ok=True)
            with open(self.part, "wb") as stream:
                stream.write(head)
                stream.truncate(size)
            self.marks.write_bytes(bytes(len(prompt_ids)))
        self._data = os.open(self.part, os.O_RDWR)
        self._marks = os.open(self.marks, os.O_RDWR)
        self.done = np.frombuffer(self.marks.read_bytes(), dtype=np.uint8).copy()

    def _resumable(self, head: bytes, size: int, rows: int) -> bool:
        if not (self.part.exists() and self.marks.exists()):
            return False
        if self.part.stat().st_size != size or self.marks.stat().st_size != rows:
            return False
        with open(self.part, "rb") as stream:
            return stream.read(len(head)) == head

    def write(self, row: int, states: torch.Tensor) -> None:
        """Write one row's states [tokens, hidden].

        Raises:
            UserError: when the number of tokens is not the row's.
            ValueError: for states that are not finite.
        """
        expected = int(self.offsets[row + 1] - self.offsets[row])
        if tuple(states.shape) != (expected, self.hidden):
            raise UserError(
                f"{self.path}: row {row} has states of shape {tuple(states.shape)}, expected "
                f"{(expected, self.hidden)}. The engine dropped tokens; check max_model_len."
            )
        if not torch.isfinite(states).all():
            raise ValueError(f"{self.path}: row {row} has states that are not finite")
        raw = states.to(self.dtype).contiguous().view(torch.uint8).numpy().tobytes()
        position = self.start + int(self.offsets[row]) * self.hidden * _BYTES[self.dtype]
        view = memoryview(raw)
        while view:
            written = os.pwrite(self._data, view, position)
            view, position = view[written:], position + written
        os.pwrite(self._marks, b"\1", row)
        self.done[row] = 1

    def suspend(self) -> None:
        """Close the files; the rows written so far are kept for the next attempt."""
        os.close(self._data)
        os.close(self._marks)

    def close(self) -> None:
        """Give the file its final name.

        Raises:
            UserError: when rows are missing.
        """
        missing = int((self.done == 0).sum())
        if missing:
            raise UserError(f"{self.path}: {missing} rows have no states.")
        os.fsync(self._data)
        self.suspend()
        os.replace(self.part, self.path)
        self.marks.unlink()


class LayerShard:
    """One layer's states of one token shard, memory mapped.

    Args:
        folder: finished hidden_states part.
        prompt_ids: [rows] ids the token shard has; checked against the file.

    Raises:
        UserError: when the file is cut, of another contract, or of other rows.
    """

    def __init__(self, folder: Path, prompt_ids: list[str]):
        manifest = store.read_manifest(folder, "hidden_states")
        path = store.data_file(folder, FILE, manifest)
        self._file = safe_open(str(path), framework="pt")
        meta = self._file.metadata() or {}
        if (
            meta.get("contract") != str(CONTRACTS["hidden_states"])
            or meta.get("key") != manifest["key"]
        ):
            raise UserError(
                f"{path}: expected key {manifest['key']}, found {meta.get('key')}. Remove the "
                f"folder {folder}; the next run makes it again."
            )
        found = self._file.get_tensor("prompt_ids").numpy().tobytes().hex()
        if found != "".join(prompt_ids):
            raise UserError(f"{path} holds other rows than its token shard. Remove {folder}.")
        self.offsets = self._file.get_tensor("offsets").tolist()
        self._states = self._file.get_slice("states")

    def row(self, index: int) -> torch.Tensor:
        """Return one row's states [tokens, hidden]."""
        return self._states[self.offsets[index] : self.offsets[index + 1]]
