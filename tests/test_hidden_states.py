"""Hidden states: shard files, resumption, damage, layer ids, the check with transformers."""

import fcntl
import json

import numpy as np
import pytest
import torch
from helpers import new_part
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from scripts import hidden_states as stage
from scripts.lib import shards, store
from scripts.lib.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")
HIDDEN, LENGTHS = 8, [3, 1, 5, 2]
IDS = [f"{i:032x}" for i in (5, 1, 2**120, 7)]


def random_states(lengths=LENGTHS, hidden=HIDDEN, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, hidden, generator=generator).bfloat16() for n in lengths]


def writer(path, metadata=None, ids=IDS, lengths=LENGTHS):
    return shards.ShardWriter(path, ids, lengths, HIDDEN, metadata or {"key": "k", "contract": "1"})


def state_part(root, states, layer=1, ids=IDS):
    """Finish a hidden_states part; return its folder."""
    part = new_part(root, "hidden_states", {"layer": layer, "dtype": "bfloat16"})
    with part:
        lengths = [len(s) for s in states]
        out = shards.ShardWriter(
            part.folder / shards.FILE, ids, lengths, states[0].shape[1], part.metadata()
        )
        for row, values in enumerate(states):
            out.write(row, values)
        out.close()
        part.finish([shards.FILE])
    return part.folder


# -- writing -------------------------------------------------------------------------


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [2, 2, 0, 3, 1]])
def test_rows_written_in_any_order_give_the_file_that_safetensors_writes(tmp_path, order):
    states = random_states()
    out = writer(tmp_path / "s.safetensors", {"key": "k", "note": "é"})
    for row in order:
        out.write(row, states[row])
    out.close()
    found = load_file(tmp_path / "s.safetensors")
    assert found["states"].dtype == torch.bfloat16
    assert torch.equal(found["states"], torch.cat(states))
    assert found["offsets"].tolist() == [0, 3, 4, 9, 11]
    assert [bytes(row.tolist()).hex() for row in found["prompt_ids"]] == IDS
    with safe_open(tmp_path / "s.safetensors", "pt") as file:
        assert file.metadata() == {"key": "k", "note": "é"}
    assert [p.name for p in tmp_path.iterdir()] == ["s.safetensors"]


def test_float32_states_are_rounded_to_bfloat16(tmp_path):
    values = torch.randn(3, HIDDEN)
    out = writer(tmp_path / "s", ids=IDS[:1], lengths=[3])
    out.write(0, values)
    out.close()
    assert torch.equal(load_file(tmp_path / "s")["states"], values.bfloat16())


def test_file_has_no_final_name_before_it_is_whole(tmp_path):
    path, states = tmp_path / "s", random_states()
    out = writer(path)
    for row in (0, 1, 3):
        out.write(row, states[row])
    with pytest.raises(UserError, match="1 rows have no states"):
        out.close()
    assert not path.exists()
    out.write(2, states[2])
    out.close()
    assert path.exists()


def test_interrupted_file_is_continued(tmp_path):
    path, states = tmp_path / "s", random_states()
    out = writer(path)
    for row in (1, 3):
        out.write(row, states[row])
    out.suspend()
    again = writer(path)
    assert again.done.tolist() == [0, 1, 0, 1]
    for row in (0, 2):
        again.write(row, states[row])
    again.close()
    assert torch.equal(load_file(path)["states"], torch.cat(states))


@pytest.mark.parametrize("change", ["key", "rows", "lengths", "cut", "marks"])
def test_remains_of_another_or_damaged_attempt_are_not_continued(tmp_path, change):
    path, states = tmp_path / "s", random_states()
    out = writer(path)
    out.write(0, states[0])
    out.suspend()
    arguments = {
        "key": {"metadata": {"key": "other"}}, "rows": {"ids": IDS[::-1]},
        "lengths": {"lengths": [3, 2, 4, 2]},
    }.get(change, {})  # fmt: skip
    if change == "cut":
        out.part.write_bytes(out.part.read_bytes()[:-1])
    if change == "marks":
        out.marks.unlink()
    again = writer(path, **arguments)
    assert again.done.tolist() == [0, 0, 0, 0]
    again.suspend()


@pytest.mark.parametrize(
    "shape", [(4, HIDDEN), (2, HIDDEN), (3, HIDDEN + 1), (HIDDEN, 3), (0, HIDDEN)]
)
def test_wrong_shape_is_refused_and_the_row_stays_open(tmp_path, shape):
    out = writer(tmp_path / "s")
    with pytest.raises(UserError, match=r"row 0 .*expected \(3, 8\)"):
        out.write(0, torch.zeros(shape))
    assert out.done.sum() == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_states_that_are_not_finite_are_refused(tmp_path, value):
    out, states = writer(tmp_path / "s"), random_states()[0]
    states[1, 2] = value
    with pytest.raises(ValueError, match=r"row 0 .*not finite"):
        out.write(0, states)
    assert out.done.sum() == 0


# -- reading -------------------------------------------------------------------------


def test_layer_shard_returns_the_rows_that_were_written(tmp_path):
    states = random_states()
    shard = shards.LayerShard(state_part(tmp_path, states), IDS)
    for row, values in enumerate(states):
        assert torch.equal(shard.row(row), values)


