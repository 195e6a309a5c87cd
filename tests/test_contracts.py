"""Golden digests of the deterministic stages.

They hold no truth of their own; other tests check that. They make a change of
behaviour fail until the stage's number in `CONTRACTS` is raised, because stored
results of the old behaviour would otherwise pass for the new one. After raising
the number, put the printed pair here.
"""

import json

import numpy as np
import pytest
from test_tokens import make_tokenizer, renderer

from scripts import tokens
from scripts.lib import prompts, samples, statistics
from scripts.lib.identity import CONTRACTS, digest, part_key

ROWS = [
    {"prompt": "  What is  a bee?\n"},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
    {"conversations": [{"from": "human", "value": "A"}, {"from": "gpt", "value": "B"},
                       {"from": "human", "value": "C"}]},
    {"prompt": "what is a BEE?"},
    {"other": 1},
]  # fmt: skip
GOLDEN = {
    "prompts": (1, "03e358ce5bea595b"),
    "tokens": (2, "01dfb44e8aea14c5"),
    "vocab": (1, "4b95c44862f89854"),
}
GOLDEN_KEY = "887c36ae7ef3dd68"
GOLDEN_TABLE = "5d8fe09631b98d3f"


def loaded(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return prompts.load([path], seed=7)


def rendered(tmp_path):
    rows, _ = loaded(tmp_path)
    answers = [
        row | {"status": "ok", "content": f"the user says {row['rank']}", "reasoning": "",
               "finish_reason": ("stop", "length")[row["rank"] % 2]}
        for row in rows
    ]  # fmt: skip
    return tokens.render_all(answers, renderer(make_tokenizer()), max_length=40)


def mapped(tmp_path):
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    counter = samples.count_tokens(rendered(tmp_path)[0])
    d2t, t2d = build_vocab_mappings_from_distribution(dict(counter), 12, 600)
    return [d2t.tolist(), t2d.nonzero().flatten().tolist()]


@pytest.mark.parametrize(
    "stage, make", [("prompts", loaded), ("tokens", rendered), ("vocab", mapped)]
)
def test_behaviour_changes_only_with_the_contract(stage, make, tmp_path):
    result = json.loads(json.dumps(make(tmp_path)))
    assert (CONTRACTS[stage], digest(result)) == GOLDEN[stage]


def test_the_way_keys_are_made_is_frozen():
    # Another digest here voids every store there is.
    key = part_key("prompts", {"seed": 1, "b": [1.0, None], "a": "é"}, {"model": "m"})
    assert key == GOLDEN_KEY


def test_tables_estimate_as_before():
    counters = np.array([[10, 30, 6, 4, 2, 0], [4, 12, 1, 1, 0, 0], [7, 21, 9, 5, 3, 1]])
    found = statistics.summarise({("k1", "w1"): counters, ("k2", "w2"): counters[::-1]}, 200, 3)
    text = json.dumps({str(k): v for k, v in found.items()})
    assert digest(json.loads(text, parse_float=lambda v: round(float(v), 9))) == GOLDEN_TABLE
