#!/usr/bin/env python3
"""Choose the decoder layers a model misses least, for a `derived` model.

Greedy: each step tries every layer that is left and drops the one whose removal
raises the loss on the model's own responses the least. Prints, per step, the
layers dropped so far (0-based, of the full model), loss, perplexity and how often
the most likely token is the full model's. Run by hand; writes nothing.
"""

import math
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
from scripts.lib import cli, engine, pruning, tables
from scripts.lib.errors import UserError


def choose(model, rows: list[dict], count: int):
    """Yield (layers dropped, loss, agreement) for 0, 1, ... `count` layers dropped."""
    total = len(pruning.decoder_layers(model))
    loss, reference = pruning.mean_loss(model, rows)
    yield [], loss, 1.0
    progress = cli.Progress("layers", sum(total - k for k in range(count)), "trials")
    dropped: list[int] = []
    for _ in range(count):
        trials = []
        for layer in sorted(set(range(total)) - set(dropped)):
            with pruning.without_layers(model, [*dropped, layer]):
                loss, choices = pruning.mean_loss(model, rows)
            agreement = float((choices == reference).float().mean())
            trials.append((loss, layer, agreement))
            progress.add(note=f"without {[*dropped, layer]}: loss {loss:.3f}")
        loss, layer, agreement = min(trials)
        dropped.append(layer)
        yield list(dropped), loss, agreement


def main(args) -> None:
    """Print one line per step."""
    import torch
    from transformers import AutoModelForCausalLM

    model_dir, _, facts = engine.open_model(args.model)
    if not 1 <= args.drop < facts["layers"]:
        raise UserError(
            f"--drop is {args.drop}, but the model has {facts['layers']} layers: drop at least "
            "one and keep at least one."
        )
    if args.rows < 1:
        raise UserError(f"--rows is {args.rows}. Take at least one row.")
    rows = tables.read(args.tokens, "tokens.parquet", "tokens", tables.TOKENS)
    rows = sorted(rows, key=lambda r: r["rank"])[: args.rows]
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, args.dtype)).eval()
    supervised = sum(sum(r["loss_mask"]) for r in rows)
    print(f"{model_dir}: {len(rows)} rows, {supervised} supervised tokens, {args.dtype}")
    print(f"{'dropped layers':24} {'loss':>8} {'perplexity':>11} {'top-1 agreement':>16}")
    for dropped, loss, agreement in choose(model, rows, args.drop):
        shown = ", ".join(map(str, dropped)) or "none"
        print(f"{shown:24} {loss:8.4f} {math.exp(loss):11.3f} {agreement:16.1%}", flush=True)


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="finished models part")
    parser.add_argument(
        "--tokens", type=Path, required=True, help="tokens part of the model's own responses"
    )
    parser.add_argument("--drop", type=int, required=True, help="layers to drop")
    parser.add_argument("--rows", type=int, default=32, help="rows to measure on, by rank")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="to compute in"
    )
    cli.run(main, parser.parse_args())
