"""The store: manifests last, damage found, claims, failures told in one line."""

import argparse
import hashlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time

import pyarrow as pa
import pytest
import yaml
from helpers import ROOT, finished_table, new_part, run_python, study

from scripts import gc
from scripts.lib import store, tables
from scripts.lib.config import check
from scripts.lib.errors import UserError
from scripts.lib.identity import CONTRACTS, part_key
from scripts.lib.labels import study_labels
from scripts.lib.plan import Plan

SETTINGS = {"max_length": 8}
IN_A_SCRIPT = """
import sys, time
from pathlib import Path
from scripts.lib import cli, store
def main(args):
    {body}
cli.run(main, cli.parser("").parse_args(["--log", sys.argv[2]] if len(sys.argv) > 2 else []))
"""


def finished(root, settings=SETTINGS):
    part = new_part(root, "tokens", settings)
    with part:
        (part.folder / "data").mkdir()
        (part.folder / "data" / "x.bin").write_bytes(b"abc" * 50)
        (part.folder / "y.bin").write_bytes(b"y")
        part.finish(["data", "y.bin"], counts={"ok": 3}, facts={"rows": 3})
    return part


ATTEMPT = """
import sys, time
from pathlib import Path
from scripts.lib import store
store.HEARTBEAT_SECONDS = 0.1
settings, root = {"max_length": 8}, Path(sys.argv[1])
with store.Part(root, "tokens", settings, {}):
    time.sleep(float(sys.argv[2]))
    if sys.argv[3] == "fail":
        raise KeyError
"""


