"""The training loop: one epoch of one draft, with Accelerate, resumable at any step.

Several processes (one per GPU, on one node or more) share the batches of each optimizer
step. `gradient_accumulation_steps` counts the batches of a step over all of them, so that
the number of GPUs changes how long training takes, and not what is trained.
"""

import contextlib
import csv
import math
import re
import signal
import time
from itertools import accumulate
from operator import mul
from pathlib import Path
from types import SimpleNamespace

import torch

from scripts.lib import cli, draft
from scripts.lib.errors import UserError


def learning_rate_factor(step: int, total: int, warmup_share: float, scheduler: str) -> float:
    """Return the factor on the learning rate at a 0-based step.

    Linear warm-up over the first `warmup_share` of the steps, then constant,
    linear to 0, or half a cosine to 0 at `total`.
    """
    warmup = max(1, round(warmup_share * total))
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    if scheduler == "constant":
        return 1.0
    return 1.0 - done if scheduler == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


@contextlib.contextmanager
def _deferred_signals():
    """Give a list that a first SIGINT or SIGTERM fills; a second one interrupts at once.

    Between steps is the only moment at which weights and optimizer belong together.
    """
    requested: list[int] = []

    def note(number, frame):
        if requested:
            raise KeyboardInterrupt
        requested.append(number)

    before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def build_optimizers(model, settings: dict) -> list[torch.optim.Optimizer]:
    """Return Speculators' optimizers for the trainable parameters, all settings explicit."""
    from speculators.train.optimizers import build_optimizers as build

    names = ("optimizer", "lr", "weight_decay", "muon_lr", "muon_momentum", "muon_weight_decay",
             "muon_ns_steps", "muon_adjust_lr_fn")  # fmt: skip
    return build(model, SimpleNamespace(**{n: settings[n] for n in names}))


