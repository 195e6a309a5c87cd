#!/usr/bin/env python3
"""Print how our training loop compares with Speculators' own trainer.

That trainer is what `speculators train` runs. Both get drafts with the same first
weights, the same batches, optimizers, constant rates, bfloat16 autocast, clipping at 1
and, before each step, the same random seed. They take turns, a few steps each, in one
process, so that whatever else the machine does meets both. A third one is Speculators'
trainer with Speculators' own packing: what its users get.

Trains on the demo's data where that is stored. Else a small set is made first, in the
same way and the same store.
"""

import argparse
import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import chain, count, islice
from pathlib import Path
from statistics import median
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)
from scripts import bench

EPOCH = 1
ROUNDS, STEPS = 7, 5  # the first round warms up and is not timed
SMALL_PROMPTS, SMALL_VOCABULARY = 192, 1024
# Speculators clips at 1 and steps after every batch. Its warm-up is one step behind ours,
# so that only constant rates are the same at every step.
SAME = {
    "scheduler": "constant", "warmup_share": 0.0, "max_grad_norm": 1.0,
    "gradient_accumulation_steps": 1, "mixed_precision": "bf16",
}  # fmt: skip
DFLASH = {"algorithm": "dflash", "block_size": 4, "max_anchors": 128, "mask_token_id": 5}


def configuration(small: bool) -> dict:
    """Return the demo's configuration with DFlash beside EAGLE-3, on all prompts or on few."""
    import yaml

    config = yaml.safe_load((ROOT / "config/config.yaml").read_text())
    (eagle3,) = config["algorithms"].values()
    if small:
        eagle3["draft_vocab_size"] = SMALL_VOCABULARY
        config["pools"]["demo"]["shard_size"] = SMALL_PROMPTS
        for spec in (config["strategies"]["self"], config["vocabulary"]):
            spec["pools"] = {"demo": SMALL_PROMPTS}
    shared = ("layers", "draft_vocab_size", "optimizer", "lr", "muon_lr", "total_seq_len")
    config["algorithms"] = {"eagle3": eagle3, "dflash": {k: eagle3[k] for k in shared} | DFLASH}
    config["study"]["algorithms"] = list(config["algorithms"])
    return config


def specs(small: bool) -> tuple[dict[str, dict], list[str]]:
    """Return {algorithm: what a comparison needs}, and the manifests that it lacks."""
    from scripts.lib.config import check
    from scripts.lib.plan import Plan

    plan = Plan(check(configuration(small)))
    result, lacking = {}, set()
    for algorithm in plan.config["study"]["algorithms"]:
        node = plan.speculator("smollm2-135m", algorithm, "self", 1)
        states, vocab = plan.training_states(node), node.parents["vocab"]
        result[algorithm] = {
            "model": node.parents["model"].folder, "vocab": vocab.folder,
            "tokens": [n.folder for n in node.parents["tokens"]],
            "states": [n.folder for n in states],
            "settings": node.settings | SAME, "runtime": plan.config["runtime"],
        }  # fmt: skip
        if not all(Path(n.manifest).exists() for n in (*states, vocab)):
            lacking |= {*plan.inputs(states), vocab.manifest}
    return result, sorted(lacking)


def make_small(targets: list[str]) -> None:
    """Let Snakemake make the small data set."""
    print("no data of `make demo` here: making a small set (2 minutes) ...", file=sys.stderr)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(configuration(small=True), file)
        file.flush()
        result = subprocess.run(
            [sys.executable, "-m", "snakemake", *targets, "--configfile", file.name,
             "--quiet", "all"],
        )  # fmt: skip
    if result.returncode:
        raise SystemExit("the data could not be made; the messages above say why.")


class Slice:
    """`STEPS` of an epoch's batches from number `first` on."""

    def __init__(self, batches, first: int):
        self.batches, self.first = batches, first

    def count(self, epoch: int) -> int:
        """Return the number of batches."""
        return STEPS

    def epoch(self, epoch: int, skip: int = 0):
        """Iterate over the batches."""
        return islice(self.batches.epoch(epoch, self.first + skip), STEPS - skip)


def build(spec: dict):
    """Return the untrained draft; the seed makes it the same every time."""
    from scripts.lib import draft, engine

    directory, _, _ = engine.open_model(Path(spec["model"]))
    settings, vocab = spec["settings"], draft.load_vocab(Path(spec["vocab"]))
    return draft.build(settings, directory, vocab, "cpu", settings["seed"])


