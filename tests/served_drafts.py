"""Log what vLLM drafts, and draft the same with the training code (run as a program).

    python tests/served_drafts.py SPECULATORS_PART MODEL_PART K PROMPTS.json OUT.json

Writes one row per drafted token: what the server proposed, what the training code's
logits say there, and the gap between their two best tokens. vLLM runs in this process,
so a wrapper around its proposer sees every draft.
"""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts.hidden_states import reference_states, resolve_layer
from scripts.lib import engine, server

RUNTIME = {
    "device": "cpu", "threads": 2, "kv_cache_gib": 1, "max_num_seqs": 1, "enforce_eager": True,
}  # fmt: skip


def serve(model_dir, template, algorithm, checkpoint, k, prompts, max_tokens=48):
    """Return per prompt (prompt ids, output ids, {anchor position: drafted ids})."""
    llm = engine.build(
        model_dir, RUNTIME, max_model_len=512, enable_chunked_prefill=False,
        max_num_batched_tokens=2048,
        speculative_config=server.speculative_config(algorithm, checkpoint, k),
    )  # fmt: skip
    from vllm import SamplingParams
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    log: dict[int, list[int]] = {}
    original = SpecDecodeBaseProposer.propose

    def propose(self, *args, **kwargs):
        # Rejected rows are still in the batch; the anchor follows the last valid one.
        positions, rejected = kwargs["target_positions"], kwargs["num_rejected_tokens_gpu"]
        last = len(positions) - 1 - (int(rejected[0]) if rejected is not None else 0)
        anchor = int(positions[last]) + 1
        drafted = original(self, *args, **kwargs)
        log[anchor] = drafted[0].tolist()
        return drafted

    SpecDecodeBaseProposer.propose = propose
    tokenizer, result = llm.get_tokenizer(), []
    for messages in prompts:
        ids = tokenizer.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=True, return_dict=False
        )
        log.clear()
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
        output = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)[0]
        result.append((ids, list(output.outputs[0].token_ids), dict(log)))
    SpecDecodeBaseProposer.propose = original
    return result


def open_draft(checkpoint: Path, algorithm: str):
    """Return the saved draft in float32, as the training code runs it on a CPU."""
    import speculators.models  # noqa: F401
    from speculators import SpeculatorModel

    cls = SpeculatorModel.registry[algorithm]
    config = cls.config_class.from_pretrained(checkpoint)
    config.transformer_layer_config._attn_implementation = "sdpa"
    return cls.from_pretrained(checkpoint, config=config).float().eval()


def training_logits(model, algorithm, k, ids, anchors, states, last):
    """Return {anchor: logits [k, draft vocabulary]} of the training code's forward pass.

    Args:
        anchors: positions of the last verified token; the draft predicts what follows.
        states, last: [tokens, layers * hidden] and [tokens, hidden] of the verifier.
    """
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.data import shift_batch

    loss = {"loss_config": resolve_loss_config("kl_div", "eager")}
    length = len(ids)
    sample = {
        "hidden_states": states, "input_ids": torch.tensor(ids),
        "verifier_last_hidden_states": last, "loss_mask": torch.ones(length, dtype=torch.bool),
        "lengths": torch.tensor([length]), "position_ids": torch.arange(length),
    }  # fmt: skip
    captured: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _m, _i, output: captured.append(output[0]))
    if algorithm in ("eagle3", "peagle"):
        sample = shift_batch(sample)
    batch = {name: value[None] for name, value in sample.items() if name != "lengths"}
    batch["document_ids"] = torch.zeros_like(batch["input_ids"])
    if algorithm == "eagle3":  # teacher forced: step j + 1 sees the text, not the draft
        model(**batch, ttt_steps=k, ttt_step_loss_decay=1.0, **loss)
        return {a: torch.stack([captured[j][a - 1] for j in range(k)]) for a in anchors}
    if algorithm == "peagle":
        from speculators.models.peagle import core

        rows = torch.tensor([a - 1 for a in anchors])
        every = torch.arange(length - 1)
        rows = rows[rows + k <= length - 1]

        def all_depths(**_):
            anchor = torch.cat([every, *[rows] * (k - 1)])
            depth = [torch.zeros_like(every), *(torch.full_like(rows, d) for d in range(1, k))]
            return anchor, torch.cat(depth)

        core.generate_cod_sample_indices = all_depths
        model(**batch, num_depths=k, **loss)
        start = [0, *(length - 1 + d * len(rows) for d in range(k - 1))]
        return {
            int(row) + 1: torch.stack(
                [captured[0][row], *(captured[0][start[d] + i] for d in range(1, k))]
            )
            for i, row in enumerate(rows)
        }
    pad = model.block_size  # the last block of a row can be no anchor
    padded = {
        n: torch.cat([v, torch.zeros(1, pad, *v.shape[2:], dtype=v.dtype)], 1)
        for n, v in batch.items()
    }
    padded["document_ids"][:, length:] = -1
    padded["position_ids"] = torch.arange(length + pad)[None]
    padded["loss_mask"][:] = False
    padded["loss_mask"][0, anchors] = True
    model._backbone_forward(**padded, max_anchors=len(anchors))
    blocks = captured[0].view(len(anchors), model.block_size, -1)
    first = 0 if model.config.sample_from_anchor else 1
    return {a: blocks[i, first : first + k] for i, a in enumerate(sorted(anchors))}


def compare(model, algorithm, k, ids, prompt, log, states, last) -> list[dict]:
    """Return a row per drafted token that both sides drafted from the same text."""
    anchors = sorted(a for a in log if prompt <= a < len(ids) - k)
    if not anchors:
        return []
    with torch.no_grad():
        logits = training_logits(model, algorithm, k, ids, anchors, states, last)
    rows = []
    for anchor, found in logits.items():
        for position in range(k):
            best, token = found[position].topk(2)
            mine = int(token[0] + model.d2t[token[0]])
            rows.append({
                "anchor": anchor, "position": position + 1, "served": log[anchor][position],
                "trained": mine, "gap": float(best[0] - best[1])})  # fmt: skip
            if algorithm == "eagle3" and log[anchor][position] != ids[anchor + 1 + position]:
                break  # from here on the text and the draft differ
    return rows


def main(part: Path, model_part: Path, k: int, prompts: Path, out: Path) -> None:
    """Serve, draft again, and write the rows."""
    settings = json.loads((part / "manifest.json").read_text())["settings"]
    algorithm, checkpoint = settings["algorithm"], part / "checkpoint"
    model_dir, template, facts = engine.open_model(model_part)
    served = serve(model_dir, template, algorithm, checkpoint, k, json.loads(prompts.read_text()))
    model = open_draft(checkpoint, algorithm)
    layers = [*settings["layers"], resolve_layer(-1, facts["layers"])]
    texts = [ids + output for ids, output, _ in served]
    rows = []
    for (ids, output, log), states in zip(
        served, reference_states(model_dir, layers, texts), strict=True
    ):
        *read, last = (states[layer].float() for layer in layers)
        text = ids + output
        rows += compare(model, algorithm, k, text, len(ids), log, torch.cat(read, -1), last)
    out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]), int(sys.argv[3]), *map(Path, sys.argv[4:6]))
