#!/usr/bin/env python3
"""Run the demo study and show its tables: what `make demo` does.

Says what will be done and how long it takes, runs Snakemake, prints a progress
line per finished stage, and ends with the tables and the path of the report.
Interrupt it at any time; the next call goes on from there.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SNAKEMAKE = [sys.executable, "-m", "snakemake", "all"]

PLAN = """\
Demo: an EAGLE-3 speculator for SmolLM2-135M-Instruct, on this machine's CPU.
  1  convert the model, draw prompts            under 1 min
  2  the model answers the prompts (vLLM)       about 2 min
  3  extract its hidden states (vLLM)           about 1 min
  4  train {epochs} epochs                            about 6 min
  5  measure every epoch on 7 workloads         about 6 min
It can be interrupted (Ctrl-C) and called again: finished work is kept.
"""


def missing_jobs() -> int:
    """Return how many jobs a run would start (0: all is there)."""
    dry = subprocess.run(
        [*SNAKEMAKE, "--dry-run", "--quiet", "rules"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if dry.returncode:
        sys.stderr.write(dry.stdout + dry.stderr)
        raise SystemExit(dry.returncode)
    for line in (dry.stdout + dry.stderr).splitlines():
        if line.startswith("total"):
            return int(line.split()[1])
    return 0


def main() -> int:
    """Run the study; return Snakemake's exit status."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    started = time.monotonic()
    jobs = missing_jobs()
    if jobs:
        sys.path[0] = str(ROOT)
        import yaml

        epochs = yaml.safe_load((ROOT / "config/config.yaml").read_text())["study"]["epochs"]
        print(PLAN.format(epochs=epochs), f"\n{jobs} jobs to do.\n", flush=True)
        process = subprocess.Popen(
            [*SNAKEMAKE, "--quiet", "all"], cwd=ROOT
        )  # fmt: skip
        try:
            status = process.wait()
        except KeyboardInterrupt:
            # A Ctrl-C in a terminal reaches Snakemake and its jobs as well; a signal sent
            # to this process alone has to be passed on.
            process.send_signal(signal.SIGINT)
            status = process.wait() or 130
        if status:
            print(
                "\nThe demo did not finish; the messages above name the cause. Finished parts "
                "are kept: `make demo` goes on from there.", file=sys.stderr,
            )  # fmt: skip
            return status
    summary = ROOT / "results/tables/summary.txt"
    print(f"\n{summary.read_text()}")
    print(f"Report: {ROOT / 'results/report.html'}")
    print(f"Checkpoints: {os.path.relpath(ROOT / 'results/current/speculators', os.getcwd())}")
    print(f"Took {(time.monotonic() - started) / 60:.1f} min.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
