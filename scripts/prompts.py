#!/usr/bin/env python3
"""Stages prompts and workloads: prompts of a file, normalised, in hash order.

For a pool it writes one shard: rows [index * size, (index + 1) * size) of the
order by hash(seed, prompt_id), so any number of samples is a prefix. For a
workload it writes the first `prompts` rows.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
from scripts.lib import cli, prompts, store, tables
from scripts.lib.errors import UserError
from scripts.lib.identity import pin_file


def select(rows: list[dict], settings: dict, stage: str, source: str) -> list[dict]:
    """Return the rows of one shard (prompts) or of one workload.

    Raises:
        UserError: when the source has too few rows for the part.
    """
    if stage == "workloads":
        if len(rows) < settings["prompts"]:
            raise UserError(
                f"{source} has {len(rows)} usable prompts, the workload asks for "
                f"{settings['prompts']}. Lower its `prompts`, or add rows."
            )
        return rows[: settings["prompts"]]
    first = settings["index"] * settings["size"]
    chosen = rows[first : first + settings["size"]]
    if not chosen:
        raise UserError(
            f"{source} has {len(rows)} usable prompts, a strategy asks for more than {first}. "
            "Lower the strategy's sample count for this pool, or add prompts."
        )
    return chosen


def main(args) -> None:
    """Make the part `args.out`."""
    with store.Part(args.out, args.stage, args.settings, {}) as part:
        if part.finished:
            return
        pins = [pin_file(path) for path in args.source]
        if pins != args.settings["pins"]:
            raise UserError(
                f"{', '.join(map(str, args.source))} changed while the workflow ran. Run again."
            )
        rows, lost = prompts.load(args.source, args.settings["seed"])
        bad = {k: v for k, v in lost.items() if k != "duplicate"}
        store.check_ceiling("prompts", bad, len(rows) + sum(bad.values()), args.max_lost_share)
        chosen = select(rows, args.settings, args.stage, ", ".join(map(str, args.source)))
        name = "prompts.parquet"
        tables.write(part.folder / name, chosen, tables.PROMPTS, part.metadata())
        part.finish(
            [name],
            counts={"ok": len(chosen), **{f"dropped: {k}": v for k, v in lost.items()}},
            facts={"rows": len(chosen), "source_rows": len(rows)},
        )
    cli.log.info("%s: %d of %d prompts, dropped %s", args.stage, len(chosen), len(rows), dict(lost))


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.add_argument("--stage", choices=["prompts", "workloads"], required=True)
    parser.add_argument(
        "--source", type=Path, nargs="+", required=True, help="JSONL or parquet files"
    )
    parser.add_argument(
        "--settings", type=cli.json_argument, required=True, help="keyed settings (JSON)"
    )
    parser.add_argument("--max-lost-share", type=float, default=0.02)
    parser.add_argument("--out", type=Path, required=True, help="part folder, named after its key")
    cli.run(main, parser.parse_args())