class Ours:
    """Our trainer on our batches."""

    def __init__(self, spec: dict, batches, built):
        from scripts.lib import training

        self.batches = batches
        self.trainer = training.Trainer(built, spec["settings"], 1, spec["runtime"])

    def run(self, first: int) -> tuple[list[float], float]:
        """Train `STEPS` steps from batch `first` on; return losses and seconds of waiting."""
        history = self.trainer.train_epoch(Slice(self.batches, first), EPOCH)
        return [h["loss"] for h in history], self.trainer.epoch_facts["data_seconds"]


class Records(logging.Handler):
    """Keeps what Speculators logs about every step."""

    def __init__(self):
        super().__init__()
        self.found: list[dict] = []

    def emit(self, record):
        """Keep a record."""
        self.found.append(record.msg)


class Theirs:
    """Speculators' trainer.

    Args:
        folder: rows as `write_rows` writes them.
        rows: row numbers of every batch.
    """

    def __init__(self, spec: dict, folder: Path, rows: list[list[int]], built):
        import torch
        from speculators.train import trainer as library
        from speculators.train.data import ArrowDataset
        from speculators.train.dataloader import _setup_dataloader

        # Without an accelerator it stops at three places: the rank it moves tensors to, the
        # device it waits for, and (below) the type it hands to autocast.
        library.get_local_rank = lambda: "cpu"
        torch.accelerator.synchronize = lambda: None
        settings, self.rows = spec["settings"], rows
        named = ("lr", "optimizer", "weight_decay", "muon_lr", "muon_momentum",
                 "muon_weight_decay", "muon_ns_steps", "muon_adjust_lr_fn")  # fmt: skip
        self.loader = _setup_dataloader(
            ArrowDataset(settings["total_seq_len"], folder, on_missing="raise"),
            settings["total_seq_len"], built.model.hidden_size, num_workers=0,
            num_target_layers=len(settings["layers"]), preprocess=built.preprocess,
        )  # fmt: skip
        config = library.TrainerConfig(
            num_epochs=1, save_path=str(folder / "checkpoints"), scheduler_type="none",
            train_call_kwargs=built.train_arguments, val_call_kwargs=built.validation_arguments,
            **{name: settings[name] for name in named},
        )  # fmt: skip
        self.trainer = library.Trainer(built.model, config, self.loader)
        self.trainer.device_type = "cpu"
        self.numbers = count(1)

        def seed(model, arguments, batch):
            # As `Trainer.train_epoch` does it.
            number = next(self.numbers)
            torch.manual_seed(settings["seed"] * 1_000_003 + EPOCH * 100_003 + number)

        built.model.register_forward_pre_hook(seed, with_kwargs=True)
        self.logger = library.metric_logger
        self.logger.setLevel(logging.INFO)

    def run(self, first: int) -> tuple[list[float], float]:
        """Train `STEPS` steps from batch `first` on; return losses and seconds of waiting."""
        self.loader.batch_sampler._cached_generated_batches = (
            EPOCH, self.rows[first : first + STEPS]
        )  # fmt: skip
        self.numbers = count(1)
        records = Records()
        self.logger.addHandler(records)
        self.trainer.train_epoch(EPOCH)
        self.logger.removeHandler(records)
        waited = sum(r["profile"]["fetch_ms"] for r in records.found) / 1000
        return [r["train"]["loss"] for r in records.found], waited


def write_rows(dataset, chosen: set[int], folder: Path) -> None:
    """Write rows as Speculators reads them, hidden states of the `chosen` ones only."""
    import torch
    from datasets import Dataset
    from safetensors.torch import save_file

    data = Dataset.from_dict({
        "input_ids": [r["input_ids"] for r in dataset.rows],
        "loss_mask": [[int(m) for m in r["loss_mask"]] for r in dataset.rows],
        "seq_len": [len(r["input_ids"]) for r in dataset.rows],
    })  # fmt: skip
    data.set_format(type="torch")
    data.save_to_disk(folder)
    (folder / "hidden_states").mkdir()
    for index in sorted(chosen):
        row = dataset[index]
        last = row["verifier_last_hidden_states"]
        states = torch.cat([row["hidden_states"], last], dim=-1).unflatten(-1, (-1, last.shape[1]))
        save_file(
            {"hidden_states": states, "token_ids": row["input_ids"]},
            folder / "hidden_states" / f"hs_{index}.safetensors",
        )


