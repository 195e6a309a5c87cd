#!/usr/bin/env python3
"""Stage hidden_states: a verifier's states of one token shard, one part per layer.

vLLM prefills each row and hands out the residual stream after the asked layers
(id k = after k decoder layers, 0 = embeddings, -1 = after the last layer, before
the final norm). Parts that exist are left alone. A sample of rows is recomputed
with transformers and must agree. `--batch` is written when all parts exist.
"""

import fcntl
import random
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])
from scripts.lib import cli, engine, shards, store, tables
from scripts.lib.errors import UserError

IN_FLIGHT = 64
# Two bfloat16 forward passes differ by about 2 % at the last layer of a small
# model; the nearest wrong layer is more than 20 % away.
TOLERANCE = 0.04


def resolve_layer(layer: int, count: int) -> int:
    """Turn a configured layer id into the id k = number of decoder layers passed.

    Raises:
        UserError: when the model has no such layer.
    """
    if not -1 <= layer <= count:
        raise UserError(
            f"layer {layer} is asked for, the verifier has {count} layers (ids 0 to {count}). "
            "Mend `layers` of the algorithm."
        )
    return count if layer == -1 else layer


def read_if_written(path: Path) -> dict | None:
    """Read and remove a file of the engine's connector, or return None while it writes.

    The connector holds an exclusive lock on `<path>.lock` until the file is whole.
    """
    from safetensors.torch import load_file

    lock = path.with_name(path.name + ".lock")
    try:
        with open(lock) as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            data = load_file(path)
    except (BlockingIOError, FileNotFoundError):
        return None
    path.unlink()
    lock.unlink()
    return data


def extract(rows, writers, layer_ids, model_dir, hidden, runtime, work: Path) -> dict:
    """Write the states of every row that some writer lacks; return rate facts.

    Args:
        rows: token rows.
        writers: one ShardWriter per layer id, in the order of `layer_ids`.
        work: folder for the engine's per-row files; emptied as they are packed.
    """
    from vllm import SamplingParams

    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    todo = [i for i in range(len(rows)) if not all(w.done[i] for w in writers)]
    if not todo:
        return {}
    if len(todo) < len(rows):
        cli.log.info("resuming: %d of %d rows are there", len(rows) - len(todo), len(rows))
    longest = max(len(rows[i]["input_ids"]) for i in todo)
    # The last layer has two names: its number, and -1.
    asked = sorted(set(layer_ids))
    connector: dict[str, Any] = {
        "kv_role": "kv_producer",
        "kv_connector": "ExampleHiddenStatesConnector",
    }
    if runtime["device"] == "cpu":
        connector["kv_connector"] = "CpuHiddenStatesConnector"
        connector["kv_connector_module_path"] = "scripts.lib.cpu_connector"
    connector["kv_connector_extra_config"] = {"shared_storage_path": str(work.resolve())}
    llm = engine.build(
        model_dir, runtime, max_model_len=longest + 8, kv_transfer_config=connector,
        speculative_config={
            "method": "extract_hidden_states", "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": asked}},
        },
    )  # fmt: skip

    sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    total = sum(len(rows[i]["input_ids"]) for i in todo)
    progress = cli.Progress("hidden states", total, "tokens")
    waiting, started = list(reversed(todo)), time.monotonic()
    arriving: dict[int, Path] = {}  # row -> file that the connector writes

    def submit():
        row = waiting.pop()
        prompt = {"prompt_token_ids": rows[row]["input_ids"]}
        llm.llm_engine.add_request(str(row), prompt, sampling)

    def pack():
        for row, path in list(arriving.items()):
            data = read_if_written(path)
            if data is None:
                continue
            if data["token_ids"].tolist() != rows[row]["input_ids"]:
                raise UserError(f"row {row}: the engine returned states of other tokens.")
            for layer, writer in zip(layer_ids, writers, strict=True):
                writer.write(row, data["hidden_states"][:, asked.index(layer), :hidden])
            del arriving[row]
            progress.add(len(rows[row]["input_ids"]))
            if waiting:
                submit()

    for _ in range(min(IN_FLIGHT, len(waiting))):
        submit()
    # A request's states are written during the step after its last one.
    while waiting or arriving or llm.llm_engine.has_unfinished_requests():
        for output in engine.step_until_done(llm):
            path = Path(output.kv_transfer_params["hidden_states_path"])
            arriving[int(output.request_id.split("-")[0])] = path
            pack()
        llm.llm_engine.step()
        pack()
        if time.monotonic() - progress.last > engine.STALL_SECONDS:
            raise UserError(f"the engine wrote no states for {engine.STALL_SECONDS} s. Run again.")
    return {"tokens": total, "extract_seconds": round(time.monotonic() - started, 3)}


