"""One process of a tiny training that several share (started by test_speculators.py).

train_shared.py VERIFIER ALGORITHM ROWS OUT: trains and validates an epoch; the first
process saves weights, history and validation metrics.
"""

import sys

import torch
from accelerate import PartialState
from test_speculators import make, weights


def train(verifier: str, algorithm: str, rows: int) -> dict:
    """Train one epoch, two batches per step, with all processes that there are."""
    torch.set_num_threads(1)
    own = {"gradient_accumulation_steps": 2, "algorithm": algorithm, "rows": rows}
    trainer, batches = make(verifier, **own)
    history = trainer.train_epoch(batches, 1)
    whole = make(verifier, **own, alone=True)[1]
    return {
        "weights": weights(trainer), "history": history, "validation": trainer.validate(whole),
        "batches": whole.count(1),
    }  # fmt: skip


if __name__ == "__main__":
    result = train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    if PartialState(cpu=True).process_index == 0:
        torch.save(result, sys.argv[4])
    PartialState().wait_for_everyone()
    PartialState().destroy_process_group()