def test_seconds_of_attempts_that_failed_or_were_killed_count(tmp_path):
    part = new_part(tmp_path, "tokens", SETTINGS)
    assert run_python(ATTEMPT, part.folder, 0.3, "fail").returncode
    killed = subprocess.Popen(
        [sys.executable, "-c", ATTEMPT, str(part.folder), "60", "wait"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    deadline = time.monotonic() + 20
    while len(found := store.earlier_attempts(part.folder)) < 2 or found[1]["seconds"] < 0.5:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    found = store.earlier_attempts(part.folder)
    with new_part(tmp_path, "tokens", SETTINGS) as part:
        time.sleep(0.2)
        part.finish([])
    manifest = store.read_manifest(part.folder, "tokens")
    assert manifest["earlier_attempts"] == found
    failed, cut = (a["seconds"] for a in found)
    assert 0.3 <= failed < 10 and 0.5 <= cut < 20
    assert failed + cut + 0.2 <= manifest["wall_seconds"] < failed + cut + 10
    assert sorted(p.name for p in part.folder.iterdir()) == [".manifest.json", "manifest.json"]


def test_a_finished_part_that_is_opened_again_and_one_taken_over_keep_no_time(tmp_path):
    done = finished(tmp_path)
    with new_part(tmp_path, "tokens", SETTINGS):
        pass
    assert not (done.folder / store.ATTEMPTS).exists()
    with new_part(tmp_path, "tokens", {"max_length": 9}) as part:
        write_claim(part.folder)
    assert not (part.folder / store.ATTEMPTS).exists()


@pytest.mark.parametrize("content", ["", "[{", "[1]", '{"a": 1}', '[{"seconds": "x"}]'])
def test_damaged_times_of_attempts_are_no_reason_to_fail(tmp_path, content):
    part = new_part(tmp_path, "tokens", SETTINGS)
    part.folder.mkdir(parents=True)
    (part.folder / store.ATTEMPTS).write_text(content)
    with part:
        part.finish([])
    assert store.read_manifest(part.folder)["earlier_attempts"] == []


# -- manifests -------------------------------------------------------------------


def test_manifest_records_what_the_part_is_made_from_and_every_file(tmp_path):
    part = finished(tmp_path)
    manifest = store.read_manifest(part.folder, "tokens")
    assert manifest["key"] == part.folder.name == part_key("tokens", SETTINGS, {})
    assert (manifest["settings"], manifest["inputs"]) == (SETTINGS, {})
    assert manifest["counts"] == {"ok": 3}
    expected = {"data/x.bin": b"abc" * 50, "y.bin": b"y"}
    assert manifest["files"] == {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in expected.items()
    }
    assert {"python", "pyarrow"} <= manifest["versions"].keys()
    assert manifest["host"] and manifest["start"] <= manifest["end"]
    assert manifest["wall_seconds"] >= 0 and manifest["device"]["type"] == "cpu"


def test_no_manifest_exists_before_finish_or_after_a_failure(tmp_path):
    part = new_part(tmp_path, "tokens", SETTINGS)
    with pytest.raises(RuntimeError), part:
        (part.folder / "x").write_text("x")
        assert not part.finished
        raise RuntimeError
    assert not part.finished and (part.folder / "x").exists()
    with pytest.raises(UserError, match="not finished"):
        store.read_manifest(part.folder)


def test_a_manifest_that_snakemake_deleted_comes_back_unchanged(tmp_path):
    """It deletes declared outputs before a job, even if another workflow made them meanwhile."""
    part = new_part(tmp_path, "prompts", {"test": 1})
    with part:
        part.finish([], facts={"rows": 0})
    manifest = part.folder / store.MANIFEST
    before = manifest.read_bytes()
    manifest.unlink()
    again = new_part(tmp_path, "prompts", {"test": 1})
    with again:
        assert again.finished
    assert manifest.read_bytes() == before
    unfinished = new_part(tmp_path, "prompts", {"test": 2})
    with unfinished:
        assert not unfinished.finished


def test_manifest_is_not_written_when_a_file_it_names_is_missing(tmp_path):
    part = new_part(tmp_path, "tokens", SETTINGS)
    with pytest.raises(OSError), part:
        part.finish(["not-there"])
    assert not part.finished


@pytest.mark.parametrize("content", ["", "{", '{"stage": "tokens"}', "\xff\xfe", "[]", "null"])
def test_damaged_manifest_is_a_user_error_that_names_it(tmp_path, content):
    part = finished(tmp_path)
    (part.folder / store.MANIFEST).write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        store.read_manifest(part.folder, "tokens")


def test_other_stage_or_contract_is_refused_with_expected_and_found(tmp_path, monkeypatch):
    part = finished(tmp_path)
    with pytest.raises(UserError, match=r"expected stage vocab .* found stage tokens"):
        store.read_manifest(part.folder, "vocab")
    old = CONTRACTS["tokens"]
    monkeypatch.setitem(CONTRACTS, "tokens", old + 1)
    with pytest.raises(UserError, match=f"contract {old + 1}, found stage tokens contract {old}"):
        store.read_manifest(part.folder, "tokens")


def test_cut_or_missing_data_file_is_detected(tmp_path):
    part = finished(tmp_path)
    path = part.folder / "data" / "x.bin"
    assert store.data_file(part.folder, "data/x.bin") == path
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"x\.bin has 149 bytes, its manifest says 150"):
        store.data_file(part.folder, "data/x.bin")
    path.unlink()
    with pytest.raises(UserError, match=r"x\.bin is missing"):
        store.data_file(part.folder, "data/x.bin")


def test_folder_that_is_not_named_after_its_key_is_refused(tmp_path):
    folder = new_part(tmp_path, "tokens", SETTINGS).folder
    with pytest.raises(UserError, match="disagree"):
        store.Part(folder, "tokens", {"max_length": 9}, {})


def test_input_keys_come_from_manifests_not_from_paths(tmp_path):
    parent = finished(tmp_path)
    moved = parent.folder.rename(tmp_path / "renamed")
    key = part_key("vocab", {}, {"tokens": [parent.key]})
    assert store.Part(tmp_path / key, "vocab", {}, {"tokens": [moved]}).key == key
    with pytest.raises(UserError, match="not finished"):
        store.Part(tmp_path / key, "vocab", {}, {"tokens": [tmp_path / "nothing"]})


# -- parquet of the contracts ------------------------------------------------------


def token_rows(count):
    return [
        {"prompt_id": f"{i:032x}", "rank": i, "input_ids": [i], "loss_mask": [True]}
        for i in range(count)
    ]


def test_table_survives_a_round_trip_and_is_zstd_with_metadata(tmp_path):
    part = new_part(tmp_path, "tokens", SETTINGS)
    folder = finished_table(part, "t.parquet", token_rows(3), tables.TOKENS)
    assert tables.read(folder, "t.parquet", "tokens", tables.TOKENS) == token_rows(3)
    file = pa.parquet.ParquetFile(folder / "t.parquet")
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    found = {k.decode() for k in file.schema_arrow.metadata}
    assert {"contract", "key", "versions"} <= found


@pytest.mark.parametrize(
    "case, message",
    [
        ("key", "expected key"), ("contract", "expected contract"), ("rows", "expected 3 rows"),
        ("columns", "expected columns"), ("garbage", "is damaged"),
    ],
)  # fmt: skip
def test_table_that_is_not_what_its_manifest_says_is_refused(tmp_path, case, message):
    part, schema, rows = new_part(tmp_path, "tokens", SETTINGS), tables.TOKENS, token_rows(3)
    folder = finished_table(part, "t.parquet", rows, schema)
    path, meta = folder / "t.parquet", part.metadata()
    if case in ("key", "contract"):
        meta[case] = "9" * len(meta[case])
    if case == "rows":
        rows = rows[:2]
    if case == "columns":
        schema, rows = tables.PROMPTS, []
    tables.write(path, rows, schema, meta)
    if case == "garbage":
        path.write_bytes(b"x" * 500)
    manifest = json.loads((folder / store.MANIFEST).read_text())
    manifest["files"]["t.parquet"]["bytes"] = path.stat().st_size
    store.write_json(folder / store.MANIFEST, manifest)
    with pytest.raises(UserError, match=rf"t\.parquet.* {message}"):
        tables.read(folder, "t.parquet", "tokens", tables.TOKENS)


# -- writing -----------------------------------------------------------------------


def test_replacing_leaves_nothing_behind_on_failure(tmp_path):
    path = tmp_path / "sub" / "f"
    with pytest.raises(RuntimeError), store.replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert list(path.parent.iterdir()) == []


def test_replacing_keeps_the_old_file_until_success(tmp_path):
    path = tmp_path / "f"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), store.replacing(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    with store.replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("f", "new")]


