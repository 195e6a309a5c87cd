"""One training in several processes, one per GPU: torchrun, watched and stopped by us.

On several nodes Slurm's `srun` starts one torchrun on each.
"""

import json
import os
import shutil
import socket
import sys
import time
from pathlib import Path

from scripts.lib import cli, processes
from scripts.lib.errors import UserError

# torchrun gives its processes 30 s to end; in them a training saves what it has.
STOP_SECONDS = 45
JOIN_SECONDS = 900  # for all nodes to find each other


def torchrun(runtime: dict) -> list[str]:
    """Return the command before the script: torchrun here, or on every node of this job.

    Args:
        runtime: `training_processes`, in all; `training_nodes`.

    Raises:
        UserError: when several nodes are asked for outside of a Slurm job.
    """
    count, nodes = runtime["training_processes"], runtime["training_nodes"]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count // nodes),
    ]  # fmt: skip
    if nodes == 1:
        return [*command, "--standalone"]
    job = os.environ.get("SLURM_JOB_ID")
    if not job or not shutil.which("srun"):
        raise UserError(
            f"runtime.training_nodes is {nodes}, but this is no job of Slurm. Use one of the Slurm "
            "profiles, or set it to 1."
        )
    # Snakemake's executor starts the step without SLURM_JOB_NODELIST and the like.
    start = [
        "srun", "--jobid", job, "--nodes", str(nodes), "--ntasks", str(nodes),
        "--ntasks-per-node", "1", "--mem", "0", "--cpu-bind", "none", "--kill-on-bad-exit=1",
        "--unbuffered",
    ]  # fmt: skip
    meeting = [
        "--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-id", job,
        "--rdzv-endpoint", f"{socket.gethostname()}:{processes.free_port()}",
        "--rdzv-conf", f"join_timeout={JOIN_SECONDS},last_call_timeout=5",
    ]  # fmt: skip
    return [*start, *command, *meeting]


def train(argv: list[str], args, part) -> dict:
    """Run the training that the command line `argv` describes; return its training.json.

    Args:
        argv: of the calling script, which each process runs with `--worker` as well.
        args: the same, parsed.
        part: the open part; the first process writes its files.

    Raises:
        UserError: with what the process that failed said.
    """
    messages = part.work / "messages.txt"
    messages.unlink(missing_ok=True)
    # Without the dashes torchrun takes options of the script for its own.
    command = [*torchrun(args.runtime), "--", *argv, "--worker", str(messages)]
    log = args.log or part.work / "processes.log"
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    process = processes.start(command, log, environment, append=True)
    told = Messages(messages)
    try:
        while process.poll() is None:
            told.relay()
            time.sleep(0.5)
        told.relay()
    finally:
        processes.stop(process, STOP_SECONDS)
    if process.returncode:
        if told.errors:
            raise UserError(told.errors[0])
        raise RuntimeError(f"a training process ended with status {process.returncode}")
    return json.loads((part.folder / "training.json").read_text())


class Messages:
    """What the processes of a training say in their common file.

    Args:
        path: the file; may not be there yet.
    """

    def __init__(self, path: Path):
        self.path, self.seen = path, 0
        self.errors: list[str] = []

    def relay(self) -> None:
        """Pass new lines on to our own terminal; keep errors for the end."""
        if not self.path.exists():
            return
        with open(self.path, errors="replace") as stream:
            stream.seek(self.seen)
            text = stream.read()
        whole = text[: text.rfind("\n") + 1]
        self.seen += len(whole.encode())
        for line in whole.splitlines():
            message = line.partition(" ")[2]  # after the time
            if message.startswith("error: "):
                self.errors.append(message.removeprefix("error: "))
            elif not message.startswith("interrupted"):
                cli.show(line)
