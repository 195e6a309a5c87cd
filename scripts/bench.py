#!/usr/bin/env python3
"""Print how close our stages come to bare vLLM: what `make bench` does.

Ratios, not times: generation (our tokens/s over a plain `LLM.generate` of the
same prompts), extraction (our tokens/s over plain prefill of the same rows), and
the peak memory of each. Uses the demo's model, prompts and settings; each
measurement runs in a process of its own, one after the other.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)


def plan():
    """Return the plan of the default configuration."""
    import yaml

    from scripts.lib.config import check
    from scripts.lib.plan import Plan

    return Plan(check(yaml.safe_load((ROOT / "config/config.yaml").read_text())))


def bare_generation(spec: dict) -> dict:
    """Time plain vLLM on the prompts of a responses part."""
    from vllm import SamplingParams

    from scripts.lib import engine, tables
    from scripts.responses import prompt_seed

    model_dir, template, _ = engine.open_model(Path(spec["model"]))
    rows = tables.read(Path(spec["prompts"]), "prompts.parquet", "prompts", tables.PROMPTS)
    settings, runtime = spec["settings"], spec["runtime"]
    llm = engine.build(
        model_dir, runtime, max_model_len=settings["max_model_len"], seed=settings["seed"],
        enable_chunked_prefill=runtime["device"] != "cpu",
        max_num_batched_tokens=max(settings["max_model_len"], 2048),
    )  # fmt: skip
    tokenizer = llm.get_tokenizer()
    prompts = [
        {"prompt_token_ids": tokenizer.apply_chat_template(
            r["messages"], chat_template=template, add_generation_prompt=True, return_dict=False)}
        for r in rows
    ]  # fmt: skip
    sampling = [
        SamplingParams(
            temperature=settings["temperature"], top_p=settings["top_p"],
            max_tokens=settings["max_tokens"], seed=prompt_seed(settings["seed"], r["prompt_id"]),
        )
        for r in rows
    ]  # fmt: skip
    started = time.monotonic()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.monotonic() - started
    return {"tokens": sum(len(o.outputs[0].token_ids) for o in outputs), "seconds": seconds}


def our_generation(spec: dict) -> dict:
    """Time the loop of scripts/responses.py on the same prompts, flushing included."""
    from types import SimpleNamespace

    from scripts import responses
    from scripts.lib import engine, tables

    model_dir, template, _ = engine.open_model(Path(spec["model"]))
    rows = tables.read(Path(spec["prompts"]), "prompts.parquet", "prompts", tables.PROMPTS)
    clock = {}
    build = engine.build

    def timed_build(*args, **kwargs):
        llm = build(*args, **kwargs)
        clock["start"] = time.monotonic()
        return llm

    engine.build = timed_build
    with tempfile.TemporaryDirectory() as work:
        part = SimpleNamespace(work=Path(work), metadata=dict)
        done = responses.generate(
            rows, spec["settings"], template, model_dir, spec["runtime"], part
        )
        seconds = time.monotonic() - clock["start"]
    return {"tokens": sum(r["response_tokens"] for r in done.values()), "seconds": seconds}


def bare_prefill(spec: dict) -> dict:
    """Time plain vLLM prefill (one output token) of a tokens part."""
    from vllm import SamplingParams

    from scripts.lib import engine, tables

    model_dir, _, _ = engine.open_model(Path(spec["model"]))
    rows = tables.read(Path(spec["tokens"]), "tokens.parquet", "tokens", tables.TOKENS)
    longest = max(len(r["input_ids"]) for r in rows)
    llm = engine.build(model_dir, spec["runtime"], max_model_len=longest + 8)
    prompts = [{"prompt_token_ids": r["input_ids"]} for r in rows]
    started = time.monotonic()
    llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
    seconds = time.monotonic() - started
    return {"tokens": sum(len(r["input_ids"]) for r in rows), "seconds": seconds}


def our_extraction(spec: dict) -> dict:
    """Time the extraction of scripts/hidden_states.py on the same rows, writing included."""
    from scripts import hidden_states
    from scripts.lib import engine, shards, tables

    model_dir, _, facts = engine.open_model(Path(spec["model"]))
    rows = tables.read(Path(spec["tokens"]), "tokens.parquet", "tokens", tables.TOKENS)
    ids, lengths = [r["prompt_id"] for r in rows], [len(r["input_ids"]) for r in rows]
    with tempfile.TemporaryDirectory(dir=ROOT / "results") as work:
        writers = [
            shards.ShardWriter(Path(work) / f"{k}", ids, lengths, facts["hidden_size"], {})
            for k in spec["layers"]
        ]
        rates = hidden_states.extract(
            rows, writers, spec["layers"], model_dir, facts["hidden_size"], spec["runtime"],
            Path(work) / "engine",
        )  # fmt: skip
    return {"tokens": rates["tokens"], "seconds": rates["extract_seconds"]}


MEASUREMENTS = {
    f.__name__: f for f in (bare_generation, our_generation, bare_prefill, our_extraction)
}


def measure(name: str, spec: dict, script: str = __file__) -> dict:
    """Run one measurement of a script in its own process; return what it printed as JSON."""
    print(f"measuring {name} ...", file=sys.stderr, flush=True)
    result = subprocess.run(
        [sys.executable, script, "--only", name, "--spec", json.dumps(spec)],
        capture_output=True, text=True, cwd=ROOT, timeout=1800,
    )  # fmt: skip
    if result.returncode:
        raise SystemExit(result.stderr[-3000:])
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    """Measure everything and print the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=MEASUREMENTS, help=argparse.SUPPRESS)
    parser.add_argument("--spec", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        from scripts.lib import engine

        engine.set_environment(args.spec["runtime"])
        found = MEASUREMENTS[args.only](args.spec)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps(found | {"peak_gib": peak}))
        return
    study = plan()
    tokens = study.nodes("tokens")[0]
    response = tokens.parents["responses"]
    if not Path(tokens.manifest).exists():
        raise SystemExit("run `make demo` first: its tokens are what is measured here.")
    spec = {
        "model": response.parents["model"].folder, "prompts": response.parents["prompts"].folder,
        "settings": response.settings, "tokens": tokens.folder,
        "runtime": study.runtime(response.parents["model"]),
        "layers": [*study.layers(study.config["study"]["algorithms"][0]), ],
    }  # fmt: skip
    results = {name: measure(name, spec) for name in MEASUREMENTS}
    rate = {n: r["tokens"] / r["seconds"] for n, r in results.items()}
    for name, found in results.items():
        print(f"{name:16} {rate[name]:8.1f} tokens/s, peak memory {found['peak_gib']:.1f} GiB")
    generation = rate["our_generation"] / rate["bare_generation"]
    extraction = rate["our_extraction"] / rate["bare_prefill"]
    print(f"generation / bare vLLM: {generation:.2f} (goal 0.90)")
    print(f"extraction / bare prefill: {extraction:.2f} (goal 0.80)")


if __name__ == "__main__":
    main()
