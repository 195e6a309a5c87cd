"""Training: schedule, exact continuation and resumption, refusal of bad numbers."""

import math
import os
import signal
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from helpers import ROOT

from scripts.lib import config, draft, training
from scripts.lib.errors import UserError
from scripts.lib.training_data import PackedBatches, split

HIDDEN, VOCAB, LAYERS = 32, 96, 4
COMMON = {
    "layers": [1, 2, 3], "draft_vocab_size": 64, "optimizer": "muon", "lr": 1e-3,
    "muon_lr": 2e-3, "warmup_share": 0.1, "total_seq_len": 48, "mixed_precision": "no",
}  # fmt: skip
OWN = {
    "eagle3": {"ttt_steps": 2},
    "peagle": {"num_depths": 3, "mask_token_id": 5, "max_anchors": 32},
    "dflash": {"block_size": 4, "mask_token_id": 5, "max_anchors": 8},
    "dflash2": {"draft_vocab_size": VOCAB, "block_size": 4, "mask_token_id": 5, "max_anchors": 8,
                "conv_group_size": 4, "selector_rank": 8, "selector_top_k": 4},
    "dspark": {"block_size": 4, "mask_token_id": 5, "max_anchors": 8, "markov_rank": 8},
}  # fmt: skip


def recipe(algorithm, **changes):
    """Return the resolved settings of a small training, as a study file would give them."""
    schema = config.load_schema()
    written = {"algorithm": algorithm} | COMMON | OWN[algorithm] | changes
    filled = config._fill(written, {"$ref": f"#/$defs/{algorithm}"}, schema)
    return filled | {"seed": 3}


SETTINGS = recipe("eagle3")
RUNTIME = {"device": "cpu", "threads": 2, "checkpoint_every_steps": 2}


class RandomStates(torch.utils.data.Dataset):
    """Rows with random states; what a verifier would give does not matter here."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(0)
        self.rows = []
        for number in range(count):
            length = int(torch.randint(8, 30, (1,), generator=generator))
            ids = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
            self.rows.append({"prompt_id": f"{number:032x}", "input_ids": ids})
        self.states = [
            torch.randn(len(r["input_ids"]), LAYERS * HIDDEN, generator=generator).bfloat16()
            for r in self.rows
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        length = len(self.rows[index]["input_ids"])
        return {
            "hidden_states": self.states[index][:, : 3 * HIDDEN],
            "input_ids": torch.tensor(self.rows[index]["input_ids"]),
            "verifier_last_hidden_states": self.states[index][:, 3 * HIDDEN :],
            "loss_mask": torch.arange(length) >= 4,
            "lengths": torch.tensor([length]), "position_ids": torch.arange(length),
        }  # fmt: skip


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    """A tiny Llama verifier on disk."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("verifier")
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def make(verifier, total_steps=100, algorithm="eagle3", rows=12, alone=False, **changes):
    """Return a trainer and its batches; `alone`: all of them, for whichever process asks."""
    processes = PartialState(cpu=True)
    world = 1 if alone else processes.num_processes
    settings = recipe(algorithm, **changes)
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[:64] = True
    vocab = {"t2d": t2d, "d2t": torch.zeros(64, dtype=torch.long)}
    built = draft.build(settings, verifier, vocab, "cpu", settings["seed"])
    batches = PackedBatches(
        RandomStates(rows), settings, HIDDEN, 3, built.preprocess, world,
        processes.process_index % world,
    )  # fmt: skip
    return training.Trainer(built, settings, total_steps, RUNTIME), batches


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in draft.trainable(trainer.raw_model).values()])


def test_schedule_warms_up_and_decays_to_zero():
    factors = [training.learning_rate_factor(s, 100, 0.1, "cosine") for s in range(101)]
    assert factors[:10] == [pytest.approx((s + 1) / 10) for s in range(10)]
    expected = [0.5 * (1 + math.cos(math.pi * (s - 10) / 90)) for s in range(10, 101)]
    assert factors[10:] == pytest.approx(expected)
    assert training.learning_rate_factor(55, 100, 0.1, "linear") == pytest.approx(0.5)
    assert training.learning_rate_factor(99, 100, 0.1, "constant") == 1.0


