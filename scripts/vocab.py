#!/usr/bin/env python3
"""Stage vocab: the draft vocabulary of a verifier and its coverage.

Counts the supervised tokens of the named token shards and keeps the most
frequent ones. Ties and unused places go to the lowest token ids.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
from scripts.lib import cli, engine, samples, store
from scripts.lib.errors import UserError
from scripts.lib.paths import Paths


def main(args) -> None:
    """Make the part `args.out`."""
    inputs = {"model": args.model, "tokens": args.tokens}
    with store.Part(args.out, "vocab", args.settings, inputs) as part:
        if part.finished:
            return
        from safetensors.torch import save_file
        from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

        _, _, facts = engine.open_model(args.model)
        size = args.settings["size"]
        if size > facts["vocab_size"]:
            raise UserError(
                f"draft_vocab_size {size} exceeds the verifier's vocabulary of "
                f"{facts['vocab_size']}. Lower it."
            )
        rows = samples.read_tokens(args.tokens, args.settings["ranks"])
        counter = samples.count_tokens(rows)
        if len(counter) < size < facts["vocab_size"]:
            raise UserError(
                f"draft_vocab_size {size} cannot be filled: the {len(rows)} rows of the "
                f"vocabulary's source have {len(counter)} distinct tokens. Lower it, or give "
                "`vocabulary` more samples."
            )
        d2t, t2d = build_vocab_mappings_from_distribution(dict(counter), size, facts["vocab_size"])
        covered = samples.coverage(counter, t2d)
        with store.replacing(part.folder / "vocab.safetensors") as temporary:
            save_file({"d2t": d2t, "t2d": t2d}, str(temporary), metadata=part.metadata())
        part.finish(["vocab.safetensors"], facts={
            "size": size, "distinct_tokens": len(counter), "tokens": counter.total(),
            "coverage": round(covered, 6),
        })  # fmt: skip
    cli.log.info(
        "vocab: %d of %d distinct tokens, coverage %.2f %%",
        min(size, len(counter)),
        len(counter),
        100 * covered,
    )


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="models part of the verifier")
    parser.add_argument("--tokens", action=Paths, nargs="+", required=True, help="tokens parts")
    parser.add_argument(
        "--settings", type=cli.json_argument, required=True, help="keyed settings (JSON)"
    )
    parser.add_argument("--out", type=Path, required=True, help="part folder, named after its key")
    cli.run(main, parser.parse_args())
