"""On a real Slurm: waits that no setting of the executor ends, and what a retry asks for."""

import cluster
import pytest
from study import generation

from scripts.lib import slurm as queue

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("no_jobs_left")]


@pytest.fixture
def short_partition():
    """Partition a100 takes jobs of up to a minute; longer ones wait for ever."""
    cluster.run("scontrol", "update", "PartitionName=a100", "MaxTime=1")
    yield
    cluster.run("scontrol", "update", "PartitionName=a100", "MaxTime=UNLIMITED")


def test_a_job_that_slurm_will_never_start_is_cancelled_with_its_reason(tmp_path, short_partition):
    study = generation(tmp_path, 2, 2)
    study.edit_site(lambda site: site.update(waiting={"hopeless_minutes": 0.05}))
    status, output = study.end(study.start("responses", "profiles/slurm-a100"))
    assert status != 0
    assert "PartitionTimeLimit (`partition` in the site file). It is cancelled." in output
    assert "generate_responses" in output and "CANCELLED" in output


def test_a_run_that_lost_its_jobs_ends(tmp_path):
    """Without accounting `sacct` knows no job, and the executor would wait for ever."""
    study = generation(tmp_path, 1, 2)
    study.edit_site(lambda site: site.update(waiting={"lost_minutes": 0.2}))
    process = study.start("responses", "profiles/slurm-h100", "--slurm-status-command", "sacct")
    status, output = study.end(process)
    assert status != 0 and "Slurm has known no job of this run" in output
    assert study.done("responses") == 1  # the job itself was well
    study.run("responses")


def test_a_retry_asks_for_what_the_attempt_before_lacked(tmp_path):
    study = generation(tmp_path, 1, 2)
    study.finish("responses")
    study.tell({"tokens": {"exit": 3}})
    status, _ = study.end(study.start("hidden_states", "profiles/slurm-h100", "--retries", "1"))
    assert status != 0
    asked = cluster.run("squeue", "--states=all", "--noheader", "--format=%A|%k|%m|%l").splitlines()
    jobs = sorted(line.split("|") for line in asked if study.key("tokens") in line)
    (first, second) = [(memory, limit) for _, _, memory, limit in jobs]
    assert second[0] == "16000M" and first[0] == "8000M"  # a failure may be want of memory
    assert second[1] == first[1]  # but not of time


@pytest.mark.parametrize("how, state", [("exit 1", "FAILED"), ("sleep 300", "CANCELLED")])
def test_why_a_job_ended_is_asked_by_its_key(tmp_path, how, state):
    number = cluster.run(
        "sbatch", "--parsable", f"--chdir={tmp_path}", "--output=/dev/null", f"--wrap={how}",
        "--comment=rule_x_wildcards_name_0123456789abcdef",
    ).strip()  # fmt: skip
    if state == "CANCELLED":
        cluster.run("scancel", number)
    cluster.wait_until(lambda: queue.last_state("0123456789abcdef"), 30, f"the end of {number}")
    assert queue.last_state("0123456789abcdef") == state and queue.last_state("0" * 16) == ""
