"""The workflow on a real Slurm (`slurm/cluster.py`): second-long jobs in place of the scripts.

What Snakemake, its executor, the profiles and the rules ask of Slurm is real, and so are
the nodes' GPUs as far as Slurm is concerned.
"""

import os
import signal
import time
from itertools import pairwise

import cluster
import pytest
from helpers import edited
from study import Study, generation

from scripts.lib import store

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("no_jobs_left")]


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


def test_a_training_on_two_nodes_gets_its_gpus_on_both(tmp_path):
    study = Study(tmp_path)
    study.write(edited(study.config, {"runtime.training_nodes": 2}))
    for stage in ("models", "prompts", "responses", "tokens", "hidden_states", "vocab"):
        study.finish(stage)
    study.run("speculators")
    (event,) = study.events()
    fields = dict(
        field.split("=", 1)
        for field in cluster.run("scontrol", "show", "job", event["job"]).split() if "=" in field
    )  # fmt: skip
    assert fields["NumNodes"] == "2" and fields["TresPerNode"] == "gres:gpu:h100:2"
    assert len(event["gpus"]) == 2 and fields["Partition"] == "h100"


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
    study.edit_site(lambda site: site["node_types"]["h100"].update(partition="nowhere"))
    started = time.monotonic()
    status, output = study.end(study.start("responses"))
    assert status != 0 and "invalid partition" in output
    assert time.monotonic() - started < 60