def reference_states(model_dir: str, layer_ids: list[int], sequences: list[list[int]]):
    """Recompute states with transformers; yield {layer id: [tokens, hidden]} per sequence."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    count = model.config.get_text_config().num_hidden_layers
    layers = next(
        m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count
    )
    found: dict[int, torch.Tensor] = {}

    def keep(layer):
        def hook(_module, _inputs, output):
            found[layer] = (output[0] if isinstance(output, tuple) else output)[0]

        return hook

    for layer in layer_ids:
        module = model.get_input_embeddings() if layer == 0 else layers[layer - 1]
        module.register_forward_hook(keep(layer))
    for ids in sequences:
        found.clear()
        with torch.no_grad():
            model(torch.tensor([ids]))
        yield {k: v.reshape(len(ids), -1) for k, v in found.items()}


def relative_error(found, expected) -> float:
    """Return ||found - expected|| / ||expected|| over all positions but the first.

    The first position is an attention sink with outlier values that hide the rest.
    """
    found, expected = found[1:].float(), expected[1:].float()
    return float((found - expected).norm() / expected.norm())


def verify(rows, folders: dict[int, Path], model_dir: str, count: int, seed: int = 0) -> dict:
    """Compare a sample of written rows with transformers; return the worst error per layer.

    Raises:
        UserError: when a layer is off by more than `TOLERANCE`.
    """
    from safetensors import safe_open

    candidates = [i for i, row in enumerate(rows) if len(row["input_ids"]) > 2]
    chosen = random.Random(seed).sample(candidates, min(count, len(candidates)))
    files = {k: safe_open(str(f / shards.FILE), framework="pt") for k, f in folders.items()}
    worst = dict.fromkeys(folders, 0.0)
    sequences = [rows[i]["input_ids"] for i in chosen]
    for row, states in zip(
        chosen, reference_states(model_dir, list(folders), sequences), strict=True
    ):
        for layer, file in files.items():
            first, last = file.get_tensor("offsets")[row : row + 2].tolist()
            error = relative_error(file.get_slice("states")[first:last], states[layer])
            worst[layer] = max(worst[layer], error)
    for layer, error in worst.items():
        if error > TOLERANCE:
            raise UserError(
                f"hidden states of layer {layer} differ from transformers by {error:.1%} "
                f"(tolerance {TOLERANCE:.0%}). Engine and model directory do not agree; check "
                "the vLLM version and the model's dtype."
            )
    return worst


def main(args) -> None:
    """Make the missing parts of `args.parts` and the batch manifest."""
    inputs = {"model": args.model, "tokens": args.tokens}
    model_dir, _, facts = engine.open_model(args.model)
    rows = tables.read(args.tokens, "tokens.parquet", "tokens", tables.TOKENS)
    ids, lengths = [r["prompt_id"] for r in rows], [len(r["input_ids"]) for r in rows]
    with ExitStack() as stack:
        parts = []
        for spec in args.parts:
            part = store.Part(spec["out"], "hidden_states", spec["settings"], inputs)
            if not part.finished:
                parts.append(stack.enter_context(part))
        layers = [resolve_layer(p.settings["layer"], facts["layers"]) for p in parts]
        if parts:
            title = store.title_of(args.batch.parent.parent, "hidden_states")
            cli.log.info("hidden states of %s, layers %s", title, layers)
            writers = [
                shards.ShardWriter(
                    p.folder / shards.FILE, ids, lengths, facts["hidden_size"],
                    p.metadata() | {"layer": str(k)},
                )
                for p, k in zip(parts, layers, strict=True)
            ]  # fmt: skip
            work = parts[0].work / "engine"
            try:
                rates = extract(
                    rows, writers, layers, model_dir, facts["hidden_size"], args.runtime, work
                )
            except BaseException:
                for writer in writers:
                    writer.suspend()
                raise
            for writer in writers:
                writer.close()
            folders = {k: p.folder for k, p in zip(layers, parts, strict=True)}
            errors = verify(rows, folders, model_dir, args.check_rows) if args.check_rows else {}
            for part, layer in zip(parts, layers, strict=True):
                part.finish(
                    [shards.FILE], counts={"ok": len(rows)},
                    facts={"layer": layer, "rows": len(rows), "total_tokens": sum(lengths),
                           "checked_rows": args.check_rows,
                           "relative_error": round(errors.get(layer, 0.0), 5), **rates},
                    device=engine.device_facts(args.runtime),
                )  # fmt: skip
                shutil.rmtree(part.folder / "work", ignore_errors=True)
            shown = ", ".join(f"{k}: {e:.4f}" for k, e in errors.items()) or "not checked"
            cli.log.info("hidden states of layers %s; relative error %s", layers, shown)
    store.write_json(
        args.batch, {"stage": "hidden_states", "parts": [Path(s["out"]).name for s in args.parts]}
    )


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="models part of the verifier")
    parser.add_argument("--tokens", type=Path, required=True, help="tokens part (one shard)")
    parser.add_argument(
        "--parts", type=cli.json_argument, required=True,
        help='parts to make (JSON): [{"out": folder, "settings": {"layer": k, "dtype": ...}}]',
    )  # fmt: skip
    parser.add_argument(
        "--runtime", type=cli.json_argument, required=True, help="engine settings (JSON)"
    )
    parser.add_argument(
        "--check-rows", type=int, default=4, help="rows to recompute with transformers"
    )
    parser.add_argument(
        "--batch", type=Path, required=True, help="batch manifest to write at the end"
    )
    cli.run(main, parser.parse_args())