def test_cut_file_is_refused(tmp_path):
    folder = state_part(tmp_path, random_states())
    path = folder / shards.FILE
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"states\.safetensors has .* bytes"):
        shards.LayerShard(folder, IDS)


@pytest.mark.parametrize("ids", [IDS[::-1], IDS[:3], [*IDS, "0" * 32]])
def test_file_of_other_rows_is_refused(tmp_path, ids):
    folder = state_part(tmp_path, random_states())
    with pytest.raises(UserError, match="other rows"):
        shards.LayerShard(folder, ids)


def test_file_of_another_key_is_refused(tmp_path):
    one = state_part(tmp_path, random_states(), layer=1)
    two = state_part(tmp_path, random_states(seed=1), layer=2)
    (one / shards.FILE).write_bytes((two / shards.FILE).read_bytes())
    with pytest.raises(UserError, match=f"expected key {one.name}, found {two.name}"):
        shards.LayerShard(one, IDS)


def test_part_of_another_stage_is_refused(tmp_path):
    folder = state_part(tmp_path, random_states())
    manifest = json.loads((folder / store.MANIFEST).read_text())
    store.write_json(folder / store.MANIFEST, manifest | {"stage": "tokens"})
    with pytest.raises(UserError, match="stage"):
        shards.LayerShard(folder, IDS)


# -- layers and the check with transformers --------------------------------------------


@pytest.mark.parametrize("layer, expected", [(0, 0), (1, 1), (30, 30), (-1, 30)])
def test_layer_ids_count_the_decoder_layers_passed(layer, expected):
    assert stage.resolve_layer(layer, 30) == expected


@pytest.mark.parametrize("layer", [31, 99, -2])
def test_layer_that_the_model_does_not_have_is_refused(layer):
    with pytest.raises(UserError, match=rf"layer {layer} .*30 layers"):
        stage.resolve_layer(layer, 30)


def test_relative_error_is_the_ratio_of_norms_without_the_first_position():
    expected, found = random_states([9], seed=1)[0], random_states([9], seed=2)[0]
    one, two = (t[1:].float().numpy().astype(np.float64) for t in (found, expected))
    ratio = np.sqrt(((one - two) ** 2).sum()) / np.sqrt((two**2).sum())
    assert stage.relative_error(found, expected) == pytest.approx(ratio, rel=1e-5)
    # The sink of the first position neither hides an error nor makes one.
    sink = expected.clone()
    sink[0] += 1e6
    assert stage.relative_error(sink, expected) == 0
    assert stage.relative_error(found, sink) == pytest.approx(ratio, rel=1e-5)


def test_tolerance_separates_rounding_from_a_wrong_layer():
    expected = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(50, 64, generator=torch.Generator().manual_seed(1))
    assert stage.relative_error(expected.bfloat16(), expected) < stage.TOLERANCE
    assert stage.relative_error(expected + 0.02 * noise, expected) < stage.TOLERANCE
    assert stage.relative_error(expected + 0.2 * noise, expected) > stage.TOLERANCE
    assert stage.relative_error(expected.roll(1, 0), expected) > stage.TOLERANCE


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A tiny model whose layers differ much from each other."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=50, max_position_embeddings=64, initializer_range=0.5,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return str(folder)


def test_reference_states_are_the_residual_stream_after_k_layers(model_dir):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    sequences = [[1, 2, 3, 4], [9, 8, 7]]
    found = list(stage.reference_states(model_dir, [0, 1, 2, 3], sequences))
    for ids, states in zip(sequences, found, strict=True):
        with torch.no_grad():
            output = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
            last = model.model.norm(states[3])
        for layer in (0, 1, 2):
            assert torch.equal(states[layer], output[layer][0]), layer
        # Transformers shows the last one after the final norm; ours is before it.
        assert torch.equal(last, output[3][0]) and not torch.equal(states[3], output[3][0])


@pytest.mark.parametrize("swapped", [False, True])
def test_states_of_a_wrong_layer_do_not_pass_the_check(tmp_path, model_dir, swapped):
    rows = [{"prompt_id": i, "input_ids": [n + 1, 4, 7, 2]} for n, i in enumerate(IDS)]
    layers = [1, 3]
    found = list(stage.reference_states(model_dir, layers, [r["input_ids"] for r in rows]))
    folders = {}
    for layer in layers:
        source = layers[1 - layers.index(layer)] if swapped else layer
        folders[layer] = state_part(tmp_path, [f[source] for f in found], layer)
    if swapped:
        with pytest.raises(UserError, match="layer 1 differ from transformers"):
            stage.verify(rows, folders, model_dir, 2)
    else:
        assert stage.verify(rows, folders, model_dir, 2) == {1: 0.0, 3: 0.0}


def test_file_that_the_engine_still_writes_is_left_alone(tmp_path):
    path, lock = tmp_path / "x.safetensors", tmp_path / "x.safetensors.lock"
    assert stage.read_if_written(path) is None
    save_file({"token_ids": torch.tensor([1, 2])}, path)
    with open(lock, "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert stage.read_if_written(path) is None and path.exists()
    assert stage.read_if_written(path)["token_ids"].tolist() == [1, 2]
    assert list(tmp_path.iterdir()) == []