def test_two_epochs_in_one_go_equal_two_single_epochs(verifier, tmp_path):
    straight, batches = make(verifier)
    straight.train_epoch(batches, 1)
    straight.train_epoch(batches, 2)

    first, batches = make(verifier)
    first.train_epoch(batches, 1)
    draft.save_state(tmp_path / "state.pt", first.state())
    second, batches = make(verifier)
    second.load(draft.load_state(tmp_path / "state.pt"))
    second.train_epoch(batches, 2)

    assert second.step == straight.step
    assert torch.equal(weights(second), weights(straight))


def test_an_interrupted_epoch_resumes_to_the_same_weights(verifier, tmp_path):
    straight, batches = make(verifier)
    expected = straight.train_epoch(batches, 1)

    broken, batches = make(verifier)
    count = batches.count(1)
    assert count > 4
    original, calls = broken._forward, []

    def dies(*given):
        calls.append(1)
        if len(calls) == count - 1:
            raise KeyboardInterrupt
        return original(*given)

    broken._forward = dies
    with pytest.raises(KeyboardInterrupt):
        broken.train_epoch(batches, 1, tmp_path)
    resumed, batches = make(verifier)
    seen = []
    plain = resumed._forward
    resumed._forward = lambda *given: (seen.append(1), plain(*given))[1]
    history = resumed.train_epoch(batches, 1, tmp_path)

    assert 0 < len(seen) < count  # it did not start over
    assert history == expected
    assert torch.equal(weights(resumed), weights(straight))
    # The facts are of the batches that this attempt trained, not of those before it.
    left = batches.rows(1)[count - len(seen) :]
    tokens = sum(batches.lengths[i] - 1 for i in chain(*left))  # EAGLE's shift drops one
    assert resumed.epoch_facts["padding_share"] == pytest.approx(1 - tokens / (48 * len(left)))
    assert 0 <= resumed.epoch_facts["data_seconds"] < 60


@pytest.mark.parametrize("last", [False, True])
def test_sigterm_saves_the_running_step(verifier, tmp_path, last):
    """Slurm gives half a minute between SIGTERM and SIGKILL."""
    straight, batches = make(verifier)
    expected = straight.train_epoch(batches, 1)
    count = batches.count(1)

    stopped, batches = make(verifier)
    stopped.runtime = RUNTIME | {"checkpoint_every_steps": 1000}
    plain, calls, when = stopped._forward, [], count if last else 3

    def told(*given):
        calls.append(1)
        if len(calls) == when:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(*given)

    stopped._forward = told
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        stopped.train_epoch(batches, 1, tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before
    assert len(calls) == when  # the step went on to its end, the next did not begin

    resumed, batches = make(verifier)
    seen, forward = [], resumed._forward
    resumed._forward = lambda *given: (seen.append(1), forward(*given))[1]
    assert resumed.train_epoch(batches, 1, tmp_path) == expected
    assert len(seen) == count - when
    assert torch.equal(weights(resumed), weights(straight))


@pytest.mark.parametrize("algorithm", ["eagle3", "peagle", "dflash"])
def test_two_processes_train_what_one_trains(verifier, tmp_path, algorithm):
    rows = 15
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(Path(__file__).with_name("train_shared.py")), verifier, algorithm, str(rows),
         str(tmp_path / "two.pt")],
        check=True, capture_output=True, timeout=240,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    two = torch.load(tmp_path / "two.pt", weights_only=True)
    from train_shared import train

    one = train(verifier, algorithm, rows)
    # Of an odd number of batches the last step would repeat one.
    assert one["batches"] == two["batches"] and one["batches"] % 2 == 0
    assert len(two["history"]) == len(one["history"]) == one["batches"] // 2
    for a, b in zip(one["history"], two["history"], strict=True):
        assert b == pytest.approx(a, rel=1e-4, abs=1e-6)
    assert two["validation"] == pytest.approx(one["validation"], rel=1e-4, abs=1e-6)
    assert torch.allclose(two["weights"], one["weights"], atol=1e-5)