class Trainer:
    """A draft in training.

    Args:
        built: the draft and its call arguments.
        settings: keyed settings of the speculators part.
        total_steps: optimizer steps of the whole schedule.
        runtime: `device` and `checkpoint_every_steps`.

    Raises:
        UserError: when the processes cannot share the batches of a step evenly.
    """

    def __init__(self, built: draft.Draft, settings: dict, total_steps: int, runtime: dict):
        from accelerate import Accelerator

        self.settings, self.total_steps, self.runtime = settings, total_steps, runtime
        self.train_arguments = built.train_arguments
        self.validation_arguments = built.validation_arguments
        self.accelerator = Accelerator(
            cpu=runtime["device"] == "cpu", mixed_precision=settings["mixed_precision"]
        )
        # speculators' groups may hold parameters without gradient; they are never stepped.
        optimizers = build_optimizers(built.model, settings)
        self.base_rates = [[g["lr"] for g in o.param_groups] for o in optimizers]
        self.world, self.rank = self.accelerator.num_processes, self.accelerator.process_index
        batches = settings["gradient_accumulation_steps"]
        if batches % self.world:
            raise UserError(
                f"gradient_accumulation_steps is {batches}, but training runs in {self.world} "
                "processes, which share the batches of a step. Make it a multiple of "
                f"{self.world}, or change runtime.training."
            )
        self.accumulate = batches // self.world
        self.model, *self.optimizers = self.accelerator.prepare(built.model, *optimizers)
        self.step = 0  # optimizer steps since the start of epoch 1
        self.epoch_facts: dict[str, float] = {}

    @property
    def raw_model(self):
        """The model without Accelerate's wrapping."""
        return self.accelerator.unwrap_model(self.model)

    def state(self) -> dict:
        """Return everything a restart needs."""
        return {
            "model": {n: p.detach().clone() for n, p in draft.trainable(self.raw_model).items()},
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step,
        }

    def load(self, state: dict) -> None:
        """Go on from what `state` returned."""
        draft.restore(self.raw_model, state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]

    def _set_rates(self) -> float:
        factor = learning_rate_factor(
            self.step, self.total_steps, self.settings["warmup_share"], self.settings["scheduler"]
        )
        for optimizer, rates in zip(self.optimizers, self.base_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
        return self.settings["lr"] * factor

    def _forward(self, model, batch: dict, arguments: dict):
        device = self.accelerator.device
        batch = {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}
        if self.settings["mixed_precision"] == "no":
            batch = {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}
        _, loss, metrics = model(**batch, **arguments)
        return loss, {k: float(v) for k, v in metrics.items()}

    def train_epoch(self, batches, epoch: int, work: Path | None = None) -> list[dict]:
        """Train one epoch; return a row of loss, rate and accuracy per optimizer step.

        Leaves in `epoch_facts`, for the batches trained by this call: `data_seconds`, the
        time spent waiting for them, and `padding_share`, the share of their positions
        that hold no token.

        Args:
            batches: `PackedBatches`.
            epoch: 1-based.
            work: folder for step checkpoints; an interrupted epoch goes on from there.

        Raises:
            UserError: when loss or gradients are not finite.
            KeyboardInterrupt: on SIGINT or SIGTERM, after the running step was saved.
        """
        with _deferred_signals() as stop:
            return self._train_epoch(batches, epoch, work, stop)

    def _train_epoch(self, batches, epoch: int, work: Path | None, stop: list) -> list[dict]:
        from speculators.train.utils import normalize_counted_metrics

        skip, history = 0, []
        if work and (work / "step.pt").exists():
            saved = draft.load_state(work / "step.pt")
            self.load(saved["trainer"])
            skip, history = saved["batch"], saved["history"]
            cli.log.info("resuming epoch %d at batch %d", epoch, skip)
        count = batches.count(epoch)
        progress = cli.Progress(f"training epoch {epoch}", count, "batches", done=skip)
        self.model.train()
        sums: dict[str, float] = {}
        started, waited, tokens, slots = time.monotonic(), 0.0, 0, 0
        coming = batches.epoch(epoch, skip)
        for number in range(skip + 1, count + 1):
            asked = time.monotonic()
            batch = next(coming)
            waited += time.monotonic() - asked
            # A seed per batch makes a resumed epoch equal to an uninterrupted one.
            place = (number - 1) * self.world + self.rank + 1
            torch.manual_seed(self.settings["seed"] * 1_000_003 + epoch * 100_003 + place)
            rate = self._set_rates()
            ends = not number % self.accumulate or number == count
            loss, metrics = self._forward(self.model, batch, self.train_arguments)
            if not torch.isfinite(loss):
                raise UserError(
                    f"loss is {loss.item()} at step {self.step + 1}. Lower `lr`, or raise "
                    "`warmup_share`, of the algorithm."
                )
            with contextlib.nullcontext() if ends else self.accelerator.no_sync(self.model):
                self.accelerator.backward(loss / self.accumulate)
            tokens += int((batch["document_ids"] >= 0).sum())
            slots += batch["document_ids"].numel()
            for key, value in metrics.items():
                sums[key] = sums.get(key, 0.0) + value
            if not ends:
                continue
            norm = self.accelerator.clip_grad_norm_(
                [p for p in self.model.parameters() if p.requires_grad],
                self.settings["max_grad_norm"],
            )
            if not math.isfinite(float(norm)):
                raise UserError(f"gradients are not finite at step {self.step + 1}. Lower `lr`.")
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.step += 1
            values = normalize_counted_metrics(self._over_processes(sums))
            history.append({"epoch": epoch, "step": self.step, "lr": rate,
                            "grad_norm": float(norm), **values})  # fmt: skip
            sums = {}
            speed = self.world * tokens / (time.monotonic() - started)
            progress.add(number - progress.done, f"loss {values['loss']:.3f}, {speed:.0f} tokens/s")
            every = self.runtime["checkpoint_every_steps"]
            due = bool(stop) or (self.step % every == 0 and number < count)
            if work and due and self.rank == 0:
                draft.save_state(
                    work / "step.pt",
                    {"trainer": self.state(), "batch": number, "history": history},
                )
            if stop and self.rank == 0:
                raise KeyboardInterrupt
        self.epoch_facts = {
            "data_seconds": round(waited, 3), "padding_share": 1 - tokens / max(1, slots),
        }  # fmt: skip
        return history

    @torch.no_grad()
    def validate(self, batches) -> dict[str, float]:
        """Return mean loss and accuracies over all of `batches` (its epoch 0)."""
        from speculators.train.utils import normalize_counted_metrics

        self.model.eval()
        sums: dict[str, float] = {}
        for number in range(self.rank, batches.count(0), self.world):
            # Block drafts choose their anchors at random, which must be the same for all.
            torch.manual_seed(self.settings["seed"] * 1_000_003 + number)
            _, metrics = self._forward(
                self.raw_model, batches.batch(0, number), self.validation_arguments
            )
            for key, value in metrics.items():
                sums[key] = sums.get(key, 0.0) + value
        return normalize_counted_metrics(self._over_processes(sums))

    def _over_processes(self, sums: dict[str, float]) -> dict[str, float]:
        """Return sums over all processes; one without any batch has no names of its own."""
        if self.world == 1:
            return sums
        from accelerate.utils import gather_object

        total: dict[str, float] = {}
        for own in gather_object([sums]):
            for name, value in own.items():
                total[name] = total.get(name, 0.0) + value
        return total


def accuracy_by_position(metrics: dict[str, float]) -> list[float]:
    """Return the share of held-out drafts right at each drafted position.

    For EAGLE-3 a position counts only if all before it were right; P-EAGLE and block
    drafts, which propose all positions at once, count each on its own.
    """
    cumulative = [n for n in metrics if re.fullmatch(r"full_acc_\d+", n)]
    single = [n for n in metrics if re.fullmatch(r"position_\d+_acc", n)]
    names = sorted(cumulative or single, key=lambda n: int(re.findall(r"\d+", n)[0]))
    return [metrics[n] for n in names]


def expected_acceptance_length(metrics: dict[str, float]) -> float:
    """Return 1 + the mean number of leading right positions of a draft (teacher forced).

    This is what greedy serving would accept on the same text. Block drafts report it
    themselves (`eal`); for P-EAGLE, which reports positions apart, they are taken as
    independent, so that the number is somewhat too low.
    """
    if "eal" in metrics:
        return metrics["eal"]
    accuracies = accuracy_by_position(metrics)
    if "full_acc_0" in metrics:
        return 1.0 + sum(accuracies)
    return 1.0 + sum(accumulate(accuracies, mul))


def write_history(path: Path, history: list[dict]) -> None:
    """Write the per-step rows as CSV."""
    with open(path, "w", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(history[0]))
        writer.writeheader()
        writer.writerows(history)
