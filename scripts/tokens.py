#!/usr/bin/env python3
"""Stage tokens: one response shard under the verifier's tokenizer and chat template.

Writes input ids and a loss mask that covers exactly the assistant turns. Rows
that cannot be rendered faithfully are dropped and counted by reason; rows longer
than `max_length` are cut and counted.
"""

import json
import sys
from collections import Counter
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
from scripts.lib import chat, cli, engine, store, tables
from scripts.lib.errors import UserError

DROPPED_STATUS = ("empty", "too_long", "error")


def render_all(rows: list[dict], renderer: chat.Renderer, max_length: int, reasoning="template"):
    """Return (token rows, counts by status) of response rows.

    Args:
        rows: response rows.
        renderer: the verifier's.
        max_length: tokens after which a row is cut.
        reasoning: `template` hands an answer's reasoning to the verifier's template,
            which writes it in its own format; `keep` writes it in front of the answer
            as a teacher of the <think> kind does; `drop` leaves it out.
    """
    result: list[dict] = []
    counts: Counter = Counter()
    for row in rows:
        if row["status"] in DROPPED_STATUS:
            counts[f"dropped: response {row['status']}"] += 1
            continue
        content, thought = row["content"], row["reasoning"]
        if reasoning == "keep" and thought:
            content = f"<think>\n{thought}\n</think>\n\n{content}"
        if reasoning != "template":
            thought = ""
        try:
            rendered = renderer.conversation(
                row["messages"], content, thought, row["finish_reason"] == "stop"
            )
        except chat.RenderError as reason:
            counts[f"dropped: {reason}"] += 1
            continue
        ids, mask = rendered.input_ids[:max_length], rendered.loss_mask[:max_length]
        if not any(mask):
            counts["dropped: prompt fills max_length"] += 1
            continue
        counts["truncated" if len(rendered.input_ids) > max_length else "ok"] += 1
        result.append({
            "prompt_id": row["prompt_id"], "rank": row["rank"], "input_ids": ids,
            "loss_mask": mask})  # fmt: skip
    return result, counts


def main(args) -> None:
    """Make the part `args.out`."""
    inputs = {"model": args.model, "responses": args.responses}
    with store.Part(args.out, "tokens", args.settings, inputs) as part:
        if part.finished:
            return
        from transformers import AutoTokenizer

        model_dir, template, facts = engine.open_model(args.model)
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        config = Path(model_dir) / "generation_config.json"
        eos = json.loads(config.read_text()).get("eos_token_id") if config.exists() else None
        renderer = chat.Renderer(tokenizer, template, chat.end_of_turn_ids(tokenizer, eos))
        rows = tables.read(args.responses, "responses.parquet", "responses", tables.RESPONSES)
        result, counts = render_all(
            rows, renderer, args.settings["max_length"], args.settings["reasoning"]
        )
        lost = {k: v for k, v in counts.items() if k.startswith("dropped")}
        store.check_ceiling("tokens", lost, len(rows), args.max_lost_share)
        if not result:
            raise UserError(f"{args.responses}: no row is left after rendering ({dict(counts)}).")
        if max(max(r["input_ids"]) for r in result) >= facts["vocab_size"]:
            raise UserError(
                f"{model_dir}: the tokenizer gives ids beyond the model's vocabulary of "
                f"{facts['vocab_size']}. Tokenizer and weights do not belong together."
            )
        name = "tokens.parquet"
        tables.write(part.folder / name, result, tables.TOKENS, part.metadata())
        lengths = sorted(len(r["input_ids"]) for r in result)
        total, masked = sum(lengths), sum(sum(r["loss_mask"]) for r in result)
        part.finish([name], counts=dict(counts), facts={
            "rows": len(result), "tokens": total, "supervised_tokens": masked,
            "supervised_share": round(masked / total, 4),
            "length_median": lengths[len(lengths) // 2], "length_max": lengths[-1],
        })  # fmt: skip
    cli.log.info(
        "tokens: %d rows, %d tokens, %.0f %% supervised, %s",
        len(result),
        total,
        100 * masked / total,
        dict(counts),
    )


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="models part of the verifier")
    parser.add_argument("--responses", type=Path, required=True, help="responses part (one shard)")
    parser.add_argument(
        "--settings", type=cli.json_argument, required=True, help="keyed settings (JSON)"
    )
    parser.add_argument("--max-lost-share", type=float, default=0.02)
    parser.add_argument("--out", type=Path, required=True, help="part folder, named after its key")
    cli.run(main, parser.parse_args())
