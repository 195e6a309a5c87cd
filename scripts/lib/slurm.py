"""Slurm, asked through `squeue` alone: accounting may be away, and is not needed.

What the executor's settings leave open is here: whether a job is over, why an attempt
failed, and a watchdog for waits that would never end.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ACTIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "REQUEUED")
# Reasons for which Slurm lets a job wait although nobody else's job has to end first.
HOPELESS = {
    "AccountNotAllowed": "account", "InvalidAccount": "account", "AssocNotAllowed": "account",
    "InvalidQOS": "qos", "QOSNotAllowed": "qos", "QOSMaxWallDurationPerJobLimit": "qos",
    "QOSMaxGRESPerJob": "qos", "QOSMaxCpuPerJobLimit": "qos", "QOSMaxMemoryPerJob": "qos",
    "QOSMaxNodePerJobLimit": "qos", "AssocMaxWallDurationPerJobLimit": "account",
    "AssocMaxNodePerJobLimit": "account", "AssocMaxGRESPerJob": "account",
    "PartitionTimeLimit": "partition", "PartitionNodeLimit": "partition",
    "BadConstraints": "constraint", "DependencyNeverSatisfied": "extra",
    "job_requeued_in_held_state": "", "launch_failed_requeued_held": "",
}  # fmt: skip


def squeue(columns: str, *flags: str) -> list[list[str]] | None:
    """Return the rows of `squeue`, one text per column; None when it cannot be asked.

    Args:
        columns: letters of squeue's --format, e.g. "iT" for job and state.
        flags: further arguments.
    """
    layout = "|".join(f"%{letter}" for letter in columns)
    try:
        result = subprocess.run(
            ["squeue", "--noheader", f"--format={layout}", *flags],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    if result.returncode:
        return [] if "Invalid job id" in result.stderr else None
    # The last column may hold anything.
    return [line.split("|", len(columns) - 1) for line in result.stdout.splitlines()]


def job_ended(job: str) -> bool:
    """Return whether Slurm says that a job is over; False when it cannot be asked."""
    rows = squeue("T", "--jobs", job)
    alive = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED")
    return rows is not None and all(state not in alive for (state,) in rows)


def last_state(key: str) -> str:
    """Return the final state of the user's latest job for a part or batch key.

    The executor writes a job's wildcards, and so its key, into its comment. "" when Slurm
    has forgotten the job (MinJobAge) or cannot be asked.
    """
    rows = squeue("iTk", "--me", "--states=all") or []
    ended = [(int(job.split("_")[0]), state) for job, state, comment in rows
             if key in comment and state not in ACTIVE]  # fmt: skip
    return max(ended)[1] if ended else ""


def growth(key: str, attempt: int) -> dict[str, int]:
    """Return by what memory and time of an attempt are multiplied.

    Only what the attempt before lacked grows: time after TIMEOUT, memory after
    OUT_OF_MEMORY, neither when the node or the queue was the cause. A plain failure may
    be a step that ran out of memory, so memory grows; when nobody knows, both do.

    Args:
        key: of the part or batch.
        attempt: 1 for the first.
    """
    if attempt == 1:
        return {"memory": 1, "time": 1}
    state = last_state(key)
    memory = state in ("", "OUT_OF_MEMORY", "FAILED")
    return {"memory": attempt if memory else 1, "time": attempt if state in ("", "TIMEOUT") else 1}


class Watchdog:
    """Ends what would wait for ever: jobs that cannot start, and a Snakemake that lost its jobs.

    Args:
        folder: working directory of the jobs, by which they are told from other runs.
        hopeless_seconds: how long a job may wait for a reason in `HOPELESS`.
        pending_seconds: how long a job may wait for any reason; 0: for ever.
        lost_seconds: how long Slurm may know none of our jobs before the run is ended.
        end: called to end the run; by default this process gets SIGINT, upon which
            Snakemake cancels what it knows and exits with an error.
        say: takes a message.
    """

    def __init__(
        self, folder: Path, hopeless_seconds: float, pending_seconds: float, lost_seconds: float,
        end: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGINT),
        say: Callable[[str], None] = lambda message: print(message, file=sys.stderr, flush=True),
    ):  # fmt: skip
        self.folder = str(folder)
        self.limits = (hopeless_seconds, pending_seconds, lost_seconds)
        self.end, self.say = end, say
        self.since: dict[tuple[str, str], float] = {}  # (job, reason or "") -> first seen
        self.active_at: float | None = None  # when Slurm last knew a job of ours

    def start(self) -> None:
        """Watch until the process ends, in a thread of its own."""
        interval = max(1.0, min(60.0, min(self.limits[0], self.limits[2]) / 4))

        def watch():
            while True:
                time.sleep(interval)
                self.check(time.monotonic())

        threading.Thread(target=watch, daemon=True, name="watchdog").start()

    def check(self, now: float) -> None:
        """Look once.

        Args:
            now: seconds of a clock that never goes back.
        """
        rows = squeue("iTZrk", "--me")
        if rows is None:  # Slurm does not answer: nothing is known, so nothing is lost
            if self.active_at is not None:
                self.active_at = now
            return
        ours = [(job, state, reason, comment) for job, state, folder, reason, comment in rows
                if folder == self.folder and state in ACTIVE]  # fmt: skip
        if ours:
            self.active_at = now
        elif self.active_at is not None and now - self.active_at > self.limits[2]:
            self.say(
                f"error: for {minutes(now - self.active_at)} Slurm has known no job of this run, "
                "and Snakemake still waits: jobs were lost (no accounting, or a short MinJobAge). "
                "The run ends now; finished work stays. Call it again."
            )
            self.active_at = None
            self.end()
            return
        self._check_pending(ours, now)

    def _check_pending(self, ours: list[tuple], now: float) -> None:
        waiting = {}
        for job, state, reason, comment in ours:
            if state == "PENDING":
                kind = reason.strip("()").split(",")[0].replace(" ", "_")
                waiting[job, kind if kind in HOPELESS else ""] = (reason, comment)
        self.since = {seen: self.since.get(seen, now) for seen in waiting}
        cancelled: Counter = Counter()
        for (job, kind), (reason, comment) in waiting.items():
            limit = self.limits[0] if kind else self.limits[1]
            waited = now - self.since[job, kind]
            if not limit or waited <= limit:
                continue
            cancelled[reason] += 1
            if cancelled[reason] == 1:
                setting = HOPELESS.get(kind)
                where = f" (`{setting}` in the site file)" if setting else ""
                self.say(
                    f"error: job {job} ({comment}) has waited {minutes(waited)} in Slurm's queue "
                    f"because of {reason}{where}. It is cancelled."
                )
            subprocess.run(["scancel", job], capture_output=True, timeout=60, check=False)
        for reason, count in cancelled.items():
            if count > 1:
                self.say(f"error: {count - 1} more jobs are cancelled because of {reason}.")


def minutes(seconds: float) -> str:
    """Return a duration as text."""
    return f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"
