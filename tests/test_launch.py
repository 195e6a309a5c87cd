"""A training in several processes: what they say is passed on, how they end is told."""

import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import psutil
import pytest
from helpers import ROOT

from scripts.lib import cli, launch
from scripts.lib.errors import UserError

SCRIPT = """
import json, os, sys, time
from pathlib import Path
messages, folder, rank = Path(sys.argv[-1]), Path(sys.argv[1]), os.environ["RANK"]
assert sys.argv[-2] == "--worker" and os.environ["WORLD_SIZE"] == "2"
if rank == "0":
    with open(messages, "a") as stream:
        print("03:04:05 training epoch 1: 1/2 batches", file=stream)
"""
ENDS = {
    "well": 'if rank == "0": (folder / "training.json").write_text(json.dumps({"epoch": 1}))',
    "with a user's error": """
if rank == "1":
    with open(messages, "a") as stream:
        print("03:04:06 error: loss is nan. Lower `lr`.", file=stream)
    sys.exit(2)
time.sleep(60)
""",
    "badly": "sys.exit(9)",
    "never": "(folder / rank).touch(); time.sleep(600)",
}


def job(folder: Path, end: str):
    """Return the arguments of `launch.train` for two processes that end in some way."""
    script = folder / "script.py"
    script.write_text(SCRIPT + ENDS[end])
    (folder / "work").mkdir()
    runtime = {"training_processes": 2, "training_nodes": 1}
    part = Namespace(folder=folder, work=folder / "work")
    return (
        [str(script), str(folder), "--log", "x"],
        Namespace(runtime=runtime, log=folder / "log"),
        part,
    )


def test_the_first_process_speaks_and_writes_for_all(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(cli, "show", shown.append)
    assert launch.train(*job(tmp_path, "well")) == {"epoch": 1}
    assert shown == ["03:04:05 training epoch 1: 1/2 batches"]


@pytest.mark.parametrize(
    "end, error, told",
    [
        ("with a user's error", UserError, "^loss is nan. Lower `lr`.$"),
        ("badly", RuntimeError, "ended with status"),
    ],
)
def test_a_process_that_fails_ends_all_and_is_told(tmp_path, end, error, told):
    started = time.monotonic()
    with pytest.raises(error, match=told):
        launch.train(*job(tmp_path, end))
    assert time.monotonic() - started < 50
    assert not [p for p in psutil.process_iter() if str(tmp_path) in " ".join(_line(p))]


def test_an_interrupted_training_leaves_no_process(tmp_path):
    folder = tmp_path / "part"
    folder.mkdir()
    job(folder, "never")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1] + '/tests')\n"
        "from pathlib import Path; from argparse import Namespace\n"
        "from scripts.lib import cli, launch\n"
        "folder = Path(sys.argv[2])\n"
        "part = Namespace(folder=folder, work=folder / 'work')\n"
        "runtime = {'training_processes': 2, 'training_nodes': 1}\n"
        "args = Namespace(runtime=runtime, log=folder / 'log', out=folder)\n"
        "argv = [str(folder / 'script.py'), str(folder), '--log', 'x']\n"
        "cli.run(lambda a: launch.train(argv, a, part), args)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(ROOT), str(folder)], stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not ((folder / "0").exists() and (folder / "1").exists()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=100)
    assert process.returncode == cli.EXIT_INTERRUPTED and "interrupted" in told
    assert not [p for p in psutil.process_iter() if str(folder) in " ".join(_line(p))]


def _line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_messages_are_passed_on_once_and_only_whole(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(cli, "show", shown.append)
    file = tmp_path / "messages.txt"
    messages = launch.Messages(file)
    messages.relay()
    file.write_text("01:00:00 é 1\n01:00:01 ha")
    messages.relay()
    with open(file, "a") as stream:
        stream.write("lf\n01:00:02 error: bad\n01:00:03 interrupted: finished parts are kept\n")
    messages.relay()
    messages.relay()
    assert shown == ["01:00:00 é 1", "01:00:01 half"] and messages.errors == ["bad"]


def test_several_nodes_need_a_job_of_slurm(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    argv, args, part = job(tmp_path, "well")
    args.runtime = {"training_processes": 4, "training_nodes": 2}
    with pytest.raises(UserError, match="training_nodes is 2, but this is no job of Slurm"):
        launch.train(argv, args, part)