def compare(spec: dict) -> dict:
    """Train in turns.

    Returns:
        `blocks`: {name: [{seconds, waited, losses} of every round]}, and per packing, ours
        and theirs, `padding`: share of an epoch's positions without a token, and
        `tokens`: mean tokens of a batch.
    """
    import torch
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

    from scripts.lib import engine
    from scripts.lib.training_data import PackedBatches
    from scripts.speculators import load_splits

    settings = spec["settings"]
    torch.set_num_threads(spec["runtime"]["threads"])
    layers, room = len(settings["layers"]), settings["total_seq_len"]
    folders = {name: [Path(p) for p in spec[name]] for name in ("tokens", "states")}
    arguments = SimpleNamespace(settings=settings, own_tokens=[], **folders)
    dataset = load_splits(arguments, layers + 1)["train"]
    hidden = engine.open_model(Path(spec["model"]))[2]["hidden_size"]
    drafts = [build(spec) for _ in range(3)]
    preprocess = drafts[0].preprocess
    batches = PackedBatches(dataset, settings, hidden, layers, preprocess)
    sampler = MultipackDistributedBatchSamplerV2(
        room, batches.lengths, num_replicas=1, rank=0, seed=settings["seed"]
    )
    sampler.set_epoch(EPOCH)
    packings = {"ours": batches.rows(EPOCH), "theirs": [rows.tolist() for rows in sampler]}
    tokens = sum(batches.lengths) - (preprocess is not None) * len(dataset)  # see `shift_batch`
    used = {row for rows in packings.values() for row in chain(*rows[: ROUNDS * STEPS])}
    blocks: dict[str, list[dict]] = {"ours": [], "theirs": [], "theirs_packed": []}
    with tempfile.TemporaryDirectory(dir=ROOT / "results") as name:
        folder = Path(name)
        write_rows(dataset, used, folder)
        sides: dict[str, Ours | Theirs] = {
            "ours": Ours(spec, batches, drafts[0]),
            "theirs": Theirs(spec, folder, packings["ours"], drafts[1]),
            "theirs_packed": Theirs(spec, folder, packings["theirs"], drafts[2]),
        }
        for number in range(ROUNDS):
            # The order turns round, so that a machine that slows down favours none.
            for side in list(sides)[:: 1 if number % 2 else -1]:
                started = time.monotonic()
                losses, waited = sides[side].run(number * STEPS)
                seconds = time.monotonic() - started
                blocks[side].append({"seconds": seconds, "waited": waited, "losses": losses})
    return {
        "blocks": blocks,
        "padding": {k: 1 - tokens / (len(rows) * room) for k, rows in packings.items()},
        "tokens": {k: tokens / len(rows) for k, rows in packings.items()},
    }


def report(algorithm: str, found: dict) -> list[str]:
    """Return the lines to print."""
    timed = {side: blocks[1:] for side, blocks in found["blocks"].items()}

    def ratios(side):
        pairs = zip(timed[side], timed["ours"], strict=True)
        return [their["seconds"] / our["seconds"] for their, our in pairs]

    def waiting(side):
        return sum(b["waited"] for b in timed[side]) / sum(b["seconds"] for b in timed[side])

    same, packed = ratios("theirs"), median(ratios("theirs_packed"))
    packed *= found["tokens"]["ours"] / found["tokens"]["theirs"]
    losses = [chain(*(b["losses"] for b in found["blocks"][s])) for s in ("ours", "theirs")]
    apart = max(abs(our - their) / abs(their) for our, their in zip(*losses, strict=True))
    padding = found["padding"]
    return [
        f"{algorithm}: tokens/s, ours / Speculators: {median(same):.2f} on the same batches "
        f"(goal 1.00; {min(same):.2f} to {max(same):.2f}), {packed:.2f} with each one's packing",
        f"{algorithm}: losses at equal steps at most {apart:.2%} apart (goal 2 %); padding "
        f"{padding['ours']:.1%} (goal 5 %; Speculators {padding['theirs']:.1%}); waiting for data "
        f"{waiting('ours'):.1%} (goal 5 %; Speculators {waiting('theirs'):.1%}); peak memory of "
        f"all three {found['peak_gib']:.1f} GiB",
    ]


def main() -> None:
    """Compare each algorithm in a process of its own and print the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--spec", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        from scripts.lib import engine

        engine.set_environment(args.spec["runtime"])
        found = compare(args.spec)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps(found | {"peak_gib": peak}))
        return
    os.chdir(ROOT)  # the store's path is relative to it
    found, lacking = specs(small=False)
    if lacking:
        found, lacking = specs(small=True)
        if lacking:
            make_small(lacking)
    for algorithm, spec in found.items():
        measured = bench.measure(f"training {algorithm}", spec, __file__)
        print("\n".join(report(algorithm, measured)), flush=True)


if __name__ == "__main__":
    main()
