"""Configurations: every mistake is named with its place, defaults are filled in."""

import copy
import re

import pytest
import yaml
from helpers import ROOT, edited, study

from scripts.lib.config import check, load_schema
from scripts.lib.errors import UserError

DEMO = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())


DFLASH = {
    "algorithm": "dflash", "layers": [1, 2], "draft_vocab_size": 64, "optimizer": "adamw",
    "lr": 0.001, "total_seq_len": 128, "mask_token_id": 5, "block_size": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes, parts_of_message",
    [
        ({"modells": {}}, ["'modells'", "top level", "models"]),
        ({"benchmark.kk": 3}, ["'kk'", "at benchmark", "temperature"]),
        ({"benchmark.latency.hardwear": "x"}, ["'hardwear'", "benchmark.latency", "hardware"]),
        ({"models.small.packge": "x"}, ["'packge'", "models.small", "package"]),
        ({"strategies.hybrid.start.epochs": 1}, ["'epochs'", "strategies.hybrid.start"]),
        ({"runtime.gpus": 8}, ["'gpus'", "runtime"]),
        ({"algorithms.a.lr": "1e-4"}, ["algorithms.a.lr", "'1e-4'", "1.0e-4"]),
        ({"teachers.small.temperature": "hot"}, ["teachers.small.temperature", "'hot'"]),
        ({"study.epochs": 0}, ["study.epochs"]),
        ({"algorithms.a.lr": 0}, ["algorithms.a.lr"]),
        ({"algorithms.a.optimizer": "sgd"}, ["algorithms.a.optimizer", "adamw"]),
        ({"algorithms.a.layers": []}, ["algorithms.a.layers"]),
        ({"validation.share": 2}, ["validation.share"]),
        ({"study.epochs": None}, ["study", "'epochs'"]),
        ({"pools.p.path": None}, ["pools.p", "'path'"]),
        ({"study": None}, ["top level", "'study'"]),
        ({"vocabulary": None}, ["top level", "'vocabulary'"]),
        ({"vocabulary.pools": {}}, ["vocabulary.pools"]),
        ({"models.bad name": {"source": "local", "path": "x"}}, ["models", "bad name"]),
        ({"study.strategies": ["own", "own"]}, ["study.strategies"]),
        ({"models.small.package": None}, ["models.small", "'package'"]),
        ({"models.small.version": None}, ["models.small", "'version'"]),
        ({"models.small": {"source": "local"}}, ["models.small", "'path'"]),
        ({"models.small": {"source": "hub", "repo": "a/b"}}, ["models.small", "'revision'"]),
        (
            {"models.small": {"source": "hub", "repo": "a/b", "revision": "main"}},
            ["models.small.revision is 'main'", "commit, 40 hex digits"],
        ),
        ({"models.small": {"source": "hub", "repo": "b"}}, ["models.small.repo"]),
        ({"teachers.small.model": "x"}, ["teachers.small.model", "model 'x'", "large, other"]),
        ({"study.verifiers": ["x"]}, ["study.verifiers", "model 'x'"]),
        ({"study.algorithms": ["x"]}, ["study.algorithms", "algorithm 'x'", "a, b"]),
        ({"study.strategies": ["x"]}, ["study.strategies", "strategy 'x'"]),
        ({"study.workloads": ["x"]}, ["study.workloads", "workload 'x'", "w1, w2"]),
        ({"benchmark.latency.workloads": ["x"]}, ["benchmark.latency.workloads", "'x'"]),
        ({"strategies.own.pools": {"x": 5}}, ["strategies.own.pools", "pool 'x'", "p, q"]),
        ({"strategies.own.teacher": "x"}, ["strategies.own.teacher", "teacher 'x'"]),
        ({"strategies.hybrid.start.strategy": "x"}, ["strategies.hybrid.start", "'x'"]),
        ({"vocabulary.pools": {"x": 5}}, ["vocabulary.pools", "pool 'x'"]),
        ({"vocabulary.teacher": "x"}, ["vocabulary.teacher", "teacher 'x'"]),
        (
            {"strategies.cross.start": {"strategy": "hybrid", "epoch": 1}},
            ["cycle", "cross", "hybrid"],
        ),
        ({"strategies.own.start": {"strategy": "own", "epoch": 1}}, ["cycle", "own -> own"]),
        ({"strategies.hybrid.start.epoch": 5}, ["strategies.hybrid.start.epoch is 5", "cross"]),
        ({"study.epochs": 5}, ["5 epochs of own", "strategies.own.schedule_epochs is 4"]),
        ({"benchmark.temperature": 0.7}, ["benchmark.temperature", "cpu"]),
        (
            {"tokens.max_length": 129},
            ["tokens.max_length is 129", "algorithms.a.total_seq_len is 128"],
        ),
        (
            {"benchmark.latency.epochs": [1, 3]},
            ["benchmark.latency.epochs", "[3]", "study.epochs is 2"],
        ),
        ({"strategies.own.teacher": "same_family"}, ["strategies.own.teacher", "small", "family"]),
        (
            {
                "strategies.own.teacher": "same_family",
                "models.small.family": "f",
                "models.large.family": "f",
            },
            ["strategies.own.teacher", "families.f.teacher"],
        ),
        ({"families": {"f": {"teacher": "other"}}}, ["families.f.teacher", "models.other.family"]),
        (
            {"families": {"f": {"teacher": "other"}}, "models.other.family": "g"},
            ["families.f.teacher", "family g"],
        ),
        (
            {"models.small": {"source": "derived", "from": "nix", "drop_layers": [1]}},
            ["models.small.from", "nix"],
        ),
        (
            {
                "models.small": {"source": "derived", "from": "large", "drop_layers": [1]},
                "models.large": {"source": "derived", "from": "small", "drop_layers": [1]},
            },
            ["from forms a cycle", "small -> large -> small"],
        ),
        ({"models.small": {"source": "derived", "from": "large"}}, ["models.small", "drop_layers"]),
        ({"study.runs": [{"strategies": ["nix"]}]}, ["study.strategies", "nix"]),
        (
            {"study.runs": [{}, {"epochs": 2, "benchmark_epochs": [3]}]},
            ["study.runs[1].benchmark_epochs", "[3]"],
        ),
        ({"algorithms.a.block_size": 4}, ["'block_size'", "algorithms.a (eagle3)"]),
        ({"algorithms.a.algorithm": "mtp"}, ["algorithms.a.algorithm", "mtp"]),
        ({"algorithms.a": DFLASH | {"attention": "full"}}, ["sliding_window_non_causal: true"]),
        ({"algorithms.a": DFLASH | {"loss_fn": "kl_div"}}, ["algorithms.a", "dpace needs"]),
        ({"algorithms.a": DFLASH | {"block_size": 3}}, ["benchmark.k is 3", "trains 2 positions"]),
        ({"benchmark.k": 4}, ["benchmark.k is 4", "algorithms.a.ttt_steps trains 3"]),
    ],
    ids=str,
)
def test_mistake_is_a_user_error_that_names_its_place(tmp_path, changes, parts_of_message):
    with pytest.raises(UserError) as error:
        check(edited(study(tmp_path), changes))
    for part in ["configuration", *parts_of_message]:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("config", [None, [], "x", {}])
