"""The training loop: one epoch of one draft, with Accelerate, resumable at any step."""

import csv
import math
import re
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

    def _forward(self, batch: dict, arguments: dict):
        device = self.accelerator.device
        batch = {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}
        if self.settings["mixed_precision"] == "no":
            batch = {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}
        _, loss, metrics = self.model(**batch, **arguments)
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
        """
        from speculators.train.utils import normalize_counted_metrics

        accumulate = self.settings["gradient_accumulation_steps"]
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
            # A seed per step makes a resumed epoch equal to an uninterrupted one.
            torch.manual_seed(self.settings["seed"] * 1_000_003 + epoch * 100_003 + number)
            rate = self._set_rates()
            loss, metrics = self._forward(batch, self.train_arguments)
            if not torch.isfinite(loss):
                raise UserError(
                    f"loss is {loss.item()} at step {self.step + 1}. Lower `lr`, or raise "
                    "`warmup_share`, of the algorithm."
                )
            self.accelerator.backward(loss / accumulate)
            tokens += int((batch["document_ids"] >= 0).sum())
            slots += batch["document_ids"].numel()
            for key, value in metrics.items():
                sums[key] = sums.get(key, 0.0) + value
            if number % accumulate and number < count:
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
            values = normalize_counted_metrics(sums)
            history.append({"epoch": epoch, "step": self.step, "lr": rate,
                            "grad_norm": float(norm), **values})  # fmt: skip
            sums = {}
            speed = tokens / (time.monotonic() - started)
            progress.add(number - progress.done, f"loss {values['loss']:.3f}, {speed:.0f} tokens/s")
            every = self.runtime["checkpoint_every_steps"]
            if work and self.step % every == 0 and number < count:
                draft.save_state(
                    work / "step.pt",
                    {"trainer": self.state(), "batch": number, "history": history},
                )
        self.epoch_facts = {"data_seconds": round(waited, 3), "padding_share": 1 - tokens / slots}
        return history

    @torch.no_grad()
    def validate(self, batches) -> dict[str, float]:
        """Return mean loss and accuracies over all of `batches` (its epoch 0)."""
        from speculators.train.utils import normalize_counted_metrics

        self.model.eval()
        sums: dict[str, float] = {}
        for number, batch in enumerate(batches.epoch(0)):
            # Block drafts choose their anchors at random, which must be the same for all.
            torch.manual_seed(self.settings["seed"] * 1_000_003 + number)
            _, metrics = self._forward(batch, self.validation_arguments)
            for key, value in metrics.items():
                sums[key] = sums.get(key, 0.0) + value
        return normalize_counted_metrics(sums)


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
