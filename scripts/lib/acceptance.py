"""Acceptance measured per request, through vLLM's per-request speculative metrics.

acceptance length = 1 + accepted / drafts (bonus token included), acceptance
rate = accepted / drafted, position rate i = drafts whose token i was accepted /
drafts. The identity "sum of position rates = acceptance length - 1" is checked.
"""

import asyncio
import time

import pyarrow as pa

from scripts.lib import cli
from scripts.lib.errors import UserError
from scripts.lib.server import MODEL_NAME, Server

REQUESTS = pa.schema([
    ("prompt_id", pa.string()), ("status", pa.string()), ("error", pa.string()),
    ("finish_reason", pa.string()), ("prompt_tokens", pa.int32()),
    ("output_ids", pa.list_(pa.int32())), ("drafts", pa.int32()), ("drafted", pa.int32()),
    ("accepted", pa.int32()), ("accepted_per_position", pa.list_(pa.int32())),
    ("seconds", pa.float64()),
])  # fmt: skip


def per_position(steps: list[int], k: int) -> list[int]:
    """Return, for each position 1..k, how many steps accepted at least that many tokens."""
    return [sum(accepted > position for accepted in steps) for position in range(k)]


def request_row(prompt: dict, reply, k: int, seconds: float) -> dict:
    """Turn one chat completion into a row of `REQUESTS`.

    Raises:
        UserError: when the server reports inconsistent counts.
    """
    choice, usage = reply.choices[0], reply.usage
    extra = choice.model_extra or {}
    row = {
        "prompt_id": prompt["prompt_id"], "status": "ok", "error": None,
        "finish_reason": choice.finish_reason, "prompt_tokens": usage.prompt_tokens,
        "output_ids": extra.get("token_ids"), "drafts": 0, "drafted": 0, "accepted": 0,
        "accepted_per_position": [0] * k, "seconds": seconds,
    }  # fmt: skip
    if row["output_ids"] is None:
        raise UserError("the server returned no token ids. This vLLM lacks return_token_ids.")
    if k == 0:
        return row
    metrics = ((reply.model_extra or {}).get("metrics") or {}).get("speculative_decoding")
    if metrics is None:
        # A first token that ends the answer leaves no draft to count.
        if len(row["output_ids"]) > 1:
            raise UserError("the server returned no per-request speculative metrics.")
        return row
    steps = metrics["per_step_accepted"]
    row |= {
        "drafts": metrics["num_spec_steps"], "drafted": metrics["num_draft_tokens"],
        "accepted": metrics["num_accepted_draft_tokens"],
        "accepted_per_position": per_position(steps, k),
    }  # fmt: skip
    if sum(row["accepted_per_position"]) != row["accepted"] or len(steps) != row["drafts"]:
        raise UserError(
            f"prompt {prompt['prompt_id']}: counts by step and totals differ ({metrics})."
        )
    return row


async def _ask_all(server: Server, prompts: list[dict], settings: dict, runtime: dict):
    from openai import AsyncOpenAI, OpenAIError

    client = AsyncOpenAI(
        base_url=server.url + "/v1", api_key=server.key, timeout=runtime["request_seconds"],
        max_retries=0,
    )  # fmt: skip
    gate = asyncio.Semaphore(settings["concurrency"])
    progress = cli.Progress("requests", len(prompts), "prompts")

    async def ask(prompt: dict) -> dict:
        async with gate:
            started = time.monotonic()
            try:
                reply = await client.chat.completions.create(
                    model=MODEL_NAME, messages=prompt["messages"], n=1,
                    temperature=settings["temperature"], max_tokens=settings["max_tokens"],
                    extra_body={"return_token_ids": True},
                )  # fmt: skip
                row = request_row(prompt, reply, settings["k"], time.monotonic() - started)
            except OpenAIError as error:
                server.check_alive()
                row = {
                    "prompt_id": prompt["prompt_id"], "status": "error",
                    "error": f"{type(error).__name__}: {error}"[:500],
                    "seconds": time.monotonic() - started,
                }  # fmt: skip
            progress.add()
            return row

    async with client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(prompt)) for prompt in prompts]
    return [task.result() for task in tasks]


def measure(server: Server, prompts: list[dict], settings: dict, runtime: dict) -> list[dict]:
    """Ask all prompts; return one row per prompt, in order, after the cross-checks.

    Raises:
        UserError: when the server ended, or its own counters do not match the sum
            of the requests (another client, or lost counts).
    """
    before = server.counters()
    try:
        rows = asyncio.run(_ask_all(server, prompts, settings, runtime))
    except* UserError as group:
        raise group.exceptions[0] from None
    after = server.counters()
    if settings["k"]:
        check_against_server(rows, after - before, settings["k"])
    return rows


def check_against_server(rows: list[dict], counted, k: int) -> None:
    """Compare the requests' sums with the server's counters.

    Raises:
        UserError: when they differ, or an identity is violated.
    """
    if any(row["status"] != "ok" for row in rows):
        return  # aborted requests were counted by the server alone
    for name in ("drafts", "drafted", "accepted"):
        own = sum(row[name] for row in rows)
        if own != counted[name]:
            raise UserError(
                f"the requests add up to {own} {name}, the server counted {counted[name]}. "
                "Another client used the server, or counts were lost; run again."
            )
    positions = [sum(row["accepted_per_position"][i] for row in rows) for i in range(k)]
    found = [counted[f"accepted_{i}"] for i in range(k)]
    if positions != found:
        raise UserError(f"accepted per position: requests {positions}, server {found}.")
    drafts = counted["drafts"]
    if drafts:
        length = 1 + counted["accepted"] / drafts
        if abs(sum(positions) / drafts - (length - 1)) > 1e-9 or length > k + 1:
            raise UserError(f"counters contradict each other: {dict(counted)}.")