def test_what_is_no_configuration_at_all_is_a_user_error(config):
    with pytest.raises(UserError, match="configuration"):
        check(config)


def test_yaml_text_1e_4_is_explained():
    """YAML reads 1e-4 as text; that is why the hint exists."""
    text = (ROOT / "config" / "config.yaml").read_text()
    assert "lr: 0.001" in text
    with pytest.raises(UserError, match=r"1\.0e-4"):
        check(yaml.safe_load(text.replace("lr: 0.001", "lr: 1e-4")))
    config = check(yaml.safe_load(text.replace("lr: 0.001", "lr: 1.0e-4")))
    assert config["algorithms"]["eagle3"]["lr"] == 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {"benchmark.temperature": 0.7, "runtime.device": "cuda"},
        {"benchmark.k": 3},
        {"study.epochs": 4},
        {"study.epochs": 5, "study.strategies": ["own"], "strategies.own.schedule_epochs": 5},
        {"strategies.hybrid.start.epoch": 4},
        {"algorithms.b.ttt_steps": 1, "study.algorithms": ["a"]},
        {"benchmark.latency.workloads": []},
    ],
    ids=str,
)
def test_values_at_the_edge_are_accepted(tmp_path, changes):
    check(edited(study(tmp_path), changes))


def defaults(schema):
    """Yield (path, default) of all scalars of a schema whose parents have defaults, too."""
    for name, sub in schema.get("properties", {}).items():
        if "default" in sub:
            if sub["default"] == {} and "properties" in sub:
                yield from (([name, *path], value) for path, value in defaults(sub))
            else:
                yield [name], sub["default"]


