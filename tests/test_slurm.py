"""The workflow on a real Slurm (`slurm/cluster.py`): second-long jobs in place of the scripts.

What Snakemake, its executor, the profiles and the rules ask of Slurm is real, and so are
the nodes' GPUs as far as Slurm is concerned.
"""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import cluster
import pytest
import yaml
from helpers import ROOT, anchor_paths

from scripts.lib import store
from scripts.lib.config import check
from scripts.lib.plan import Plan

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("no_jobs_left")]
LIMIT = 240  # seconds for one call of Snakemake


class Study:
    """A study in a folder of its own, whose scripts are payloads.

    Args:
        folder: for configuration, store and events.
        shards: shards of the pool.
        gpus: GPUs that one engine takes.
    """

    def __init__(self, folder: Path, shards: int = 1, gpus: int = 2):
        self.folder = folder
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/slurm/payload.py "$@"\n')
        python.chmod(0o755)
        site = yaml.safe_load((ROOT / "config/site.yaml").read_text())
        site["cpu_partition"] = "cpu"
        for name, node in site["node_types"].items():
            node["partition"] = name
        (folder / "site.yaml").write_text(yaml.safe_dump(site))
        config = yaml.safe_load((ROOT / "config/config.yaml").read_text())
        config |= {"store": str(folder / "store"), "python": str(python)}
        config |= {"site": str(folder / "site.yaml")}
        anchor_paths(config, ROOT)
        config["pools"]["demo"]["shard_size"] = -(-560 // shards)
        config["study"] |= {"epochs": 1, "workloads": ["qa"]}
        config["benchmark"]["latency"] = {}
        config["runtime"] = {
            "device": "cuda", "tensor_parallel": {"smollm2-135m": gpus}, "training_processes": 4,
        }  # fmt: skip
        self.file = folder / "config.yaml"
        self.file.write_text(yaml.safe_dump(config, sort_keys=False))
        self.plan = Plan(check(config))
        self.tell({})

    def tell(self, todo: dict) -> None:
        """Say what payloads do (`payload.py`)."""
        (self.folder / "do.json").write_text(json.dumps(todo))

    def finish(self, stage: str) -> None:
        """Give all parts of a stage their manifests."""
        for node in self.plan.nodes(stage):
            Path(node.folder).mkdir(parents=True, exist_ok=True)
            Path(node.manifest).write_text(json.dumps({"key": node.key}))

    def start(self, target: str, profile: str = "profiles/slurm-h100") -> subprocess.Popen:
        """Start Snakemake."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
        return subprocess.Popen(
            [sys.executable, "-m", "snakemake", target, "-d", str(self.folder), "--profile",
             profile, "--configfile", str(self.file), "--retries", "0", "--latency-wait", "10",
             "--slurm-init-seconds-before-status-checks", "1"],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment | {"PAYLOAD": str(self.folder)}, start_new_session=True,
        )  # fmt: skip

    @staticmethod
    def end(process: subprocess.Popen) -> tuple[int, str]:
        """Return status and output once Snakemake has ended by itself."""
        try:
            output, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            pytest.fail(f"Snakemake does not end:\n{output[-3000:]}")
        return process.returncode, output

    def run(self, target: str, profile: str = "profiles/slurm-h100") -> str:
        """Run to success; return the output."""
        status, output = self.end(self.start(target, profile))
        assert status == 0, output[-4000:]
        return output

    def events(self, event: str = "start") -> list[dict]:
        """Return what the payloads noted, in order of time."""
        file = self.folder / "events.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [e for e in map(json.loads, lines) if e["event"] == event]

    def wait_for_starts(self, count: int) -> list[dict]:
        """Return the events once that many payloads have begun."""
        cluster.wait_until(lambda: len(self.events()) >= count, 90, f"{count} jobs at work")
        return self.events()

    def done(self, stage: str) -> int:
        """Return how many parts of a stage are finished."""
        return sum(Path(n.manifest).exists() for n in self.plan.nodes(stage))


def generation(folder: Path, shards: int, gpus: int) -> Study:
    """Return a study of which everything before the responses is finished."""
    study = Study(folder, shards, gpus)
    study.finish("models")
    study.finish("prompts")
    return study


def test_a_study_runs_as_the_readme_says_and_a_second_run_submits_nothing(tmp_path):
    study = Study(tmp_path)
    study.run("benchmarks", "slurm")
    starts = study.events()
    asked = {e["stage"]: (len(e["gpus"]), e["partition"]) for e in starts}
    assert asked == {
        "models": (0, "cpu"), "prompts": (0, "cpu"), "tokens": (0, "cpu"), "vocab": (0, "cpu"),
        "responses": (2, "h100"), "hidden_states": (2, "h100"), "benchmarks": (2, "h100"),
        "speculators": (4, "h100"),
    }  # fmt: skip
    assert all(e["node"].startswith("h100") for e in starts if e["gpus"])
    assert len({e["job"] for e in starts}) == 10  # one engine, one job
    assert "Nothing to be done" in study.run("benchmarks", "slurm")
    assert study.events() == starts


def test_jobs_that_need_a_whole_node_never_share_one(tmp_path):
    study = generation(tmp_path, 4, 8)
    study.tell({"responses": {"seconds": 3}})
    study.run("responses", "profiles/slurm-a100")
    spans = {}
    for event in study.events() + study.events("end"):
        spans.setdefault((event["node"], event["job"]), []).append(event["time"])
        assert len(event["gpus"]) == 8 and event["partition"] == "a100"
    assert len(spans) == 4 and {node for node, _ in spans} == {"a100n1", "a100n2"}
    for node in ("a100n1", "a100n2"):
        times = sorted(times for (where, _), times in spans.items() if where == node)
        assert all(a[1] <= b[0] for a, b in pairwise(times))


def test_a_failed_shard_costs_that_shard_alone(tmp_path):
    study = generation(tmp_path, 3, 2)
    study.tell({"responses": {"exit": 3, "only": "shard-00001"}})
    status, output = study.end(study.start("responses"))
    assert status != 0 and study.done("responses") == 2
    assert "generate_responses" in output and "shard-00001" in output
    study.tell({})
    before = len(study.events())
    study.run("responses")
    assert [e["part"] for e in study.events()[before:]] == ["shard-00001"]


def test_a_job_cancelled_from_outside_ends_the_run_with_a_message(tmp_path):
    study = generation(tmp_path, 2, 2)
    study.tell({"responses": {"seconds": 120, "only": "shard-00000"}})
    process = study.start("responses")
    (long,) = [e for e in study.wait_for_starts(2) if e["part"] == "shard-00000"]
    cluster.run("scancel", long["job"])
    status, output = study.end(process)
    assert status != 0 and "CANCELLED" in output
    assert study.done("responses") == 1
    assert not list(study.folder.rglob(store.CLAIM))


def test_a_preempted_job_starts_again_and_the_run_goes_on(tmp_path):
    study = generation(tmp_path, 1, 8)
    study.tell({"responses": {"seconds": 600}})
    process = study.start("responses")
    (first,) = study.wait_for_starts(1)
    study.tell({"responses": {"seconds": 1}})
    cluster.run(
        "sbatch", "--partition=h100_urgent", f"--nodelist={first['node']}", "--gres=gpu:h100:8",
        "--output=/dev/null", "--wrap=sleep 1",
    )  # fmt: skip
    status, output = study.end(process)
    assert status == 0, output[-3000:]
    assert [e["job"] for e in study.events()] == [first["job"]] * 2
    assert study.done("responses") == 1


def test_a_dead_node_costs_what_ran_there(tmp_path):
    study = generation(tmp_path, 3, 4)
    study.tell({"responses": {"seconds": 600, "only": "shard-00002"}})
    process = study.start("responses")
    cluster.wait_until(lambda: study.done("responses") == 2, 90, "the other shards")
    (long,) = [e for e in study.events() if e["part"] == "shard-00002"]
    study.tell({})
    cluster.kill_node(long["node"])
    try:
        status, output = study.end(process)
    finally:
        cluster.revive_node(long["node"])
    assert status == 0, output[-3000:]
    parts = [e["part"] for e in study.events()]
    assert sorted(parts) == ["shard-00000", "shard-00001", "shard-00002", "shard-00002"]
    assert study.events()[-1]["node"] != long["node"]


def test_an_interrupted_run_leaves_no_job_and_goes_on_later(tmp_path):
    study = generation(tmp_path, 2, 2)
    study.tell({"responses": {"seconds": 600, "only": "shard-00001"}})
    process = study.start("responses")
    cluster.wait_until(lambda: study.done("responses") == 1, 90, "the first shard")
    study.wait_for_starts(2)
    os.killpg(process.pid, signal.SIGINT)
    status, _ = study.end(process)
    assert status != 0
    alive = ("PENDING", "RUNNING", "COMPLETING")
    cluster.wait_until(
        lambda: not any(j["state"] in alive for j in cluster.queue()), 30, "the end of all jobs"
    )
    time.sleep(1)
    assert not list(study.folder.rglob(store.CLAIM))
    study.tell({})
    study.run("responses")
    assert study.done("responses") == 2 and len(study.events()) == 3


def test_a_partition_that_does_not_exist_is_named_at_once(tmp_path):
    study = generation(tmp_path, 1, 2)
    site = yaml.safe_load((tmp_path / "site.yaml").read_text())
    site["node_types"]["h100"]["partition"] = "nowhere"
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(site))
    started = time.monotonic()
    status, output = study.end(study.start("responses"))
    assert status != 0 and "invalid partition" in output
    assert time.monotonic() - started < 60