@pytest.mark.parametrize("lost, fails", [(2, False), (3, True)])
def test_ceiling_of_lost_rows(lost, fails):
    reasons = {"empty": lost - 1, "too_long": 1, "unused": 0}
    if not fails:
        return store.check_ceiling("responses", reasons, 100, 0.02)
    with pytest.raises(UserError, match=r"3 of 100 rows lost \(empty: 2, too_long: 1\)"):
        store.check_ceiling("responses", reasons, 100, 0.02)


# -- claims ------------------------------------------------------------------------


def write_claim(folder, *, host=None, pid=None, age=0.0, **more):
    folder.mkdir(parents=True, exist_ok=True)
    owner = {"host": host or socket.gethostname(), "pid": pid or os.getpid(), "user": "ada",
             "start": "2020-01-01T00:00:00+00:00"} | more  # fmt: skip
    (folder / store.CLAIM).write_text(json.dumps(owner))
    os.utime(folder / store.CLAIM, (time.time() - age,) * 2)


def dead_pid():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_second_process_exits_at_once_and_names_the_owner(tmp_path):
    body = "store.Claim(Path(sys.argv[1])).__enter__()"
    with store.Claim(tmp_path / "part"):
        started = time.monotonic()
        done = run_python(IN_A_SCRIPT.format(body=body), tmp_path / "part")
    assert done.returncode == 2 and time.monotonic() - started < 10
    assert f"process {os.getpid()}" in done.stderr and socket.gethostname() in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "part" / store.CLAIM).exists()


@pytest.mark.parametrize("age, host", [(0, None), (0, "elsewhere"), (200, "elsewhere")])
def test_living_owner_is_respected(tmp_path, age, host):
    write_claim(tmp_path, host=host, age=age)
    before = (tmp_path / store.CLAIM).read_text()
    with pytest.raises(UserError, match="ada"):
        store.Claim(tmp_path).__enter__()
    assert (tmp_path / store.CLAIM).read_text() == before


SQUEUE = {
    "runs": "echo RUNNING",
    "waits again": "echo PENDING",
    "is over": "true",
    "is forgotten": "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
    "cannot be asked": "echo 'Unable to contact slurm controller' >&2; exit 1",
    "is mine": "echo RUNNING",
}


@pytest.mark.parametrize("job", SQUEUE)
def test_claim_of_a_slurm_job_on_another_node_lives_as_long_as_the_job(tmp_path, monkeypatch, job):
    command = tmp_path / "bin" / "squeue"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\n{SQUEUE[job]}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7" if job == "is mine" else "8")
    write_claim(tmp_path / "part", host="elsewhere", job="7")
    if job in ("runs", "cannot be asked"):
        with pytest.raises(UserError, match="ada"):
            store.Claim(tmp_path / "part").__enter__()
    else:
        with store.Claim(tmp_path / "part"):
            assert "ada" not in (tmp_path / "part" / store.CLAIM).read_text()


def test_dead_process_of_this_host_is_taken_over(tmp_path):
    write_claim(tmp_path, pid=dead_pid())
    with store.Claim(tmp_path):
        assert json.loads((tmp_path / store.CLAIM).read_text())["pid"] == os.getpid()


def test_old_heartbeat_of_another_host_is_taken_over(tmp_path):
    write_claim(tmp_path, host="elsewhere", age=store.STALE_SECONDS + 5)
    with store.Claim(tmp_path):
        owner = json.loads((tmp_path / store.CLAIM).read_text())
    assert (owner["host"], owner["pid"]) == (socket.gethostname(), os.getpid())


def test_heartbeat_keeps_a_claim_young(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "HEARTBEAT_SECONDS", 0.02)
    with store.Claim(tmp_path) as claim:
        os.utime(claim.path, (1, 1))
        deadline = time.monotonic() + 5
        while claim.path.stat().st_mtime < time.time() - 60:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_claim_is_released_after_an_exception(tmp_path):
    with pytest.raises(KeyError), store.Claim(tmp_path):
        raise KeyError
    with store.Claim(tmp_path):
        pass