def test_defaults_are_filled_in_at_every_depth(tmp_path):
    given = study(tmp_path)
    del given["benchmark"], given["store"]
    del given["vocabulary"]["teacher"]
    given["tokens"] = {}
    for recipe in given["algorithms"].values():
        recipe["total_seq_len"] = 5000
    config, found = check(given), list(defaults(load_schema()))
    assert len(found) > 25 and (["benchmark", "latency", "hardware"], "cpu") in found
    for path, value in found:
        target = config
        for name in path:
            target = target[name]
        assert target == value, path
    assert config["vocabulary"]["teacher"] == "self"
    assert config["teachers"]["small"]["top_p"] == 1
    assert config["strategies"]["own"]["schedule_epochs"] == 4
    assert config["algorithms"]["a"]["scheduler"] == "cosine"
    assert config["models"]["small"]["dtype"] == "bfloat16"


def test_given_values_win_over_defaults_and_the_argument_is_not_changed(tmp_path):
    given = edited(
        study(tmp_path), {"benchmark.k": 2, "runtime.threads": 7, "algorithms.a.lr": 0.5}
    )
    before = copy.deepcopy(given)
    config = check(given)
    assert given == before
    assert (config["benchmark"]["k"], config["runtime"]["threads"]) == (2, 7)
    assert config["algorithms"]["a"]["lr"] == 0.5
    config["benchmark"]["latency"]["concurrencies"].append(99)
    config["runtime"]["threads"] = 1
    assert check(given)["benchmark"]["latency"]["concurrencies"] == [1]
    assert check(given)["runtime"]["threads"] == 7


def test_defaults_are_not_shared_between_two_checks(tmp_path):
    given = edited(study(tmp_path), {"benchmark": {}})
    check(given)["benchmark"]["latency"]["concurrencies"].append(99)
    assert 99 not in check(given)["benchmark"]["latency"]["concurrencies"]


def test_demo_configuration_is_valid_and_its_files_exist():
    config = check(DEMO)
    entries = [*config["pools"].values(), *config["workloads"].values()]
    for entry in entries:
        for path in entry["path"] if isinstance(entry["path"], list) else [entry["path"]]:
            assert (ROOT / path).is_file(), path
    assert len(config["study"]["workloads"]) == 7


def test_the_example_of_the_readme_and_all_studies_are_valid():
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "config/README.md").read_text(), re.DOTALL)
    (example,) = [b for b in blocks if "models:" in b and "study:" in b]
    assert check(yaml.safe_load(example))["study"]["name"] == "mine"
    studies = list((ROOT / "config/studies").glob("*.yaml"))
    assert studies
    for file in studies:
        check(yaml.safe_load(file.read_text()))
