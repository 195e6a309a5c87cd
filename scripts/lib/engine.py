"""vLLM in this process: environment, construction, and a loop that can be interrupted."""

import os
import time
from pathlib import Path

from scripts.lib import cli
from scripts.lib.errors import UserError

STALL_SECONDS = 900


def set_environment(runtime: dict) -> None:
    """Set what vLLM reads from the environment; call before the first vLLM import."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.update(
        VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", TOKENIZERS_PARALLELISM="false",
        VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
    )  # fmt: skip
    if runtime["device"] == "cpu":
        threads = str(runtime["threads"])
        os.environ.update(
            OMP_NUM_THREADS=threads,
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            VLLM_CPU_KVCACHE_SPACE=f"{runtime['kv_cache_gib']:g}",
        )


def device_facts(runtime: dict) -> dict:
    """Return device type and count for a manifest."""
    if runtime["device"] == "cpu":
        return {"type": "cpu", "count": runtime["threads"]}
    import torch

    return {"type": torch.cuda.get_device_name(0), "count": torch.cuda.device_count()}


def build(model_dir: str, runtime: dict, **arguments):
    """Return a `vllm.LLM` that runs in this process.

    One process means no second import of torch, and nothing left behind when it ends.

    Raises:
        UserError: when vLLM cannot load the model.
    """
    set_environment(runtime)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    started = time.monotonic()
    from vllm import LLM

    try:
        llm = LLM(
            model=model_dir, enforce_eager=runtime["enforce_eager"],
            tensor_parallel_size=runtime.get("tensor_parallel_size", 1),
            max_num_seqs=runtime["max_num_seqs"], enable_prefix_caching=False,
            generation_config="vllm", disable_log_stats=True, **arguments,
        )  # fmt: skip
    except (ValueError, RuntimeError, OSError, KeyError, AttributeError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"vLLM cannot load {model_dir}: {type(error).__name__}: {reason}. Check that this "
            "vLLM supports the architecture and that the weights are complete."
        ) from error
    cli.log.info("engine ready after %.0f s", time.monotonic() - started)
    return llm


def step_until_done(llm):
    """Yield finished `RequestOutput`s until the engine has no request left.

    Raises:
        UserError: when nothing finishes for `STALL_SECONDS`.
    """
    engine = llm.llm_engine
    last = time.monotonic()
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                last = time.monotonic()
                yield output
        if time.monotonic() - last > STALL_SECONDS:
            raise UserError(f"the engine finished no request for {STALL_SECONDS} s. Run again.")


def open_model(model_folder: Path) -> tuple[str, str, dict]:
    """Return (model directory, chat template, facts) of a finished models part."""
    import json

    from scripts.lib import store

    store.read_manifest(model_folder, "models")
    facts = json.loads(store.data_file(model_folder, "model.json").read_text())
    path = Path(facts["path"])
    directory = path if path.is_absolute() else Path(model_folder).resolve() / path
    return str(directory), facts["chat_template"], facts