def test_processes_that_cannot_share_a_step_are_refused(verifier, monkeypatch):
    monkeypatch.setattr("accelerate.Accelerator.num_processes", 2)
    with pytest.raises(UserError, match=r"gradient_accumulation_steps is 3.*2 processes"):
        make(verifier, gradient_accumulation_steps=3)


@pytest.mark.parametrize("algorithm", OWN)
def test_training_lowers_the_loss_and_freezes_the_verifier(verifier, algorithm):
    trainer, batches = make(verifier, algorithm=algorithm, lr=1e-2, muon_lr=2e-2)
    frozen = {
        n: p.detach().clone()
        for n, p in trainer.raw_model.named_parameters()
        if not p.requires_grad
    }
    before = trainer.validate(batches)["loss"]
    assert len(training.accuracy_by_position(trainer.validate(batches))) >= 2
    for epoch in range(1, 9):
        trainer.train_epoch(batches, epoch)
    assert trainer.validate(batches)["loss"] < 0.95 * before
    for name, parameter in trainer.raw_model.named_parameters():
        if name in frozen:
            assert torch.equal(parameter, frozen[name]), name


def test_a_loss_that_is_not_finite_is_refused(verifier):
    trainer, batches = make(verifier)
    with torch.no_grad():
        next(iter(draft.trainable(trainer.raw_model).values())).fill_(float("nan"))
    with pytest.raises(UserError, match=r"loss is nan at step 1.*Lower `lr`"):
        trainer.train_epoch(batches, 1)


def test_a_checkpoint_with_bad_weights_is_never_written(verifier, tmp_path):
    trainer, _ = make(verifier)
    with torch.no_grad():
        next(iter(draft.trainable(trainer.raw_model).values())).fill_(float("inf"))
    with pytest.raises(UserError, match="not finite"):
        draft.save_checkpoint(trainer.raw_model, tmp_path / "checkpoint", verifier)
    assert not list(tmp_path.iterdir())


def test_a_start_of_other_settings_is_refused(verifier):
    trainer, _ = make(verifier)
    other, _ = make(verifier, num_layers=2)
    with pytest.raises(UserError, match="other parameters"):
        draft.restore(trainer.raw_model, other.state()["model"])


def test_the_validation_split_depends_on_the_prompt_alone():
    rows = [{"prompt_id": f"{n:032x}"} for n in range(2000)]
    train, validation = split(rows, 0.1)
    _, again = split(list(reversed(rows)), 0.1)
    assert {r["prompt_id"] for r in validation} == {r["prompt_id"] for r in again}
    assert 140 < len(validation) < 260
    assert not {r["prompt_id"] for r in train} & {r["prompt_id"] for r in validation}
    assert {r["prompt_id"] for r in split(rows, 0.2)[1]} > {r["prompt_id"] for r in validation}


def test_every_row_is_in_exactly_one_batch_of_an_epoch(verifier):
    _, batches = make(verifier)
    for epoch in (1, 2):
        assert sorted(i for rows in batches.rows(epoch) for i in rows) == list(range(12))
    assert batches.count(1) == sum(1 for _ in batches.epoch(1))
    skipped = [b["input_ids"] for b in batches.epoch(1, skip=2)]
    whole = [b["input_ids"] for b in batches.epoch(1)]
    assert all(torch.equal(a, b) for a, b in zip(skipped, whole[2:], strict=True))


def test_settings_reach_the_optimizers():
    model = torch.nn.Module()
    model.layer = torch.nn.Linear(4, 4)
    optimizers = training.build_optimizers(model, SETTINGS)
    found = [g["lr"] for o in optimizers for g in o.param_groups]
    assert sorted(found) == [1e-3, 2e-3]
    assert isinstance(optimizers[0], torch.optim.Muon)
    assert optimizers[0].param_groups[0]["momentum"] == SETTINGS["muon_momentum"]
