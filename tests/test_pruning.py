"""Depth pruning: which layers stay, what the configuration says, what is refused."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from scripts import choose_layers
from scripts.lib import pruning
from scripts.lib.errors import UserError

SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.tensor([[5, 9, 2, 40, 33, 7, 12, 60]])


def llama(layers=5):
    torch.manual_seed(0)
    # Large weights, so that every layer matters.
    config = LlamaConfig(**SIZES, num_hidden_layers=layers, initializer_range=0.4)
    return LlamaForCausalLM(config).eval()


def gemma():
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        **SIZES, num_hidden_layers=4, layer_types=kinds, sliding_window=3, initializer_range=0.4
    )
    return Gemma3ForCausalLM(config).eval()


def logits(model, **arguments):
    with torch.no_grad():
        return model(IDS, **arguments).logits


def token_rows(count=3, length=12):
    generator = torch.Generator().manual_seed(1)
    return [
        {"input_ids": torch.randint(64, (length,), generator=generator).tolist(),
         "loss_mask": [i >= length // 2 for i in range(length)]}
        for _ in range(count)
    ]  # fmt: skip


def test_what_is_left_is_the_kept_layers(tmp_path):
    model = llama()
    before = logits(model)
    pruned = pruning.drop_layers(model, [3, 1])
    with torch.no_grad():
        states = model.model.embed_tokens(IDS)
        positions = torch.arange(IDS.shape[1])[None]
        rotary = model.model.rotary_emb(states, positions)
        for k in (0, 2, 4):
            states = model.model.layers[k](states, position_embeddings=rotary)
        manual = model.lm_head(model.model.norm(states))
    torch.testing.assert_close(logits(pruned, use_cache=False), manual)
    assert not torch.allclose(manual, before, atol=0.1)
    assert pruned.config.num_hidden_layers == len(pruned.model.layers) == 3
    # The model that was given is as before, and its weights exist once.
    assert model.config.num_hidden_layers == len(model.model.layers) == 5
    torch.testing.assert_close(logits(model), before)
    assert pruned.model.layers[1].mlp.up_proj.weight is model.model.layers[2].mlp.up_proj.weight


@pytest.mark.parametrize("make", [llama, gemma])
def test_saved_and_loaded_is_the_same_model(make, tmp_path):
    pruned = pruning.drop_layers(make(), [0, 2])
    pruned.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(logits(loaded.eval()), logits(pruned))
    # The cache is addressed by a layer's number, so generation needs the new ones.
    options = {"max_new_tokens": 8, "do_sample": False}
    cached = pruned.generate(IDS, use_cache=True, **options)
    assert cached.tolist() == pruned.generate(IDS, use_cache=False, **options).tolist()
    assert cached.tolist() == loaded.generate(IDS, **options).tolist()


def test_layer_types_of_the_kept_layers():
    model = gemma()
    pruned = pruning.drop_layers(model, [1, 2])
    assert pruned.config.layer_types == ["sliding_attention", "full_attention"]
    assert pruned.config.num_hidden_layers == 2
    assert pruned.config.to_dict()["layer_types"] == pruned.config.layer_types
    assert len(model.config.layer_types) == model.config.num_hidden_layers == 4


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([5], r"\[5\] cannot be dropped: the model has layers 0 to 4"),
        ([0, -1], r"\[-1\] cannot be dropped"),
        ([2, 2], "name a layer twice"),
        ([4, 3, 2, 1, 0], "all 5 layers"),
    ],
)
def test_indices_that_are_refused(indices, message):
    model = llama()
    with pytest.raises(UserError, match=message):
        pruning.drop_layers(model, indices)
    assert len(model.model.layers) == model.config.num_hidden_layers == 5


def test_layers_whose_kind_depends_on_their_position():
    config = Qwen3MoeConfig(
        **SIZES, num_hidden_layers=3, mlp_only_layers=[0], num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=8,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    assert pruning.drop_layers(model, [2]).config.num_hidden_layers == 2
    with pytest.raises(UserError, match="positions decide their kind"):
        pruning.drop_layers(model, [0])


def test_loss_of_the_supervised_tokens():
    model, rows = llama(), token_rows()
    loss, choices = pruning.mean_loss(model, rows)
    losses, tops = [], []
    for row in rows:
        ids = torch.tensor(row["input_ids"])
        with torch.no_grad():
            found = model(ids[None]).logits[0]
        for i in range(1, len(ids)):
            if row["loss_mask"][i]:
                losses.append(-found[i - 1].log_softmax(-1)[ids[i]])
                tops.append(int(found[i - 1].argmax()))
    assert loss == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)
    assert choices.tolist() == tops
    with pytest.raises(UserError, match="no supervised token"):
        pruning.mean_loss(model, [{"input_ids": [1, 2], "loss_mask": [True, False]}])


def test_greedy_choice_finds_the_layer_that_does_nothing():
    model, rows = llama(), token_rows()
    idle = model.model.layers[3]
    with torch.no_grad():
        idle.self_attn.o_proj.weight.zero_()
        idle.mlp.down_proj.weight.zero_()
    # The model's own greedy choices as labels: every change then costs something.
    for row in rows:
        output = model.generate(torch.tensor([row["input_ids"][:6]]), max_new_tokens=6,
                                min_new_tokens=6, do_sample=False)  # fmt: skip
        row["input_ids"] = output[0].tolist()
    full, first, second = choose_layers.choose(model, rows, 2)
    assert full[0] == [] and first[0] == [3]
    assert first[1] == pytest.approx(full[1]) and first[2] == 1.0
    assert second[0][0] == 3 and second[1] > first[1]
    expected, _ = pruning.mean_loss(pruning.drop_layers(model, second[0]), rows)
    assert second[1] == pytest.approx(expected)
