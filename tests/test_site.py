"""Site settings and profiles: what a job asks for, and that nothing in a profile is ignored."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers import ROOT, anchor_paths, edited, make_plan, study
from snakemake.cli import get_argument_parser
from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

from scripts.lib.config import check
from scripts.lib.errors import UserError
from scripts.lib.site import job_resources, read_site, shell_prefix

SITE = {
    "account": "lab7", "cpu_partition": "short", "default_node_type": "new",
    "node_types": {
        "old": {"partition": "a", "gpu": "a100", "gpus": 4},
        "new": {"partition": "h", "gpu": "h100", "constraint": "nvlink"},
        "any": {},
    },
}  # fmt: skip
PROFILES = sorted((ROOT / "profiles").glob("*/config.yaml"))


@pytest.fixture
def site_file(tmp_path):
    path = tmp_path / "site.yaml"
    path.write_text(yaml.safe_dump(SITE))
    return path


def test_a_gpu_step_asks_for_its_gpus_on_the_chosen_kind_of_node(site_file):
    assert job_resources(read_site(site_file), 8) == {
        "nodes": 1, "gres": "gpu:h100:8", "cpus_per_task": 96, "tasks_per_gpu": 0,
        "slurm_partition": "h", "constraint": "nvlink", "slurm_account": "lab7",
    }  # fmt: skip
    assert job_resources(read_site(site_file, "old"), 2)["gres"] == "gpu:a100:2"
    assert job_resources(read_site(site_file, "any"), 2)["gres"] == "gpu:2"
    assert job_resources(read_site(site_file)) == {
        "nodes": 1, "slurm_partition": "short", "slurm_account": "lab7"}  # fmt: skip


def test_more_gpus_than_a_node_has_are_an_error(site_file):
    with pytest.raises(UserError, match="needs 8 GPUs on a node, but nodes have 4"):
        job_resources(read_site(site_file, "old"), 8)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"acount": "x"}, "unknown key 'acount'"),
        ({"node_types.new.gpus": "8"}, "node_types.new.gpus"),
        ({"node_types.new.gpu": "h100:8"}, "node_types.new.gpu"),
        ({"default_node_type": "b200"}, "no node type 'b200'.*any, new, old"),
        ({"node_types": None}, "node_types"),
    ],
)
def test_a_mistake_in_the_site_file_is_named(tmp_path, changes, told):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(edited(SITE, changes)))
    with pytest.raises(UserError, match=told) as error:
        read_site(path)
    assert "mine.yaml" in str(error.value)


def test_a_missing_or_unreadable_site_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.yaml"):
        read_site(tmp_path / "nowhere.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(UserError, match=r"bad\.yaml"):
        read_site(tmp_path / "bad.yaml")


def test_the_projects_site_file_is_valid_for_all_its_node_types():
    for name in ("", "a100", "h100"):
        assert read_site(ROOT / "config/site.yaml", name)["node"]["gpus"] == 8


def test_caches_are_made_and_exported_where_the_job_runs(tmp_path, site_file):
    assert shell_prefix(read_site(site_file)) == ""
    site = read_site(site_file) | {"caches": {"compile": "$WHERE/fast dir/", "hub": "$WHERE/hub"}}
    names = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HF_HOME")
    shown = " ".join(f'"${name}"' for name in names)
    done = subprocess.run(
        ["bash", "-euc", f"{shell_prefix(site)} ls -d {shown}"], check=True, text=True,
        capture_output=True, env=os.environ | {"WHERE": str(tmp_path)},
    )  # fmt: skip
    folders = {str(tmp_path / "fast dir" / n) for n in ("vllm", "triton", "inductor")}
    assert set(done.stdout.splitlines()) == folders | {str(tmp_path / "hub")}


# -- profiles ----------------------------------------------------------------------


@pytest.mark.parametrize("path", PROFILES, ids=lambda p: p.parent.name)
def test_every_key_of_a_profile_is_known(path):
    """Snakemake ignores what it does not know."""
    parser = get_argument_parser()
    ExecutorPluginRegistry().get_plugin("slurm")
    known = {s[2:] for a in parser._actions for s in a.option_strings if s.startswith("--")}
    settings = yaml.safe_load(path.read_text())
    assert set(settings) <= known
    assert set(settings.get("default-resources", {})) <= {"node_type"}
    assert not set(settings) & {"set-resources", "set-threads", "config", "configfile"}


def test_profile_slurm_is_found_as_written():
    assert (ROOT / "slurm").resolve() == (ROOT / "profiles/slurm").resolve()


def jobs_of(profile: str, config: dict, folder: Path) -> str:
    """Return the dry run of a configuration under a profile of the project."""
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    result = subprocess.run(
        [sys.executable, "-m", "snakemake", "-n", "all", "-d", str(folder), "--profile", profile,
         "--configfile", str(file)], cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("profile, gpu", [("slurm", "h100"), ("profiles/slurm-a100", "a100")])
def test_every_engine_job_asks_for_its_models_gpus(tmp_path, profile, gpu):
    config = study(tmp_path)
    anchor_paths(config, tmp_path)
    config["runtime"] = {"device": "cuda", "tensor_parallel": {"large": 4}}
    asked: dict[str, set] = {}
    for rule, block in re.findall(
        r"^(?:local)?rule (\w+):\n((?:    .*\n)+)", jobs_of(profile, config, tmp_path), re.M
    ):
        name = re.search(r"wildcards: name=([^/,\n]+)", block)
        gres = re.search(r"gres=([^,\n]+)", block)
        if name:
            asked.setdefault(rule, set()).add((name.group(1), gres and gres.group(1)))
    large, one = f"gpu:{gpu}:4", f"gpu:{gpu}:1"
    assert asked["generate_responses"] == {("small", one), ("large", large), ("other", one)}
    for rule in ("extract_hidden_states", "benchmark_checkpoint"):
        assert asked[rule] == {("small", one), ("large", large)}
    for rule in ("draw_prompts", "tokenize_responses", "build_vocab", "prepare_model"):
        assert {g for _, g in asked[rule]} == {None}


def test_tensor_parallel_is_in_the_key_of_latency_alone(tmp_path):
    before, after = (
        make_plan(tmp_path, {"runtime.tensor_parallel": sizes}) for sizes in ({}, {"large": 2})
    )
    changed = [
        n for n, m in zip(before.all_nodes(), after.all_nodes(), strict=True) if n.key != m.key
    ]
    assert changed and {n.settings.get("kind") for n in changed} == {"latency"}
    assert all(n.names[0] == "large" for n in changed)


def test_scripts_get_the_size_of_their_model_and_not_the_map(tmp_path):
    plan = make_plan(tmp_path, {"runtime.tensor_parallel": {"large": 4}})
    sizes = [plan.runtime(plan.model(m))["tensor_parallel_size"] for m in ("small", "large")]
    assert sizes == [1, 4]
    assert "tensor_parallel" not in plan.runtime(plan.model("large"))


def test_tensor_parallel_of_an_unknown_model_is_an_error(tmp_path):
    with pytest.raises(UserError, match="unknown model 'x'"):
        check(edited(study(tmp_path), {"runtime.tensor_parallel": {"x": 2}}))
