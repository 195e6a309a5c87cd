#!/usr/bin/env python3
"""Show how far a study is: per stage what is done, running, failed and left, with rates.

Reads the store and the logs alone, so that it works while a run is going on, after it
has died, and from another machine that sees the same folders.
"""

import json
import sys
import time
from collections import Counter, defaultdict
from datetime import datetime
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
import yaml

from scripts.lib import cli, store
from scripts.lib.config import check
from scripts.lib.nodes import Node
from scripts.lib.plan import Plan
from scripts.lib.slurm import squeue

DEFAULT = Path(__file__).resolve().parents[1] / "config" / "config.yaml"
LOGS = Path("results/logs")
RATE_SECONDS = 3600.0  # over which a rate is taken
STATES = ("done", "running", "failed", "left")


def log_of(plan: Plan, node: Node) -> Path | None:
    """Return the newest log of the job that makes a part, as `rules/common.smk` names it."""
    folder = LOGS / node.stage
    if node.stage in ("hidden_states", "benchmarks"):
        names = Path(plan.batch_folder(node)).relative_to(f"{plan.store}/{node.stage}")
        found = list((folder / names.parent).glob(f"{names.name}-*.log"))
    else:
        found = [folder / node.name / f"{node.key}.log"]
    return max((p for p in found if p.exists()), key=lambda p: p.stat().st_mtime, default=None)


def last_line(path: Path | None) -> str:
    """Return the last message of a log that is ours: a time and a text."""
    if path is None:
        return ""
    lines = path.read_text(errors="replace").splitlines()
    ours = [s for s in lines if len(s) > 9 and s[2:6:3] == "::" and s[8] == " "]
    return ours[-1][9:] if ours else ""


def is_running(node: Node) -> bool:
    """Return whether a job holds the part's claim and has shown it lately."""
    try:
        return time.time() - (Path(node.folder) / store.CLAIM).stat().st_mtime < store.STALE_SECONDS
    except OSError:
        return False


def state_of(plan: Plan, node: Node) -> tuple[str, Path | None, str]:
    """Return (state, log, last message) of a part; a finished one needs no log."""
    if Path(node.manifest).exists():
        return "done", None, ""
    log = log_of(plan, node)
    message = last_line(log)
    if is_running(node):
        return "running", log, message
    return ("failed" if message.startswith("error: ") else "left"), log, message


def finished_at(node: Node) -> float:
    """Return when a finished part was finished, seconds since 1970."""
    manifest = json.loads(Path(node.manifest).read_text())
    return datetime.fromisoformat(manifest["end"]).timestamp()


def rate(ends: list[float], now: float) -> float:
    """Return parts per second over the last `RATE_SECONDS` (0.0 when none was finished)."""
    recent = [t for t in ends if now - t < RATE_SECONDS]
    return len(recent) / max(60.0, now - min(recent)) if recent else 0.0


def table(plan: Plan, now: float) -> tuple[list[str], list[str], list[str]]:
    """Return (lines of the table, lines of what runs, lines of what failed)."""
    counts: dict[str, Counter] = defaultdict(Counter)
    ends: dict[str, list[float]] = defaultdict(list)
    running: dict[str, str] = {}  # one entry per job: several parts can share one
    failed: dict[str, str] = {}
    for node in plan.all_nodes():
        state, log, message = state_of(plan, node)
        counts[node.stage][state] += 1
        if state == "done":
            ends[node.stage].append(finished_at(node))
        elif state == "running":
            running.setdefault(str(log or node.folder), f"{node.stage} {node.name}: {message}")
        elif state == "failed":
            failed[str(log)] = f"{log}: {message}"
    lines = [f"{'stage':15}" + "".join(f"{s:>9}" for s in STATES) + "   per hour   time left"]
    for stage, found in counts.items():
        speed = rate(ends[stage], now)
        left = sum(found[s] for s in STATES[1:])
        eta = f"{left / speed / 60:8.0f} min" if left and speed else ""
        shown = f"{3600 * speed:11.1f}" if left and speed else " " * 11
        lines.append(f"{stage:15}" + "".join(f"{found[s]:9}" for s in STATES) + shown + eta)
    return lines, list(running.values()), list(failed.values())


def queue() -> str:
    """Return a line about the user's jobs in Slurm, or "" without Slurm."""
    rows = squeue("T", "--me")
    if rows is None:
        return ""
    found = Counter(state.lower() for (state,) in rows)
    return "Slurm: " + (", ".join(f"{n} {s}" for s, n in sorted(found.items())) or "no jobs")


def main(args) -> None:
    """Print the state of a study."""
    config = check(yaml.safe_load(args.configfile.read_text()) | dict(args.config))
    lines, running, failed = table(Plan(config), time.time())
    print("\n".join([*lines, queue()]).rstrip())
    for title, found in (("running", running), ("failed (log: message)", failed)):
        if found:
            print(f"\n{title}:")
            print("\n".join(f"  {line}" for line in found))


if __name__ == "__main__":
    cli.run(main, cli.study_parser(__doc__, DEFAULT).parse_args())
