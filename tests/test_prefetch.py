"""Prefetch: what is missing, how large it is, whether it fits."""

from argparse import Namespace
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from helpers import anchor_paths, edited, make_plan, study

from scripts import prefetch
from scripts.lib.errors import UserError

HUB = {"models.small": {"source": "hub", "repo": "org/tiny", "revision": "0" * 40}}


@pytest.fixture
def hub(monkeypatch):
    """A hub whose one model has 3 GB of weights and something else beside them."""
    files = [
        SimpleNamespace(path="model.safetensors", size=3 * 10**9),
        SimpleNamespace(path="config.json", size=10**6), SimpleNamespace(path="onnx"),
        SimpleNamespace(path="training.bin", size=10**12),
    ]  # fmt: skip
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_tree", lambda *a, **k: iter(files))


def test_what_is_missing_is_listed_with_its_size_and_place(tmp_path, hub):
    plan = make_plan(tmp_path, HUB)
    done = plan.prompts("p", 0)
    Path(done.folder).mkdir(parents=True)
    Path(done.manifest).write_text("{}")
    found = {(stage, name): rest for stage, name, *rest in prefetch.rows(plan)}
    assert found["models", "small"] == ["missing", 3 * 10**9 + 10**6, plan.model("small").folder]
    assert found["models", "large"][:2] == ["missing", None]  # a package says no size
    assert found["prompts", "p/shard-00000"][:2] == ["there", 0]
    assert found["prompts", "p/shard-00001"][1] == (tmp_path / "p.jsonl").stat().st_size
    assert {stage for stage, _ in found} == {"models", "prompts", "workloads"}


def run(tmp_path, **changes):
    """Call the program on the small study; nothing is fetched."""
    config = edited(study(tmp_path), HUB | changes)
    anchor_paths(config, tmp_path)
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(config))
    prefetch.main(Namespace(configfile=file, config=[], fetch=False))


def test_the_sum_is_told_beside_the_free_space(tmp_path, hub, capsys):
    run(tmp_path)
    assert "at least 3.00 GB; free: " in capsys.readouterr().out


def test_a_disk_that_is_too_small_is_an_error(tmp_path, hub, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(prefetch.shutil, "disk_usage", lambda path: usage(0, 0, 10**9))
    with pytest.raises(UserError, match=r"1\.0 GB left and 3\.0 GB are missing"):
        run(tmp_path)


def test_a_hub_that_does_not_answer_is_named(tmp_path, monkeypatch):
    def unreachable(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_tree", unreachable)
    with pytest.raises(UserError, match=r"org/tiny at 000000000000 .*no route to host"):
        run(tmp_path)
