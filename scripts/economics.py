#!/usr/bin/env python3
"""Last stage, economics: what a study cost, and what its speculators save.

`costs` has one row per stage and group of parts (device-seconds, tokens, bytes, money),
read from the manifests; `economics` one row per measured load of a checkpoint: speed-up
beside its model, break-even acceptance length, GPUs before and after, memory, and when
training has paid for itself.
"""

import json
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
import pyarrow.parquet as pq

from scripts.lib import cli, costs, economics, results, statistics
from scripts.lib.errors import UserError

CHECKPOINT = "checkpoint/"


def read_table(path: Path) -> list[dict]:
    """Return the rows of a table that tables.py wrote.

    Raises:
        UserError: when it is missing or damaged.
    """
    try:
        return pq.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}). Make the tables again.") from error


def memory(part: costs.Part | None) -> dict:
    """Return what a checkpoint takes of an accelerator's memory: weights, KV cache per token.

    Raises:
        UserError: when its config is damaged.
    """
    if part is None or part.manifest is None:
        return {}
    files = part.manifest["files"]
    weights = [f["bytes"] for name, f in files.items() if name.endswith(".safetensors")]
    config = Path(part.folder) / CHECKPOINT / "config.json"
    try:
        per_token = economics.kv_bytes_per_token(json.loads(config.read_text()))
    except FileNotFoundError:
        per_token = None
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{config} is damaged ({error}). Remove the folder {part.folder}; the next run makes "
            "it again."
        ) from error
    return {"checkpoint_bytes": sum(weights) or None, "kv_bytes_per_token": per_token}


def checkpoint_facts(plan: dict, parts: dict[str, costs.Part]) -> dict[tuple, dict]:
    """Return (verifier, algorithm, strategy, epoch) -> training costs and memory as columns."""
    result, lineage = {}, costs.Lineage(plan, parts)
    prices = plan["economics"]["prices"]
    for entry in plan["training"]:
        whole, shared, unknown = lineage.seconds(entry["key"])
        result[tuple(entry[c] for c in economics.GROUP)] = {
            "method": plan["methods"].get(entry["algorithm"]),
            "training_device_seconds": sum(whole.values()),
            "training_money": costs.money(whole, prices),
            "training_money_per_verifier": costs.money(shared, prices),
            "training_unknown_parts": unknown, **memory(parts.get(entry["key"])),
        }  # fmt: skip
    return result


def serving_facts(plan: dict, parts: dict[str, costs.Part]) -> dict[str, dict]:
    """Return key of a latency part -> GPUs of its engine and the price of its device."""
    result = {}
    for entry in plan["latency"]:
        device = (part := parts.get(entry["key"])) and part.device
        result[entry["key"]] = {
            "per_engine": entry.get("tensor_parallel", 1),
            "price_per_hour": costs.price(device, plan["economics"]["prices"]) if device else None,
        }
    return result


def main(args) -> None:
    """Write costs and economics to `args.out`."""
    plan = statistics.read_plan(args.plan, (*statistics.PLAN_FIELDS, "economics", "methods"))
    parts = costs.open_parts(plan)
    latency, acceptance = (
        read_table(args.tables / f"{name}.parquet") for name in ("latency", "acceptance")
    )
    made = {
        "costs": (costs.cost_rows(plan, parts), costs.COLUMNS),
        "economics": (
            economics.rows(
                economics.Measurements(latency, acceptance), checkpoint_facts(plan, parts),
                plan["economics"], serving_facts(plan, parts),
            ),
            economics.COLUMNS,
        ),
    }  # fmt: skip
    for name, (rows, columns) in made.items():
        results.write(rows, columns, args.out / f"{name}.csv", args.out / f"{name}.parquet")
    whole = made["costs"][0][-1]
    told = "unknown" if whole["money"] is None else f"{whole['money']:.2f} {whole['currency']}"
    cli.log.info("economics: %d parts, cost %s", whole["parts"], told)


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.add_argument("--plan", type=Path, required=True, help="parts of the study (JSON)")
    parser.add_argument("--tables", type=Path, required=True, help="folder of the tables")
    parser.add_argument("--out", type=Path, required=True, help="folder for the new tables")
    cli.run(main, parser.parse_args())