def contend(folder, barrier, wins):
    barrier.wait()
    try:
        store.Claim(folder).__enter__()
        wins.put(os.getpid())
    except UserError:
        pass
    barrier.wait()  # nobody ends while others still look whether it is alive


@pytest.mark.parametrize("dead", [False, True])
def test_of_many_processes_one_gets_the_claim(tmp_path, dead):
    context = multiprocessing.get_context("fork")
    for attempt in range(4):
        folder, barrier, wins = tmp_path / str(attempt), context.Barrier(5), context.SimpleQueue()
        if dead:
            write_claim(folder, pid=dead_pid())
        arguments = folder, barrier, wins
        children = [context.Process(target=contend, args=arguments) for _ in range(5)]
        for child in children:
            child.start()
        for child in children:
            child.join(10)
            assert child.exitcode == 0
        assert not wins.empty()
        winner = wins.get()
        assert wins.empty()
        assert json.loads((folder / store.CLAIM).read_text())["pid"] == winner


def test_a_takeover_in_progress_is_not_joined(tmp_path):
    write_claim(tmp_path, pid=dead_pid())
    lock = tmp_path / (store.CLAIM + ".takeover")
    lock.touch()
    with pytest.raises(UserError), store.Claim(tmp_path):
        pass
    old = time.time() - 2 * store.STALE_SECONDS
    os.utime(lock, (old, old))  # its process was killed half-way
    with pytest.raises(UserError), store.Claim(tmp_path):
        pass
    with store.Claim(tmp_path):
        assert json.loads((tmp_path / store.CLAIM).read_text())["pid"] == os.getpid()


def test_an_owner_that_lost_its_claim_leaves_the_new_owners_claim_alone(tmp_path):
    with store.Claim(tmp_path):
        write_claim(tmp_path, host="elsewhere")
    assert json.loads((tmp_path / store.CLAIM).read_text())["host"] == "elsewhere"


# -- ends of scripts -----------------------------------------------------------------


def test_full_disk_is_one_line_that_names_the_file_and_a_status_of_its_own(tmp_path):
    body = "import errno; raise OSError(errno.ENOSPC, 'No space left on device', '/data/x.bin')"
    done = run_python(IN_A_SCRIPT.format(body=body), "-", tmp_path / "log")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "disk full" in done.stderr and "/data/x.bin" in done.stderr


def test_user_error_is_one_line(tmp_path):
    body = "store.read_manifest(Path(sys.argv[1]))"
    done = run_python(IN_A_SCRIPT.format(body=body), tmp_path / "nothing")
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
    assert str(tmp_path / "nothing") in done.stderr


def test_unforeseen_error_shows_one_line_and_logs_its_traceback(tmp_path):
    done = run_python(IN_A_SCRIPT.format(body="1 / 0"), "-", tmp_path / "logs" / "x.log")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr and "Traceback" not in done.stderr
    assert "Traceback" in (tmp_path / "logs" / "x.log").read_text()


def test_sigterm_releases_the_claim_and_has_a_status_of_its_own(tmp_path):
    body = "\n    ".join(
        [
            "with store.Claim(Path(sys.argv[1])):",
            "    print('ready', flush=True)",
            "    time.sleep(30)",
        ]
    )
    process = subprocess.Popen(
        [sys.executable, "-c", IN_A_SCRIPT.format(body=body), str(tmp_path)], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    assert (tmp_path / store.CLAIM).exists()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 130 and "interrupted" in errors
    assert not (tmp_path / store.CLAIM).exists()


# -- gc ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["store", "./store", "store/"])
def test_gc_removes_only_what_no_configuration_uses_and_nothing_claimed(
    tmp_path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    config = study(tmp_path) | {"store": name}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr(gc, "DEFAULT", tmp_path / "c.yaml")
    used = {row["folder"] for row in study_labels(Plan(check(config)))["index"]}
    unused, claimed = "store/tokens/x/" + "0" * 16, "store/tokens/x/" + "1" * 16
    for folder in [*used, unused, claimed]:
        os.makedirs(folder)
        (tmp_path / folder / store.MANIFEST).write_text("{}")
    write_claim(tmp_path / claimed)
    gc.main(argparse.Namespace(configfile=[tmp_path / "c.yaml"], remove=False))
    assert (tmp_path / unused).exists()
    gc.main(argparse.Namespace(configfile=[tmp_path / "c.yaml"], remove=True))
    assert not (tmp_path / unused).exists() and (tmp_path / claimed).exists()
    assert [f for f in used if not (tmp_path / f).exists()] == []
