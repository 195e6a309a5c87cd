"""Status: what is done, running, failed and left, from the store and the logs alone."""

import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from helpers import make_plan

from scripts import status
from scripts.lib import cli, store


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return make_plan(tmp_path)


def finish(node, seconds_ago=0.0):
    Path(node.folder).mkdir(parents=True, exist_ok=True)
    end = datetime.fromtimestamp(time.time() - seconds_ago, UTC)
    Path(node.manifest).write_text(json.dumps({"key": node.key, "end": end.isoformat()}))


def claim(node, seconds_ago=0.0):
    Path(node.folder).mkdir(parents=True, exist_ok=True)
    path = Path(node.folder) / store.CLAIM
    path.write_text("{}")
    os.utime(path, (time.time() - seconds_ago,) * 2)


def write_log(path, *messages):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "INFO of a library\n" + "".join(f"03:04:05 {m}\n" for m in messages) + "noise\n"
    )


def counts(plan):
    """Return {stage: [done, running, failed, left]} of the printed table."""
    lines, running, failed = status.table(plan, time.time())
    found = {line.split()[0]: [int(n) for n in line.split()[1:5]] for line in lines[1:]}
    return found, running, failed


def test_everything_is_left_on_an_empty_store(plan):
    found, running, failed = counts(plan)
    assert all(numbers[:3] == [0, 0, 0] and numbers[3] > 0 for numbers in found.values())
    assert sum(n[3] for n in found.values()) == len(plan.all_nodes())
    assert running == failed == []


def test_a_part_is_done_running_failed_or_left(plan):
    done, at_work, broken, stale = [plan.responses("small", "p", i) for i in (0, 1, 2)] + [
        plan.responses("other", "p", 0)
    ]
    finish(done)
    claim(at_work)
    write_log(status.LOGS / f"responses/{at_work.name}/{at_work.key}.log", "a", "12/20 prompts")
    write_log(status.LOGS / f"responses/{broken.name}/{broken.key}.log", "b", "error: disk full")
    claim(stale, seconds_ago=store.STALE_SECONDS + 5)  # its job died without a word
    found, running, failed = counts(plan)
    total = len(plan.nodes("responses"))
    assert found["responses"] == [1, 1, 1, total - 3]
    assert running == [f"responses {at_work.name}: 12/20 prompts"]
    assert failed == [f"results/logs/responses/{broken.name}/{broken.key}.log: error: disk full"]


def test_a_failed_job_that_was_repeated_with_success_is_done(plan):
    node = plan.responses("small", "p", 0)
    write_log(status.LOGS / f"responses/{node.name}/{node.key}.log", "error: disk full")
    finish(node)
    assert counts(plan)[2] == []


def test_a_failed_batch_is_told_once_with_the_newest_log(plan):
    speculator = plan.speculator("small", "a", "own", 1)
    parts = [n for n in plan.nodes("benchmarks") if n.parents.get("speculator") is speculator]
    folder = Path(plan.batch_folder(parts[0])).relative_to(f"{plan.store}/benchmarks")
    logs = status.LOGS / "benchmarks" / folder.parent
    write_log(logs / f"{speculator.key}-00-0.log", "error: old")
    write_log(logs / f"{speculator.key}-11-0.log", "server ready", "error: the server ended")
    os.utime(logs / f"{speculator.key}-00-0.log", (1, 1))
    found, _, failed = counts(plan)
    assert found["benchmarks"][2] == len(parts) > 1
    assert len(failed) == 1 and failed[0].endswith("error: the server ended")


def test_rate_and_time_left_follow_the_last_hour():
    now = 10_000.0
    assert status.rate([], now) == 0
    assert status.rate([now - 5000], now) == 0
    # Five in ten minutes, the first of them ten minutes ago.
    assert status.rate([now - 600 + 120 * i for i in range(5)], now) == pytest.approx(5 / 600)


def test_settings_are_read_as_snakemake_reads_them():
    parser = cli.study_parser("", Path("default.yaml"))
    args = parser.parse_args(["--config", "accept_gemma_terms=true", "store=/a=b"])
    assert dict(args.config) == {"accept_gemma_terms": True, "store": "/a=b"}
    assert args.configfile == Path("default.yaml")
