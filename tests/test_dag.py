"""What one edit reruns: job sets of dry runs on a store where everything is finished."""

import copy
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers import ROOT, anchor_paths

from scripts.lib.config import check
from scripts.lib.labels import study_labels
from scripts.lib.plan import Plan

CHEAP = {
    "all", "write_plan", "make_tables", "make_answers", "make_economics", "make_report",
    "link_current",
}  # fmt: skip


def dry_run(config: dict, folder: Path, snakefile: Path = ROOT / "Snakefile") -> set[tuple]:
    """Return {(rule, names)} of the jobs that a run in `folder` would start, tables apart."""
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    result = subprocess.run(
        [sys.executable, "-m", "snakemake", "-n", "-s", str(snakefile), "-d", str(folder),
         "--configfile", str(file), "--cores", "2", "all"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    jobs = set()
    for rule, block in re.findall(r"^(?:local)?rule (\w+):\n((?:    .*\n)+)", result.stdout, re.M):
        name = re.search(r"wildcards: name=([^,\n]+)", block)
        if rule not in CHEAP:
            jobs.add((rule, name.group(1) if name else ""))
    return jobs


def finish_everything(config: dict) -> None:
    """Give every part of a configuration a manifest, as if it had been made."""
    plan = Plan(check(config))
    for row in study_labels(plan)["index"]:
        folder = Path(row["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "manifest.json").write_text(json.dumps({"key": row["key"]}))


@pytest.fixture
def base(tmp_path):
    """The demo's configuration with absolute paths, two shards, and a finished store."""
    config = yaml.safe_load((ROOT / "config/config.yaml").read_text())
    config["store"] = str(tmp_path / "store")
    anchor_paths(config, ROOT)
    config["pools"]["demo"]["shard_size"] = 100
    config["strategies"]["self"] |= {"pools": {"demo": 200}, "schedule_epochs": 6}
    config["vocabulary"]["pools"] = {"demo": 200}
    config["study"]["epochs"] = 2
    finish_everything(config)
    return config


@pytest.fixture
def edited(base):
    """A deep copy to edit."""
    return copy.deepcopy(base)


def test_everything_is_planned_on_an_empty_store(base, tmp_path):
    base["store"] = str(tmp_path / "empty")
    rules = [rule for rule, _ in dry_run(base, tmp_path)]
    assert {r: rules.count(r) for r in set(rules)} == {
        "prepare_model": 1, "draw_prompts": 2, "draw_workload": 7, "generate_responses": 2,
        "tokenize_responses": 2, "extract_hidden_states": 2, "build_vocab": 1,
        "train_speculator": 2, "benchmark_checkpoint": 3,
    }  # fmt: skip


def test_a_finished_store_plans_nothing(base, tmp_path):
    assert dry_run(base, tmp_path) == set()


def test_a_fresh_clone_on_the_same_store_plans_nothing(base, tmp_path):
    clone = tmp_path / "clone"
    for part in ("Snakefile", "rules", "scripts", "config", "profiles"):
        source = ROOT / part
        (shutil.copytree if source.is_dir() else shutil.copy)(source, _made(clone) / part)
    assert dry_run(base, clone, clone / "Snakefile") == set()


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def test_reordered_configuration_plans_nothing(edited, tmp_path):
    edited = {k: edited[k] for k in reversed(edited)}
    edited["study"]["workloads"] = list(reversed(edited["study"]["workloads"]))
    edited["workloads"] = dict(reversed(edited["workloads"].items()))
    assert dry_run(edited, tmp_path) == set()


def test_an_epoch_more_plans_one_training_and_one_benchmark(edited, tmp_path):
    # The latency of the last epoch moves on with it; the old one's stays in the store.
    edited["study"]["epochs"] = 3
    assert dry_run(edited, tmp_path) == {
        ("train_speculator", "smollm2-135m/eagle3/self/epoch-3"),
        ("benchmark_checkpoint", "smollm2-135m/eagle3.self.epoch-3"),
    }


def test_a_workload_more_plans_its_benchmarks_only(edited, tmp_path):
    path = str(ROOT / "config/data/workloads/qa.jsonl")
    edited["workloads"]["more"] = {"source": "file", "path": path, "prompts": 5}
    edited["study"]["workloads"].append("more")
    assert dry_run(edited, tmp_path) == {
        ("draw_workload", "more"),
        ("benchmark_checkpoint", "smollm2-135m/baseline"),
        ("benchmark_checkpoint", "smollm2-135m/eagle3.self.epoch-1"),
        ("benchmark_checkpoint", "smollm2-135m/eagle3.self.epoch-2"),
    }


def test_more_prompts_plan_the_new_shard_and_what_learns_from_it(edited, tmp_path):
    edited["strategies"]["self"]["pools"]["demo"] = 300
    jobs = dry_run(edited, tmp_path)
    shards = {(r, n) for r, n in jobs if "shard" in n}
    new = "smollm2-135m/smollm2-135m/demo/shard-00002"
    assert shards == {
        ("draw_prompts", "demo/shard-00002"),
        ("generate_responses", "smollm2-135m/demo/shard-00002"),
        ("tokenize_responses", new), ("extract_hidden_states", new),
    }  # fmt: skip
    # The vocabulary has a source of its own and stays.
    assert {r for r, _ in jobs - shards} == {"train_speculator", "benchmark_checkpoint"}
    assert ("benchmark_checkpoint", "smollm2-135m/baseline") not in jobs


def test_an_algorithm_with_another_layer_plans_that_layer_and_its_own_training(edited, tmp_path):
    edited["algorithms"]["deeper"] = edited["algorithms"]["eagle3"] | {"layers": [2, 15, 20]}
    edited["study"]["algorithms"].append("deeper")
    jobs = dry_run(edited, tmp_path)
    assert {n for r, n in jobs if r == "extract_hidden_states"} == {
        f"smollm2-135m/smollm2-135m/demo/shard-0000{i}" for i in (0, 1)}  # fmt: skip
    others = {(r, n) for r, n in jobs if r != "extract_hidden_states"}
    assert {r for r, _ in others} == {"train_speculator", "benchmark_checkpoint"}
    assert all("deeper" in n for _, n in others)
    missing = {
        n.settings["layer"]
        for n in Plan(check(edited)).nodes("hidden_states")
        if not Path(n.manifest).exists()
    }
    assert missing == {20}


def test_another_learning_rate_plans_training_downward(edited, tmp_path):
    edited["algorithms"]["eagle3"]["lr"] = 0.005
    jobs = dry_run(edited, tmp_path)
    assert {r for r, _ in jobs} == {"train_speculator", "benchmark_checkpoint"}
    assert ("benchmark_checkpoint", "smollm2-135m/baseline") not in jobs


def test_another_temperature_of_a_teacher_keeps_prompts_and_models(edited, tmp_path):
    edited["teachers"]["smollm2-135m"]["temperature"] = 0.9
    rules = {r for r, _ in dry_run(edited, tmp_path)}
    assert not rules & {"prepare_model", "draw_prompts", "draw_workload"}
    assert {"generate_responses", "train_speculator"} <= rules


def test_other_hardware_measures_latency_only(edited, tmp_path):
    edited["benchmark"]["latency"]["hardware"] = "other"
    assert dry_run(edited, tmp_path) == {
        ("benchmark_checkpoint", "smollm2-135m/baseline"),
        ("benchmark_checkpoint", "smollm2-135m/eagle3.self.epoch-2"),
    }
    missing = [n for n in Plan(check(edited)).targets() if not Path(n.manifest).exists()]
    assert {n.settings["kind"] for n in missing} == {"latency"}


def test_runtime_settings_and_table_settings_plan_no_compute(edited, tmp_path):
    edited["runtime"] = {"threads": 1, "max_num_seqs": 7, "kv_cache_gib": 1}
    edited["benchmark"] |= {"bootstrap_samples": 100, "min_prompts": 3}
    assert dry_run(edited, tmp_path) == set()


def test_a_second_strategy_on_the_same_data_shares_it(edited, tmp_path):
    edited["strategies"]["short"] = edited["strategies"]["self"] | {"schedule_epochs": 2}
    edited["study"]["strategies"].append("short")
    jobs = dry_run(edited, tmp_path)
    assert {r for r, _ in jobs} == {"train_speculator", "benchmark_checkpoint"}
    assert all("short" in n for _, n in jobs)


@pytest.mark.parametrize("accepted", [True, False])
def test_one_generation_per_teacher_serves_both_verifiers_of_the_cpu_study(tmp_path, accepted):
    config = yaml.safe_load((ROOT / "config/studies/cpu.yaml").read_text())
    config |= {"store": str(tmp_path / "store"), "accept_gemma_terms": accepted}
    anchor_paths(config, ROOT)
    template = config["models"]["gemma3-270m"]["chat_template"]
    config["models"]["gemma3-270m"]["chat_template"] = str(ROOT / template)
    rules = [rule for rule, _ in dry_run(config, tmp_path)]
    # Own data of two verifiers (the larger one's is the family's) and what Gemma adds.
    teachers, readings = (3, 5) if accepted else (2, 3)
    assert {r: rules.count(r) for r in set(rules)} == {
        "prepare_model": teachers, "draw_prompts": 1, "draw_workload": 7, "build_vocab": 2,
        "generate_responses": teachers, "tokenize_responses": readings,
        "extract_hidden_states": readings,
        # eagle3: self 4 epochs each, same_family 2 for the smaller; dflash and peagle 2 each
        # per verifier; with Gemma cross_family and two hybrids 2 each per verifier, mixture 2.
        "train_speculator": 32 if accepted else 18,
        # both bare; self 4 and dflash and peagle per verifier, same_family; 3 each and mixture
        "benchmark_checkpoint": 22 if accepted else 15,
    }  # fmt: skip


@pytest.fixture
def crossed(base):
    """The demo's strategy and one with a teacher of another family, both finished."""
    base["models"]["other"] = {"source": "package", "package": "other", "version": "1.0"}
    base["teachers"]["other"] = base["teachers"]["smollm2-135m"] | {"model": "other"}
    base["strategies"]["cross"] = base["strategies"]["self"] | {"teacher": "other"}
    base["study"]["strategies"] = ["self", "cross"]
    finish_everything(base)
    return copy.deepcopy(base)


def test_hybrids_of_several_sizes_need_no_further_responses(crossed, tmp_path):
    for samples in (50, 150):
        crossed["strategies"][f"hybrid-{samples}"] = {
            "teacher": "self", "pools": {"demo": samples}, "schedule_epochs": 2,
            "start": {"strategy": "cross", "epoch": 2},
        }  # fmt: skip
        crossed["study"]["strategies"].append(f"hybrid-{samples}")
    jobs = dry_run(crossed, tmp_path)
    assert {r for r, _ in jobs} == {"train_speculator", "benchmark_checkpoint"}
    assert len(jobs) == 8 and all("hybrid" in n for _, n in jobs)


def test_a_mixture_of_teachers_that_have_answered_plans_its_training_alone(crossed, tmp_path):
    shares = [{"teacher": "self", "share": 0.3}, {"teacher": "other", "share": 0.7}]
    crossed["strategies"]["mixed"] = {"mixture": shares, "pools": {"demo": 200}}
    crossed["study"]["strategies"].append("mixed")
    jobs = dry_run(crossed, tmp_path)
    assert {r for r, _ in jobs} == {"train_speculator", "benchmark_checkpoint"}
    assert len(jobs) == 4 and all("mixed" in n for _, n in jobs)


def test_a_model_whose_terms_are_not_accepted_is_not_planned(crossed, tmp_path):
    crossed["models"]["other"]["terms"] = "gemma"
    crossed["store"] = str(tmp_path / "empty")
    jobs = dry_run(crossed, tmp_path)
    assert ("train_speculator", "smollm2-135m/eagle3/self/epoch-2") in jobs
    assert not [n for _, n in jobs if "other" in n or "cross" in n]


@pytest.fixture
def family(base):
    """A second model of the demo's family, and a strategy that its largest model teaches."""
    base["families"] = {"smollm2": {"teacher": "smollm2-135m"}}
    base["vocabulary"]["teacher"] = "same_family"
    base["strategies"]["same_family"] = base["strategies"]["self"] | {"teacher": "same_family"}
    base["study"]["strategies"] = ["same_family"]
    finish_everything(base)
    config = copy.deepcopy(base)
    config["models"]["sibling"] = {
        "source": "derived", "from": "smollm2-135m", "drop_layers": [4], "family": "smollm2",
    }  # fmt: skip
    config["teachers"]["sibling"] = config["teachers"]["smollm2-135m"] | {"model": "sibling"}
    return config


def test_a_verifier_more_of_a_known_family_reuses_its_teachers_responses(family, tmp_path):
    family["study"]["verifiers"].append("sibling")
    family["validation"]["own_samples"] = 100
    jobs = dry_run(family, tmp_path)
    assert ("prepare_model", "sibling") in jobs
    assert {n for r, n in jobs if r == "generate_responses"} == {"sibling/demo/shard-00000"}
    tokens = {n for r, n in jobs if r == "tokenize_responses"}
    assert {f"sibling/smollm2-135m/demo/shard-0000{i}" for i in (0, 1)} <= tokens
    assert all("sibling" in n for _, n in jobs)
    assert not {r for r, _ in jobs} & {"draw_prompts", "draw_workload"}


def test_a_study_of_another_verifier_shares_the_teachers_responses(family, tmp_path):
    family["study"] |= {"name": "another", "verifiers": ["sibling"]}
    family["workloads"] = {"qa": family["workloads"]["qa"]}
    family["study"]["workloads"] = ["qa"]
    family["benchmark"]["latency"]["workloads"] = []
    family["validation"]["own_samples"] = 100
    jobs = dry_run(family, tmp_path)
    assert {n for r, n in jobs if r == "generate_responses"} == {"sibling/demo/shard-00000"}
    assert not {r for r, _ in jobs} & {"draw_prompts", "draw_workload"}
    assert ("train_speculator", "sibling/eagle3/same_family/epoch-2") in jobs


def test_dropping_other_layers_makes_the_derived_verifier_anew_alone(family, tmp_path):
    family["study"]["verifiers"].append("sibling")
    finish_everything(family)
    assert dry_run(family, tmp_path) == set()
    family["models"]["sibling"]["drop_layers"] = [5]
    jobs = dry_run(family, tmp_path)
    assert jobs and all("sibling" in n for _, n in jobs)


def test_runs_of_a_study_plan_only_their_benchmarks(edited, tmp_path):
    edited["study"]["runs"] = [{"epochs": 4, "benchmark_epochs": "last"}]
    name = "smollm2-135m/eagle3"
    assert dry_run(edited, tmp_path) == {
        ("train_speculator", f"{name}/self/epoch-3"), ("train_speculator", f"{name}/self/epoch-4"),
        ("benchmark_checkpoint", f"{name}.self.epoch-4"),
    }  # fmt: skip


def test_a_missing_part_is_made_alone(base, tmp_path):
    node = Plan(check(base)).responses("smollm2-135m", "demo", 1)
    shutil.rmtree(node.folder)
    # Everything made from it is there: nothing needs it, nothing is planned.
    assert dry_run(base, tmp_path) == set()


def test_a_wrong_configuration_ends_in_one_line(edited, tmp_path):
    edited["teachers"]["smollm2-135m"]["temprature"] = 1
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(edited))
    result = subprocess.run(
        [sys.executable, "-m", "snakemake", "-n", "-s", str(ROOT / "Snakefile"),
         "-d", str(tmp_path), "--configfile", str(file), "--cores", "2"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode != 0
    output = result.stdout + result.stderr
    assert "unknown key 'temprature' at teachers.smollm2-135m" in output
    assert "Traceback" not in output


def test_no_rule_uses_what_breaks_identity():
    text = "\n".join(p.read_text() for p in [ROOT / "Snakefile", *(ROOT / "rules").glob("*.smk")])
    for word in ("script:", "cache:", "ancient(", "group:", "service(", "temp(", "\ncheckpoint "):
        assert word not in text, word
