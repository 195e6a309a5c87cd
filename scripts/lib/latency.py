"""Latency measured by GuideLLM at one fixed concurrency."""

import json
import os
import subprocess
import sys
from pathlib import Path

from scripts.lib import cli, processes, server
from scripts.lib.errors import UserError

_METRICS = {  # ours -> (GuideLLM's, factor to our unit)
    "ttft_ms": ("time_to_first_token_ms", 1.0),
    "itl_ms": ("inter_token_latency_ms", 1.0),
    "latency_ms": ("request_latency", 1000.0),
}


def guidellm_arguments(target, model_dir: str, data: Path, report: Path, settings: dict) -> list:
    """Return the arguments of the `guidellm` command."""
    requests = settings["requests_per_stream"] * settings["concurrency"]
    backend = {
        "kind": "openai_http", "target": target.url, "model": server.MODEL_NAME,
        "api_key": target.key, "max_tokens": settings["max_tokens"],
        "extras": {"body": {"temperature": settings["temperature"]}},
    }  # fmt: skip
    return [
        "run", "--backend", json.dumps(backend),
        "--tokenizer", f"kind=huggingface_auto,model={model_dir}",
        "--data", f"kind=json_file,path={data}",
        "--profile", f"kind=concurrent,streams={settings['concurrency']}",
        "--constraint", f"kind=max_requests,count={requests}",
        "--constraint", f"kind=max_duration,seconds={settings['max_seconds']}",
        "--seed", f"kind=static,value={settings['seed']}",
        "--output", f"kind=json,path={report}", "--disable-progress",
    ]  # fmt: skip


def command(target, model_dir: str, data: Path, report: Path, settings: dict) -> list[str]:
    """Return the command line that runs GuideLLM.

    The arguments hold the server's key, and every user of a node can read command
    lines, so they go through a file that only this user can read.
    """
    file = data.with_name("guidellm-arguments.json")
    file.unlink(missing_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        json.dump(guidellm_arguments(target, model_dir, data, report, settings), stream)
    code = "import json, sys; from guidellm.__main__ import cli; cli(json.load(open(sys.argv[1])))"
    return [sys.executable, "-c", code, str(file)]


def write_data(path: Path, prompts: list[dict], settings: dict) -> None:
    """Write the request file; prompts repeat when there are fewer than requests.

    Repeats are harmless as the server runs without prefix cache.
    """
    count = settings["requests_per_stream"] * settings["concurrency"]
    with open(path, "w") as stream:
        for number in range(count):
            prompt = prompts[number % len(prompts)]
            text = "\n\n".join(m["content"] for m in prompt["messages"])
            row = {"prompt": text, "output_tokens_count": settings["max_tokens"]}
            stream.write(json.dumps(row) + "\n")


def summarise(report: dict) -> dict:
    """Extract counts and median, p95, p99 from a GuideLLM report of one benchmark.

    Raises:
        UserError: when no request succeeded.
    """
    if len(report["benchmarks"]) != 1:
        raise UserError(f"GuideLLM reported {len(report['benchmarks'])} benchmarks, expected one.")
    metrics = report["benchmarks"][0]["metrics"]
    totals = metrics["request_totals"]
    if not totals["successful"]:
        raise UserError(f"no GuideLLM request succeeded: {totals}.")
    result = {
        "requests": totals["successful"], "failed": totals["errored"],
        "incomplete": totals["incomplete"],
    }  # fmt: skip
    for name, (theirs, factor) in _METRICS.items():
        values = metrics[theirs]["successful"]
        result[name] = {
            "median": values["median"] * factor, "mean": values["mean"] * factor,
            "p95": values["percentiles"]["p95"] * factor,
            "p99": values["percentiles"]["p99"] * factor,
        }  # fmt: skip
    result["output_tokens_per_s"] = metrics["output_tokens_per_second"]["total"]["mean"]
    return result


def measure(target, model_dir: str, prompts: list[dict], settings: dict, work: Path) -> tuple:
    """Run GuideLLM against a server; return (summary, path of the raw report).

    Raises:
        UserError: when GuideLLM fails or outlives its time limit.
    """
    work = work.resolve()
    data, report, log = work / "requests.jsonl", work / "guidellm.json", work / "guidellm.log"
    write_data(data, prompts, settings)
    report.unlink(missing_ok=True)
    limit = settings["max_seconds"] + 180
    line = command(target, model_dir, data, report, settings)
    process = processes.start(line, log, os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"})
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        raise UserError(f"GuideLLM was still running after {limit} s (log: {log}).") from None
    finally:
        processes.stop(process, seconds=0)
    target.check_alive()
    if status or not report.exists():
        tail = " | ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
        raise UserError(f"GuideLLM ended with status {status}: {tail[-400:]} (log: {log}).")
    cli.log.info(
        "latency at concurrency %d: %d requests", settings["concurrency"],
        settings["requests_per_stream"] * settings["concurrency"],
    )  # fmt: skip
    return summarise(json.loads(report.read_text())), report
