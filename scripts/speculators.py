#!/usr/bin/env python3
"""Stage speculators: train one epoch of one draft; write a checkpoint that vLLM serves.

Epoch n starts from the weights, optimizer and step count of epoch n - 1, epoch 1
from nothing or from another strategy's checkpoint. An interrupted epoch resumes
from its last step checkpoint. Writes `checkpoint/`, `state.pt`, `steps.csv` and
`training.json`.
"""

import os
import shutil
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
from scripts.lib import cli, engine, launch, samples, store
from scripts.lib.errors import UserError
from scripts.lib.paths import Paths


def load_splits(args, layers: int):
    """Return datasets {"train", "validation"[, "own"]} of the strategy."""
    from scripts.lib.training_data import StoredStates, open_states, split

    settings = args.settings
    share = settings["validation_share"]
    count = len(args.tokens) * layers
    states = open_states(args.tokens, args.states[:count], layers)
    training, validation = split(samples.read_tokens(args.tokens, settings["ranks"]), share)
    samples.check_disjoint(training, validation)
    result = {
        "train": StoredStates(training, states),
        "validation": StoredStates(validation, states),
    }
    if args.own_tokens:
        own_states = open_states(args.own_tokens, args.states[count:], layers)
        _, own = split(samples.read_tokens(args.own_tokens, settings["own_ranks"]), share)
        result["own"] = StoredStates(own, own_states)
    return result


def train(args, folder: Path) -> dict:
    """Train the epoch of `args` and write the part's files to `folder`; return facts.

    With several processes all of them call it, and the first one writes.
    """
    import torch
    from accelerate import PartialState

    from scripts.lib import draft, training
    from scripts.lib.training_data import PackedBatches

    settings, runtime = args.settings, args.runtime
    processes = PartialState(cpu=runtime["device"] == "cpu")
    world, rank = processes.num_processes, processes.process_index
    if runtime["device"] == "cpu":
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # processes on this node
        torch.set_num_threads(max(1, runtime["threads"] // here))
    verifier_dir, _, facts = engine.open_model(args.model)
    layers = len(settings["layers"]) + 1
    data = load_splits(args, layers)
    vocab = draft.load_vocab(args.vocab)
    built = draft.build(settings, verifier_dir, vocab, runtime["device"], settings["seed"])
    batches = {
        name: PackedBatches(
            dataset, settings, facts["hidden_size"], layers - 1, built.preprocess,
            *((world, rank) if name == "train" else ()),
        )
        for name, dataset in data.items()
    }  # fmt: skip
    accumulate = max(1, settings["gradient_accumulation_steps"] // world)
    total = sum(
        -(-batches["train"].count(e) // accumulate)
        for e in range(1, settings["schedule_epochs"] + 1)
    )
    trainer = training.Trainer(built, settings, total, runtime)
    if args.previous:
        store.read_manifest(args.previous, "speculators")
        trainer.load(draft.load_state(store.data_file(args.previous, draft.STATE)))
    elif args.start:
        store.read_manifest(args.start, "speculators")
        state = draft.load_state(store.data_file(args.start, draft.STATE))
        draft.restore(trainer.raw_model, state["model"])
    started = time.monotonic()
    history = trainer.train_epoch(batches["train"], settings["epoch"], folder / "work")
    seconds = time.monotonic() - started
    evaluated = {k: trainer.validate(b) for k, b in batches.items() if k != "train"}
    rows = data["train"].rows
    result = {
        "epoch": settings["epoch"], "steps": len(history), "total_steps": total,
        "rows": len(rows), "validation_rows": len(data["validation"].rows),
        "tokens": sum(len(r["input_ids"]) for r in rows),
        "supervised_tokens": sum(sum(r["loss_mask"]) for r in rows),
        "train_seconds": round(seconds, 3), **trainer.epoch_facts, "lr_at_end": history[-1]["lr"],
        "train_loss": sum(h["loss"] for h in history) / len(history),
        "validation": evaluated, "resolved_settings": settings,
        "trainable_parameters": sum(p.numel() for p in draft.trainable(trainer.raw_model).values()),
        "expected_acceptance_length": {
            k: training.expected_acceptance_length(m) for k, m in evaluated.items()
        },
        "accuracy_by_position": {
            k: training.accuracy_by_position(m) for k, m in evaluated.items()
        },
        "vocab_coverage": {
            k: samples.coverage(samples.count_tokens(d.rows), vocab["t2d"]) for k, d in data.items()
        },
    }  # fmt: skip
    if rank == 0:
        training.write_history(folder / "steps.csv", history)
        draft.save_state(folder / draft.STATE, trainer.state())
        draft.save_checkpoint(trainer.raw_model, folder / draft.CHECKPOINT, verifier_dir)
        store.write_json(folder / "training.json", result)
    processes.wait_for_everyone()
    return result


def main(args) -> None:
    """Make the part `args.out`, or be one of several processes that train it."""
    if args.worker:
        train(args, args.out)
        return
    if args.previous and args.start:
        raise UserError("--previous and --start exclude each other.")
    inputs = {"model": args.model, "tokens": args.tokens, "vocab": args.vocab}
    for role in ("own_tokens", "previous", "start"):
        if getattr(args, role):
            inputs[role] = getattr(args, role)
    with store.Part(args.out, "speculators", args.settings, inputs, args.extra_inputs) as part:
        if part.finished:
            return
        cli.log.info("training %s", part.title)
        if args.runtime.get("training_processes", 1) > 1:
            result = launch.train(sys.argv, args, part)
        else:
            result = train(args, part.folder)
        part.finish(
            ["checkpoint", "state.pt", "steps.csv", "training.json"], counts={"ok": result["rows"]},
            facts={k: v for k, v in result.items() if k != "resolved_settings"},
            device=engine.device_facts(args.runtime),
        )  # fmt: skip
        shutil.rmtree(part.work, ignore_errors=True)
    shown = result["validation"]["validation"]
    cli.log.info(
        "epoch %d: training loss %.3f, validation loss %.3f, first position right %.1f %%, %.0f s",
        result["epoch"],
        result["train_loss"],
        shown["loss"],
        100 * result["accuracy_by_position"]["validation"][0],
        result["train_seconds"],
    )


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="models part of the verifier")
    parser.add_argument("--tokens", action=Paths, nargs="+", required=True, help="tokens parts")
    parser.add_argument("--own-tokens", action=Paths, nargs="+", default=[],
                        help="tokens parts of the verifier's own responses, if others")  # fmt: skip
    parser.add_argument(
        "--states",
        action=Paths,
        nargs="+",
        required=True,
        help="hidden_states parts: all layers of shard 1, of shard 2, ...",
    )
    parser.add_argument("--vocab", type=Path, required=True, help="vocab part")
    parser.add_argument("--previous", type=Path, help="speculators part of the epoch before")
    parser.add_argument("--start", type=Path, help="speculators part that epoch 1 starts from")
    parser.add_argument(
        "--settings", type=cli.json_argument, required=True, help="keyed settings (JSON)"
    )
    parser.add_argument(
        "--extra-inputs",
        type=cli.json_argument,
        default={},
        help="keyed inputs without a folder (JSON)",
    )
    parser.add_argument(
        "--runtime", type=cli.json_argument, required=True, help="engine settings (JSON)"
    )
    parser.add_argument("--out", type=Path, required=True, help="part folder, named after its key")
    parser.add_argument("--worker", type=Path, help="be one process of a training; its messages")
    cli.run(main, parser.parse_args())
