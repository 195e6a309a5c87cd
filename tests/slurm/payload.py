"""Stands in for every script of the workflow: notes where it runs, waits, leaves manifests.

Called as `payload.py <script> <its arguments>`. What it should do is read from
`$PAYLOAD/do.json`: {stage: {"seconds": 1, "exit": 0, "only": text in the part's folder}}.
Claims, signals and exit statuses are the workflow's own.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])
from scripts.lib import cli, store

FOLDER = Path(os.environ["PAYLOAD"])


def note(event: str, stage: str, folder: Path) -> None:
    """Append a line about this job to `$PAYLOAD/events.jsonl`."""
    line = {
        "event": event, "stage": stage, "part": folder.parent.name, "time": time.time(),
        "node": os.environ.get("SLURMD_NODENAME"), "job": os.environ.get("SLURM_JOB_ID"),
        "partition": os.environ.get("SLURM_JOB_PARTITION"),
        "gpus": [g for g in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if g],
    }  # fmt: skip
    with open(FOLDER / "events.jsonl", "a") as stream:
        stream.write(json.dumps(line) + "\n")


def main(args) -> None:
    """Make all parts of the job."""
    stage = Path(args.script).stem
    folders = [Path(p["out"]) for p in args.parts] or [args.out]
    todo = json.loads((FOLDER / "do.json").read_text()).get(stage, {})
    if todo.get("only", "") not in str(folders[0]):
        todo = {}
    for folder in folders:
        if store.is_finished(folder):
            continue
        with store.Claim(folder):
            note("start", stage, folder)
            cli.log.info("payload of %s", folder)
            time.sleep(todo.get("seconds", 0.2))
            if todo.get("exit"):
                note("exit", stage, folder)
                os._exit(todo["exit"])
            made = {"key": folder.name, "stage": stage, "end": store.now()}
            store.write_manifest(folder, made)
            note("end", stage, folder)
    if args.batch:
        store.write_json(args.batch, {})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("script")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", type=json.loads, default=[])
    parser.add_argument("--batch", type=Path)
    parser.add_argument("--log", type=Path)
    cli.run(main, parser.parse_known_args()[0])
