"""One training in several processes, one per GPU: torchrun, watched and stopped by us."""

import json
import os
import sys
import time
from pathlib import Path

from scripts.lib import cli, processes
from scripts.lib.errors import UserError

# torchrun gives its processes 30 s to end; in them a training saves what it has.
STOP_SECONDS = 45


def train(argv: list[str], args, part) -> dict:
    """Run the training that the command line `argv` describes; return its training.json.

    Args:
        argv: of the calling script, which each process runs with `--worker` as well.
        args: the same, parsed.
        part: the open part; the first process writes its files.

    Raises:
        UserError: with what the process that failed said.
    """
    count = args.runtime["training_processes"]
    messages = part.work / "messages.txt"
    messages.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        # Without the dashes torchrun takes options of the script for its own.
        str(count), "--", *argv, "--worker", str(messages),
    ]  # fmt: skip
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
