"""The whole workflow on the real engines, a few prompts, one store for all tests."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import psutil
import pyarrow.parquet as pq
import pytest
import yaml
from transformers import AutoTokenizer

from scripts.lib import engine
from scripts.lib.config import check
from scripts.lib.plan import Plan

ROOT = Path(__file__).resolve().parents[1]
SNAKEMAKE = [sys.executable, "-m", "snakemake"]
QUIET = ["--quiet", "rules", "progress", "host"]  # takes every word that follows


def study(clone: Path) -> dict:
    """The demo cut down: 40 prompts in two shards, one workload of 8, two epochs."""
    config = yaml.safe_load((clone / "config/config.yaml").read_text())
    config["teachers"]["smollm2-135m"]["max_tokens"] = 32
    config["pools"]["demo"]["shard_size"] = 20
    config["strategies"]["self"]["pools"] = config["vocabulary"]["pools"] = {"demo": 40}
    config["validation"] = {"share": 0.15}
    config["workloads"]["qa"]["prompts"] = 8
    # No more than the answers have distinct tokens; few, so that a short training gets somewhere.
    config["algorithms"]["eagle3"]["draft_vocab_size"] = 256
    common = {k: config["algorithms"]["eagle3"][k] for k in (
        "layers", "draft_vocab_size", "optimizer", "lr", "muon_lr", "total_seq_len")}  # fmt: skip
    config["algorithms"] |= {
        "dflash": common | {"algorithm": "dflash", "block_size": 4, "mask_token_id": 5,
                            "max_anchors": 128,
                            # After so few steps a block draft says one thing only, else.
                            "lr": 0.003, "muon_lr": 0.02},
        "peagle": common | {"algorithm": "peagle", "num_depths": 3, "mask_token_id": 5},
    }  # fmt: skip
    config["study"] |= {"epochs": 1, "workloads": ["qa"], "name": "small",
                        "algorithms": ["eagle3", "dflash", "peagle"]}  # fmt: skip
    config["benchmark"] |= {"max_tokens": 24, "min_prompts": 4, "control_concurrency": 4}
    config["benchmark"]["latency"] = {
        "workloads": ["qa"], "concurrencies": [2], "requests_per_stream": 2, "max_tokens": 16,
    }  # fmt: skip
    config["runtime"] = {"checkpoint_every_steps": 3}
    return config


def run(clone: Path, *arguments: str) -> str:
    """Run Snakemake in the clone; return its output."""
    result = subprocess.run(
        [*SNAKEMAKE, *arguments, *QUIET], cwd=clone, capture_output=True, text=True, timeout=1200
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0, output[-5000:]
    return output


def planned(clone: Path) -> str:
    """Return what a dry run of `all` says."""
    return subprocess.run(
        [*SNAKEMAKE, "-n", "all"], cwd=clone, capture_output=True, text=True, timeout=120
    ).stdout


def engines_in(folder: Path) -> list[str]:
    """Return the command lines of processes that work in or on `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if str(folder) in line or "VLLM::" in line:
            found.append(line[:200])
    return found


def write(clone: Path, config: dict) -> None:
    (clone / "config/config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone of the project with a small study as its configuration."""
    folder = tmp_path_factory.mktemp("end-to-end") / "clone"
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split("\n")
    for name in filter(None, files):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    write(folder, study(folder))
    return folder


def interrupt_when(clone: Path, target: str, ready, number=signal.SIGINT) -> str:
    """Start a run, send a signal to Snakemake's process group once `ready()`; return output."""
    process = subprocess.Popen(
        [*SNAKEMAKE, target, *QUIET], cwd=clone, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not ready():
        assert process.poll() is None, process.stdout.read()[-3000:]
        assert time.monotonic() < deadline, "never got that far"
        time.sleep(0.2)
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    return output


def test_an_interrupted_generation_keeps_its_answers_and_goes_on(clone):
    # Tests of this file run in order on one store.
    def answers():
        return sorted((clone / "results/store/responses").rglob("work/part-*.parquet"))

    script = clone / "scripts/responses.py"
    plain = script.read_text()
    # Slowed down, as these few prompts are answered within a second.
    slow = plain.replace("FLUSH_ROWS = 64", "FLUSH_ROWS = 2").replace(
        "        pending, last = [], time.monotonic()",
        "        time.sleep(2)\n        pending, last = [], time.monotonic()",
    )
    assert slow.count("time.sleep(2)") == 1
    script.write_text(slow)
    interrupt_when(clone, "responses", answers)
    script.write_text(plain)
    kept = answers()
    assert kept
    folder = kept[0].parents[1]
    assert not (folder / "manifest.json").exists()
    assert not list(clone.rglob("claim.json"))
    assert not engines_in(clone)

    run(clone, "responses")
    shard, key = folder.parts[-2:]
    log = clone / f"results/logs/responses/smollm2-135m/demo/{shard}/{key}.log"
    assert "resuming:" in log.read_text()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sum(manifest["counts"].values()) == manifest["facts"]["rows"] == 20


def test_the_study_runs_to_tables_and_report(clone):
    run(clone, "all")
    table = pd.read_csv(clone / "results/tables/acceptance.csv")
    row = table[(table.workload == "qa") & (table.epoch == 1)].iloc[0]
    assert row.prompts + row.dropped_overlap == 8
    assert row.drafted == 3 * row.drafts
    assert row.acceptance_length == pytest.approx(1 + row.accepted / row.drafts)
    rates = row[["position_1", "position_2", "position_3"]].astype(float)
    assert rates.sum() == pytest.approx(row.acceptance_length - 1)
    assert 1.0 <= row.ci_low <= row.acceptance_length <= row.ci_high <= 4.0
    lossless = pd.read_csv(clone / "results/tables/lossless.csv")
    assert lossless[lossless.workload == "pooled"].iloc[0].compared == 8
    latency = pd.read_csv(clone / "results/tables/latency.csv")
    assert set(latency.failed) == {0} and (latency.itl_ms > 0).all()
    economics = pd.read_csv(clone / "results/tables/economics.csv")
    assert len(economics) == 3 and (economics.checkpoint_bytes > 10_000).all()
    assert (economics.kv_bytes_per_token > 0).all() and (economics.training_money > 0).all()
    assert (economics.training_unknown_parts == 0).all()
    costs = pd.read_csv(clone / "results/tables/costs.csv")
    total = costs[(costs.stage == "total") & (costs.group == "all")].iloc[0]
    assert total.unknown_parts == 0 and total.money > economics.training_money.max()
    assert (clone / "results/report.html").stat().st_size > 10_000
    assert (clone / "results/current/speculators/smollm2-135m/eagle3/self/epoch-1").is_symlink()
    assert not list((clone / "results/store").rglob("claim.json"))
    assert not engines_in(clone)


def test_greedy_text_with_a_speculator_is_the_verifiers_own(clone):
    """Every token served with speculation is transformers' argmax, or a near-tie of it.

    Whole outputs cannot be compared: in bfloat16 another batch size alone changes some.
    """
    import torch
    from transformers import AutoModelForCausalLM

    plan = Plan(check(study(clone)))
    part = plan.acceptance("smollm2-135m", ("eagle3", "self", 1), "qa")
    model_dir, template, _ = engine.open_model(clone / plan.model("smollm2-135m").folder)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    prompts = {
        row["prompt_id"]: row["messages"]
        for row in pq.read_table(clone / plan.workload("qa").folder / "prompts.parquet").to_pylist()
    }
    gaps = []
    for row in pq.read_table(clone / part.folder / "requests.parquet").to_pylist():
        prompt = tokenizer.apply_chat_template(
            prompts[row["prompt_id"]], chat_template=template, add_generation_prompt=True,
            return_dict=False,
        )  # fmt: skip
        ids = prompt + row["output_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(row["output_ids"])[:, None])[:, 0]
        gaps += (logits.max(dim=1).values - chosen).tolist()
    assert len(gaps) > 50
    assert max(gaps) < 1.0
    assert sum(gap == 0 for gap in gaps) > 0.9 * len(gaps)


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash", "peagle"])
def test_the_server_drafts_what_the_training_code_drafts(clone, algorithm):
    """A wrong mask, layer, shift or vocabulary mapping changes clear decisions; rounding none.

    The two best logits of a near-tie differ by up to 0.08 in bfloat16 here.
    """
    plan = Plan(check(study(clone)))
    part = plan.speculator("smollm2-135m", algorithm, "self", 1)
    questions = ("Name three rivers.", "What is a prime number?", "Write a poem about the sea.")
    (clone / "questions.json").write_text(
        json.dumps([[{"role": "user", "content": q}] for q in questions])
    )
    subprocess.run(
        [sys.executable, ROOT / "tests/served_drafts.py", part.folder,
         plan.model("smollm2-135m").folder, "3", "questions.json", "drafts.json"],
        cwd=clone, check=True, timeout=300, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    rows = json.loads((clone / "drafts.json").read_text())
    clear = [r for r in rows if r["gap"] > 0.15]
    assert len(clear) > 40 and len({r["served"] for r in clear}) > 1
    assert [r for r in clear if r["served"] != r["trained"]] == []
    assert sum(r["served"] == r["trained"] for r in rows) > 0.85 * len(rows)


def test_hidden_states_agree_with_transformers(clone):
    errors = [
        json.loads(path.read_text())["facts"]["relative_error"]
        for path in (clone / "results/store/hidden_states").rglob("layer-*/*/manifest.json")
    ]
    assert len(errors) == 8  # 4 layers of 2 shards, the same for all algorithms
    assert all(0 < error < 0.04 for error in errors)


def test_a_second_run_plans_nothing(clone):
    assert "Nothing to be done" in planned(clone)


def test_a_changed_plot_plans_no_compute(clone):
    script = clone / "scripts/report.py"
    plain = script.read_text()
    script.write_text(plain + "\n# a comment\n")
    plan = planned(clone)
    assert "make_report" in plan
    for rule in ("generate_", "train_", "benchmark_", "extract_", "make_tables"):
        assert rule not in plan, plan
    script.write_text(plain)


def test_training_survives_a_kill_and_an_added_epoch_trains_one(clone):
    config = study(clone)
    config["study"] |= {"epochs": 2, "algorithms": ["eagle3"]}
    write(clone, config)
    plan = Plan(check(config))
    node = plan.speculator("smollm2-135m", "eagle3", "self", 2)
    step = clone / node.folder / "work/step.pt"
    before = {p: p.stat().st_mtime_ns for p in (clone / "results/store").rglob("manifest.json")}
    interrupt_when(clone, "speculators", step.exists, signal.SIGTERM)
    assert not (clone / node.manifest).exists()
    assert not engines_in(clone)

    run(clone, "all")
    log = (clone / f"results/logs/speculators/{node.name}/{node.key}.log").read_text()
    assert "resuming epoch 2 at batch" in log
    after = {p: p.stat().st_mtime_ns for p in (clone / "results/store").rglob("manifest.json")}
    assert {p: after[p] for p in before} == before  # nothing finished was made again
    table = pd.read_csv(clone / "results/tables/acceptance.csv")
    assert sorted(table[table.workload == "qa"].epoch) == [1, 2]


def test_a_server_that_dies_is_named_and_nothing_is_left(clone):
    config = study(clone)
    config["study"] |= {"epochs": 2, "algorithms": ["eagle3"]}
    config["benchmark"]["max_tokens"] = 20  # new keys, so that a server is due
    write(clone, config)

    def kill_the_server():
        for process in psutil.process_iter():
            try:
                line = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if "VLLM::EngineCore" in line:
                process.kill()
                return True
        return False

    process = subprocess.Popen(
        [*SNAKEMAKE, "benchmarks", *QUIET], cwd=clone, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 200
    while not kill_the_server():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    # Every later server is killed as well: the run must end by itself.
    while process.poll() is None:
        kill_the_server()
        assert time.monotonic() < deadline + 200, "hangs"
        time.sleep(0.2)
    output = process.stdout.read()
    assert process.returncode != 0
    assert "the vLLM server ended with status" in output
    assert not engines_in(clone)
    assert not list((clone / "results/store").rglob("claim.json"))
