"""What users run into, on the real engines: one clear line, nothing half made, no process left."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers import ROOT, anchor_paths

pytestmark = pytest.mark.full


def demo(folder: Path, **changes) -> Path:
    """Write the demo's configuration with absolute paths and `changes`; return its file."""
    config = yaml.safe_load((ROOT / "config/config.yaml").read_text())
    config["store"] = str(folder / "store")
    anchor_paths(config, ROOT)
    config["pools"]["demo"]["shard_size"] = 8
    config["strategies"]["self"]["pools"] = config["vocabulary"]["pools"] = {"demo": 8}
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config | changes, sort_keys=False))
    return file


def snakemake(target: str, folder: Path, file: Path) -> list[str]:
    return [
        sys.executable, "-m", "snakemake", target, "-s", str(ROOT / "Snakefile"), "-d", str(folder),
        "--configfile", str(file), "--cores", "2",
    ]  # fmt: skip


def manifests(folder: Path) -> list[str]:
    return [json.loads(p.read_text())["stage"] for p in folder.rglob("manifest.json")]


def test_a_full_disk_is_named_and_leaves_nothing_that_looks_finished(tmp_path):
    disk = tmp_path / "store"
    disk.mkdir()
    inner = shlex.join(snakemake("models", tmp_path, demo(tmp_path)))
    look = f"find {disk} -name manifest.json -o -name claim.json"
    script = f"mount -t tmpfs -o size=40m tmpfs {disk}; {inner}; echo status=$?; {look}"
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert "error: disk full while writing" in output, output[-3000:]
    _, status, left = done.stdout.partition("status=1\n")
    assert status and not left  # neither a manifest nor a claim


def test_a_model_that_vllm_cannot_load_is_named(tmp_path):
    run = snakemake("models", tmp_path, demo(tmp_path))
    subprocess.run(run, check=True, capture_output=True, timeout=300)
    (model,) = (tmp_path / "store/models").glob("*/*/model")
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = ["NoSuchForCausalLM"]
    config["model_type"] = "gpt_neox_japanese"
    (model / "config.json").write_text(json.dumps(config))
    file = demo(
        tmp_path,
        models={"odd": {"source": "local", "path": str(model)}},
        teachers={"odd": {"model": "odd", "max_tokens": 8, "max_model_len": 512}},
    )
    settings = yaml.safe_load(file.read_text())
    settings["study"]["verifiers"] = ["odd"]
    file.write_text(yaml.safe_dump(settings))
    done = subprocess.run(
        snakemake("responses", tmp_path, file), capture_output=True, text=True, timeout=300
    )
    output = done.stdout + done.stderr
    assert done.returncode == 1
    assert f"error: vLLM cannot load {model}" in output, output[-3000:]
    assert "responses" not in manifests(tmp_path / "store")
    assert not list(tmp_path.rglob("claim.json"))
