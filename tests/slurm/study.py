"""A study for the tests on a real Slurm: second-long payloads in place of the scripts."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import cluster
import pytest
import yaml
from helpers import ROOT, anchor_paths

from scripts.lib.config import check
from scripts.lib.plan import Plan

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
        config["algorithms"]["eagle3"]["gradient_accumulation_steps"] = 4
        self.write(config)
        self.tell({})

    def write(self, config: dict) -> None:
        """Make `config` the study's configuration."""
        self.config, self.file = config, self.folder / "config.yaml"
        self.file.write_text(yaml.safe_dump(config, sort_keys=False))
        self.plan = Plan(check(config))

    def edit_site(self, edit) -> None:
        """Let `edit` change the settings of the site."""
        file = self.folder / "site.yaml"
        site = yaml.safe_load(file.read_text())
        edit(site)
        file.write_text(yaml.safe_dump(site))

    def key(self, stage: str) -> str:
        """Return the key of the only part of a stage."""
        (node,) = self.plan.nodes(stage)
        return node.key

    def tell(self, todo: dict) -> None:
        """Say what payloads do (`payload.py`)."""
        (self.folder / "do.json").write_text(json.dumps(todo))

    def finish(self, stage: str) -> None:
        """Give all parts of a stage their manifests."""
        for node in self.plan.nodes(stage):
            Path(node.folder).mkdir(parents=True, exist_ok=True)
            Path(node.manifest).write_text(json.dumps({"key": node.key}))

    def start(self, target: str, profile: str = "profiles/slurm-h100", *more) -> subprocess.Popen:
        """Start Snakemake; `more` are further arguments."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
        return subprocess.Popen(
            [sys.executable, "-m", "snakemake", target, "-d", str(self.folder), "--profile",
             profile, "--configfile", str(self.file), "--retries", "0", "--latency-wait", "10",
             "--slurm-init-seconds-before-status-checks", "1", *more],
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
