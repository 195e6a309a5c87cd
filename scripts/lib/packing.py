"""Packing: which rows share a batch, so that few of its positions hold no token."""

from bisect import bisect_left, insort
from itertools import cycle, islice

import numpy as np

from scripts.lib.errors import UserError

# Long rows first leaves short ones to fill gaps. Sorting all rows would fill better
# still, but rows of one length would always meet in the same batches.
WINDOW = 256
OPEN = 128


def pack(
    lengths: list[int], room: int, seed: int, epoch: int, world: int = 1, rank: int = 0
) -> list[list[int]]:
    """Return an epoch's batches of one process; each is a list of row numbers.

    Windows of shuffled rows are placed longest first, each row into the fullest open
    batch that has room for it; then the batches are shuffled. Seed and epoch alone decide
    about them: the same batches, in the same order, are dealt out to however many
    processes there are. Where the last round is incomplete, batches from the epoch's
    start are repeated in it, so that all processes have the same number and no row is lost.

    Args:
        lengths: tokens of every row.
        room: tokens of a batch.
        seed, epoch: not negative.
        world, rank: number of processes and this one's index.

    Raises:
        UserError: when a row is longer than a batch.
    """
    longest = max(lengths, default=0)
    if longest > room:
        count = sum(length > room for length in lengths)
        raise UserError(
            f"{count} of {len(lengths)} rows do not fit into a batch of {room} tokens; the longest "
            f"has {longest}. Raise `total_seq_len` of the algorithm to {longest}, or lower "
            "`tokens.max_length`."
        )
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths)).tolist()
    batches: list[list[int]] = []
    opened: list[tuple[int, int]] = []  # (free tokens, batch), ascending: the fullest is first
    for start in range(0, len(order), WINDOW):
        for row in sorted(order[start : start + WINDOW], key=lambda r: -lengths[r]):
            place = bisect_left(opened, (lengths[row], 0))
            if place < len(opened):
                free, batch = opened.pop(place)
            else:
                if len(opened) == OPEN:
                    del opened[0]
                free, batch = room, len(batches)
                batches.append([])
            batches[batch].append(row)
            insort(opened, (free - lengths[row], batch))
    batches = [batches[b] for b in random.permutation(len(batches)).tolist()]
    rounds = -(-len(batches) // world)
    return list(islice(cycle(batches), rank, rounds * world, world))
