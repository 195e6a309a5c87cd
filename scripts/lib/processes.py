"""Child processes that never outlive us: started in a session of their own, stopped whole."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    """Return a TCP port that is free on the loopback interface now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(command: list, log_file: Path, environment: dict, append: bool = False):
    """Start a command in a session of its own, all its output in a file.

    If this process is killed outright, the kernel sends the child SIGTERM.
    """
    with open(log_file, "a" if append else "w") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env=environment, start_new_session=True, preexec_fn=_die_with_parent,
        )  # fmt: skip


def stop(process: subprocess.Popen, seconds: float) -> None:
    """Stop a process that `start` gave and every descendant; return when all are gone.

    Args:
        process: may have ended already; what it left behind is stopped too.
        seconds: time to end after SIGTERM before SIGKILL.
    """
    try:
        parent = psutil.Process(process.pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    # Workers outlive a parent that died: they share its session.
    for other in psutil.process_iter(["pid"]):
        try:
            if os.getsid(other.pid) == process.pid and other not in family:
                family.append(other)
        except (ProcessLookupError, PermissionError):
            continue
    if process.poll() is None:
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    _, alive = psutil.wait_procs(family, timeout=5)
    for survivor in alive:
        try:
            survivor.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=10)
    process.wait(10)
