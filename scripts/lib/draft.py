"""Draft models: build, restore and save them through Speculators."""

import copy
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from scripts.lib import store
from scripts.lib.errors import UserError

STATE = "state.pt"
CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Draft:
    """A draft model and how Speculators wants it called.

    Attributes:
        model: the `SpeculatorModel`; verifier weights in it are frozen.
        preprocess: per-sample function of Speculators' collation, or None.
        train_arguments, validation_arguments: keyword arguments of `forward`.
    """

    model: torch.nn.Module
    preprocess: object
    train_arguments: dict
    validation_arguments: dict


def load_vocab(folder: Path) -> dict[str, torch.Tensor]:
    """Return {"d2t": [draft vocab] int64, "t2d": [verifier vocab] bool} of a vocab part."""
    from safetensors.torch import load_file

    store.read_manifest(folder, "vocab")
    return load_file(store.data_file(folder, "vocab.safetensors"))


def build(settings: dict, verifier_dir: str, vocab: dict, device: str, seed: int) -> Draft:
    """Build an untrained draft with every setting given explicitly.

    Args:
        settings: a checked recipe of `algorithms`; Speculators binds its settings by
            name, and an algorithm has no setting that it does not read.

    Raises:
        UserError: when the settings do not fit the verifier.
    """
    import speculators.models  # noqa: F401  (registers the algorithms)
    from speculators import SpeculatorModel
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.cli import create_transformer_layer_config

    torch.manual_seed(seed)
    cpu, every = device == "cpu", list(range(settings["num_layers"]))
    layer_config = create_transformer_layer_config(
        verifier_name_or_path=verifier_dir, num_layers=settings["num_layers"],
        draft_arch=settings["draft_arch"], hidden_act=None,
        sliding_window=settings["sliding_window"],
        full_attention_indices=every if settings["attention"] == "full" else [],
        mrope_full_head_hack=True,
    )  # fmt: skip
    mask = settings.get("mask_token_id", 0)
    if mask >= layer_config.vocab_size:
        raise UserError(
            f"mask_token_id {mask} of the algorithm is beyond the verifier's vocabulary of "
            f"{layer_config.vocab_size}. Name a token of its tokenizer that no text contains."
        )
    algorithm = settings["algorithm"]
    cls = SpeculatorModel.registry[algorithm]
    named = {k: v for k, v in settings.items() if k != "algorithm"}
    whole = settings["draft_vocab_size"] == layer_config.vocab_size
    try:
        model = cls.from_training_args(
            verifier_config=layer_config, verifier_name_or_path=verifier_dir,
            t2d=None if whole else vocab["t2d"], d2t=None if whole else vocab["d2t"],
            target_layer_ids=settings["layers"], fc_norm=False,
            draft_attn_impl="sdpa" if cpu else "simple_flex_attention", **named,
        )  # fmt: skip
    except ValueError as error:
        raise UserError(f"Speculators refuses the {algorithm} settings: {error}") from error
    if algorithm == "peagle" and not settings["embed_requires_grad"]:
        # Speculators' P-EAGLE has no argument for it.
        model.config.embed_requires_grad = False
        model.embed_tokens.weight.requires_grad_(False)
    train, validation = cls.get_trainer_kwargs(
        loss_implementation="eager" if cpu else "fused", **named
    )
    if algorithm == "peagle":
        # Dropping depths at random saves training time; accuracies want them all.
        validation |= {"down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0}
    for name, tensor in model.named_parameters():
        if not torch.isfinite(tensor).all():
            raise UserError(f"{verifier_dir}: weights of {name} are missing or not finite.")
    # EAGLE drafts pair a state with the token after it, block drafts with its own.
    preprocess = shift_batch if algorithm in ("eagle3", "peagle") else None
    return Draft(model.float(), preprocess, train, validation)


def trainable(model) -> dict[str, torch.Tensor]:
    """Return the trainable parameters by name."""
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def restore(model, state: dict) -> None:
    """Load trainable parameters that `trainable` gave.

    Raises:
        UserError: when names or shapes differ (other settings made that state).
    """
    own = trainable(model)
    if {n: tuple(p.shape) for n, p in own.items()} != {n: tuple(t.shape) for n, t in state.items()}:
        raise UserError(
            "the start checkpoint has other parameters than this algorithm's settings give. "
            "Start from a checkpoint of the same algorithm settings."
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(state[name])


def save_checkpoint(model, folder: Path, verifier_dir: str) -> None:
    """Write the bfloat16 checkpoint that vLLM serves; `folder` appears whole or not at all.

    Raises:
        UserError: when weights are not finite.
    """
    bad = [n for n, p in model.named_parameters() if not torch.isfinite(p).all()]
    if bad:
        raise UserError(f"weights are not finite: {', '.join(bad[:3])}. Lower the learning rate.")
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(temporary)
    config = json.loads((temporary / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = verifier_dir
    (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)


def save_state(path: Path, state: dict) -> None:
    """Write training state so that `path` is absent, old, or whole."""
    with store.replacing(path) as temporary:
        torch.save(state, temporary)


def load_state(path: Path) -> dict:
    """Read training state.

    Raises:
        UserError: when the file is damaged.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(
            f"{path} cannot be read ({error}). Remove its folder; the next run makes it again."
        ) from error
