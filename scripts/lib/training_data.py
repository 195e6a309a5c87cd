"""Training data: rows with hidden states, packed into batches."""

from pathlib import Path

import torch
from torch.utils.data import Dataset

from scripts.lib import packing, samples
from scripts.lib.shards import LayerShard


class StoredStates(Dataset):
    """Rows of token shards with their stored hidden states (offline mode).

    Args:
        rows: token rows as `samples.read_tokens` gives them.
        shards: per token shard, one LayerShard per draft layer and then the last layer.
    """

    def __init__(self, rows: list[dict], shards: list[list[LayerShard]]):
        self.rows, self.shards = rows, shards

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one sample; states are [tokens, layers * hidden] and [tokens, hidden]."""
        row = self.rows[index]
        *drafted, last = [s.row(row["row"]) for s in self.shards[row["shard"]]]
        length = len(row["input_ids"])
        return {
            "hidden_states": torch.cat(drafted, dim=-1),
            "input_ids": torch.tensor(row["input_ids"], dtype=torch.long),
            "verifier_last_hidden_states": last,
            "loss_mask": torch.tensor(row["loss_mask"], dtype=torch.bool),
            "lengths": torch.tensor([length], dtype=torch.long),
            "position_ids": torch.arange(length, dtype=torch.long),
        }


def open_states(token_folders: list[Path], state_folders: list[Path], layers: int):
    """Open the hidden-state parts of token shards.

    Args:
        token_folders: tokens parts.
        state_folders: `layers` hidden_states parts per token shard, in the same order.
        layers: parts per shard (draft layers and the last layer).
    """
    from scripts.lib import tables

    result = []
    for index, folder in enumerate(token_folders):
        rows = tables.read(folder, "tokens.parquet", "tokens", tables.TOKENS)
        ids = [row["prompt_id"] for row in rows]
        chosen = state_folders[index * layers : (index + 1) * layers]
        result.append([LayerShard(part, ids) for part in chosen])
    return result


def split(rows: list[dict], share: float) -> tuple[list[dict], list[dict]]:
    """Split rows into (training, validation) by prompt."""
    validation = [r for r in rows if samples.is_validation(r["prompt_id"], share)]
    training = [r for r in rows if not samples.is_validation(r["prompt_id"], share)]
    return training, validation


class PackedBatches:
    """The batches of every epoch: the same on every machine and after every restart.

    Args:
        dataset: a Dataset of samples with `rows`.
        settings: `total_seq_len`, `seed`.
        hidden: size of a state.
        layers: number of draft layers.
        preprocess: Speculators' per-sample function.
        world, rank: number of processes and this one's index.
    """

    def __init__(self, dataset, settings, hidden, layers, preprocess, world=1, rank=0):
        from speculators.train.data import CollateFn

        self.dataset, self.length, self.seed = dataset, settings["total_seq_len"], settings["seed"]
        # As stored: drafts whose `preprocess` drops a token of every row leave that slot empty.
        self.lengths = [len(r["input_ids"]) for r in dataset.rows]
        self.world, self.rank = world, rank
        self.collate = CollateFn(self.length, hidden, layers, torch.bfloat16, preprocess)
        self._packed: dict[int, list[list[int]]] = {}

    def rows(self, epoch: int) -> list[list[int]]:
        """Return the row numbers of every batch of an epoch.

        Raises:
            UserError: when a row is longer than a batch.
        """
        if epoch not in self._packed:
            self._packed[epoch] = packing.pack(
                self.lengths, self.length, self.seed, epoch, self.world, self.rank
            )
        return self._packed[epoch]

    def count(self, epoch: int) -> int:
        """Return the number of batches of an epoch."""
        return len(self.rows(epoch))

    def epoch(self, epoch: int, skip: int = 0):
        """Iterate over an epoch's batches from number `skip` on."""
        for number in range(skip, self.count(epoch)):
            yield self.batch(epoch, number)

    def batch(self, epoch: int, number: int) -> dict[str, torch.Tensor]:
        """Return the batch with a 0-based number of an epoch, [1, total_seq_len, ...]."""
        batch = self.collate([self.dataset[row] for row in self.rows(epoch)[number]])
        batch.pop("error_records", None)
        return batch
