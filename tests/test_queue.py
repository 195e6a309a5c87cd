"""What is asked of Slurm's queue and concluded from it, with a `squeue` of our own."""

import os

import pytest

from scripts.lib import slurm

KEY = "0123456789abcdef"


@pytest.fixture
def says(tmp_path, monkeypatch):
    """Return a function that makes `squeue` print lines; `scancel` notes its jobs in a file."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def install(*lines: str, status: int = 0):
        (tmp_path / "lines").write_text("".join(f"{line}\n" for line in lines))
        for name, body in {
            "squeue": f"cat {tmp_path}/lines; exit {status}",
            "scancel": f'echo "$@" >> {tmp_path}/cancelled',
        }.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
            (tmp_path / name).chmod(0o755)

    install.cancelled = lambda: (
        (tmp_path / "cancelled").read_text().split() if (tmp_path / "cancelled").exists() else []
    )
    return install


@pytest.mark.parametrize(
    "state, memory, time",
    [
        ("OUT_OF_MEMORY", 3, 1), ("FAILED", 3, 1), ("TIMEOUT", 1, 3), ("NODE_FAIL", 1, 1),
        ("CANCELLED", 1, 1), ("PREEMPTED", 1, 1),
    ],
)  # fmt: skip
def test_a_retry_grows_by_what_its_last_attempt_lacked(says, state, memory, time):
    says(
        f"7|{state}|rule_x_wildcards_a_{KEY}", f"5|COMPLETED|rule_x_wildcards_a_{KEY}",
        f"9|RUNNING|rule_x_wildcards_a_{KEY}", "8|COMPLETED|rule_x_wildcards_a_ffff",
    )  # fmt: skip
    assert slurm.growth(KEY, 3) == {"memory": memory, "time": time}


def test_a_retry_grows_in_everything_when_nobody_knows(says):
    for _ in (says(), says(status=1)):
        assert slurm.growth(KEY, 2) == {"memory": 2, "time": 2}
    says("7|TIMEOUT|other")
    assert slurm.growth(KEY, 2) == {"memory": 2, "time": 2}
    assert slurm.growth(KEY, 1) == {"memory": 1, "time": 1}


def watchdog(folder, told: list, **limits):
    given = {"hopeless_seconds": 600, "pending_seconds": 0, "lost_seconds": 900} | limits
    return slurm.Watchdog(folder, **given, end=lambda: told.append("end"), say=told.append)


def test_a_hopeless_job_is_cancelled_and_a_queueing_one_is_not(says, tmp_path):
    told: list[str] = []
    dog = watchdog(tmp_path, told)
    says(
        f"1|PENDING|{tmp_path}|PartitionTimeLimit|rule_a", f"2|PENDING|{tmp_path}|Priority|rule_b",
        f"3|PENDING|{tmp_path}|(InvalidAccount)|rule_c", "4|PENDING|/elsewhere|BadConstraints|x",
        f"5|PENDING|{tmp_path}|launch failed requeued held|rule_d",
        f"6|PENDING|{tmp_path}|PartitionTimeLimit|rule_e",
    )  # fmt: skip
    dog.check(0)
    dog.check(600)
    assert says.cancelled() == [] and told == []
    dog.check(601)
    assert says.cancelled() == ["1", "3", "5", "6"]
    assert told[0] == (
        "error: job 1 (rule_a) has waited 10 minutes in Slurm's queue because of "
        "PartitionTimeLimit (`partition` in the site file). It is cancelled."
    )
    assert told[-1] == "error: 1 more jobs are cancelled because of PartitionTimeLimit."
    assert len(told) == 4 and "`account`" in told[1]


def test_the_wait_begins_anew_when_the_reason_went_away(says, tmp_path):
    dog = watchdog(tmp_path, [])
    for now, reason in ((0, "InvalidQOS"), (500, "Priority"), (700, "InvalidQOS")):
        says(f"1|PENDING|{tmp_path}|{reason}|rule_a")
        dog.check(now)
    assert says.cancelled() == []


def test_a_limit_on_any_wait_is_kept(says, tmp_path):
    told: list[str] = []
    dog = watchdog(tmp_path, told, pending_seconds=3600)
    says(f"1|PENDING|{tmp_path}|Resources|rule_a", f"2|RUNNING|{tmp_path}|None|rule_b")
    dog.check(0)
    dog.check(3601)
    assert says.cancelled() == ["1"] and "60 minutes" in told[0] and "Resources" in told[0]


def test_a_run_whose_jobs_slurm_has_forgotten_is_ended_once(says, tmp_path):
    told: list[str] = []
    dog = watchdog(tmp_path, told)
    says()
    dog.check(0)
    dog.check(5000)  # nothing was submitted yet: nothing is lost
    says(f"1|RUNNING|{tmp_path}|None|rule_a")
    dog.check(5060)
    says(status=1)
    dog.check(9000)  # Slurm does not answer: nothing is known
    says(f"1|COMPLETED|{tmp_path}|None|rule_a", "2|RUNNING|/elsewhere|None|rule_b")
    dog.check(9900)
    assert told == []
    dog.check(9901)
    assert len(told) == 2 and told[1] == "end" and "no job of this run" in told[0]
    dog.check(20000)
    assert len(told) == 2
