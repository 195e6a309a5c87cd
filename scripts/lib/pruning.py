"""Depth pruning: a model without some of its decoder layers, and what that costs.

Residual models stay usable when a few middle layers go, without any training.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from scripts.lib.errors import UserError


def decoder_layers(model):
    """Return the `ModuleList` of a transformers model's decoder layers.

    Raises:
        UserError: when the model keeps its layers in another way.
    """
    import torch

    count = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    raise UserError(
        f"{type(model).__name__} has no list of {count} decoder layers. Layers can be dropped "
        "from decoder-only models alone."
    )


def check_indices(indices: list[int], count: int) -> None:
    """Check the layers to drop from a model of `count` layers.

    Raises:
        UserError: when an index is outside the model or twice there, or none is left.
    """
    outside = [i for i in indices if not 0 <= i < count]
    if outside:
        raise UserError(
            f"layers {outside} cannot be dropped: the model has layers 0 to {count - 1}."
        )
    if len(set(indices)) < len(indices):
        raise UserError(f"the layers to drop, {list(indices)}, name a layer twice.")
    if len(indices) == count:
        raise UserError(f"all {count} layers would be dropped. Keep at least one.")


def _text_configs(model) -> list:
    """Return every copy of the decoder's configuration that the model's modules hold."""
    kind = type(model.config.get_text_config())
    held = [model.config.get_text_config(), *(getattr(m, "config", None) for m in model.modules())]
    return list({id(c): c for c in held if isinstance(c, kind)}.values())


def _per_layer(config) -> dict[str, list]:
    """Return the lists of a configuration that have one entry per layer."""
    return {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list) and len(value) == config.num_hidden_layers
        # Lists of ids and names that may have this length by chance.
        and "token" not in name and name != "architectures"
    }  # fmt: skip


def _set_layers(layers, modules: list) -> None:
    """Make `modules` the content of `layers`, and their numbers in the cache the positions."""
    del layers[:]
    layers.extend(modules)
    for position, layer in enumerate(layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = position


@contextmanager
def without_layers(model, indices: list[int]) -> Iterator[None]:
    """Take decoder layers out of a model for the length of a `with` block."""
    layers, configs = decoder_layers(model), _text_configs(model)
    check_indices(indices, len(layers))
    modules, kept = list(layers), [i for i in range(len(layers)) if i not in set(indices)]
    lists = [_per_layer(config) for config in configs]
    try:
        for config, found in zip(configs, lists, strict=True):
            config.num_hidden_layers = len(kept)
            for name, value in found.items():
                setattr(config, name, [value[i] for i in kept])
        _set_layers(layers, [modules[i] for i in kept])
        yield
    finally:
        for config, found in zip(configs, lists, strict=True):
            config.num_hidden_layers = len(modules)
            for name, value in found.items():
                setattr(config, name, value)
        _set_layers(layers, modules)


def drop_layers(model, indices: list[int]):
    """Return a copy of a transformers model without some decoder layers; they share weights.

    Args:
        indices: layers to drop, 0-based.

    Raises:
        UserError: for indices that `check_indices` refuses, and for a model whose
            configuration would no longer describe the layers that are left.
    """
    import copy

    import torch

    memo = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    with without_layers(model, indices):
        pruned = copy.deepcopy(model, memo)
    # Some architectures choose a layer's kind from its position (a dense first layer,
    # say); loading such a model would silently fill the mismatch with random weights.
    with torch.device("meta"):
        expected = type(pruned)(copy.deepcopy(pruned.config)).state_dict()
    found = pruned.state_dict()
    if {k: v.shape for k, v in expected.items()} != {k: v.shape for k, v in found.items()}:
        raise UserError(
            f"{type(model).__name__}: without layers {list(indices)} the configuration does not "
            "fit the weights, for the layers' positions decide their kind. Drop other layers."
        )
    return pruned


def mean_loss(model, rows: list[dict]):
    """Return (mean cross-entropy, most likely tokens) over the supervised tokens.

    Args:
        rows: token rows (`input_ids`, `loss_mask`), run one by one: no padding.
    """
    import torch

    total, choices = 0.0, []
    for row in rows:
        ids = torch.tensor(row["input_ids"], device=model.device)
        # The first token has nothing before it that could predict it.
        targets = torch.tensor(row["loss_mask"], device=model.device)[1:].nonzero()[:, 0] + 1
        if not len(targets):
            continue
        with torch.inference_mode():
            # Logits of the other positions would be a fifth of a small model's work.
            logits = model(ids[None], use_cache=False, logits_to_keep=targets - 1).logits[0]
            total += float(
                torch.nn.functional.cross_entropy(logits.float(), ids[targets], reduction="sum")
            )
        choices.append(logits.argmax(-1))
    if not choices:
        raise UserError("the rows have no supervised token. Take more rows.")
    chosen = torch.cat(choices)
    return total / len(chosen), chosen
