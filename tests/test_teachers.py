"""Teachers of a strategy: mixtures and their stretches, terms of use."""

import random

import pytest
from helpers import edited, make_plan, study

from scripts.lib.config import check
from scripts.lib.errors import UserError
from scripts.lib.labels import study_labels
from scripts.lib.teachers import sources, stretches

MIXED = {
    "strategies.mixed": {
        "mixture": [{"teacher": "self", "share": 0.25}, {"teacher": "other", "share": 0.75}],
        "pools": {"q": 10, "p": 26},
    },
    "study.strategies": ["mixed"],
}


def mixture(*shares):
    """Return a mixture of a teacher per share, named by its place."""
    return {"mixture": [{"teacher": f"t{i}", "share": s} for i, s in enumerate(shares)],
            "pools": {"p": 1}}  # fmt: skip


SHORT = {
    "mixture": [{"teacher": "self", "share": 0.5}, {"teacher": "other", "share": 0.4}],
    "pools": {"p": 1},
}


# -- mixtures ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_stretches_cover_every_rank_once_in_the_given_shares(seed):
    draw = random.Random(seed)
    weights = [draw.random() + 0.01 for _ in range(draw.randint(2, 5))]
    strategy = mixture(*(w / sum(weights) for w in weights))
    strategy["pools"] = {"b": draw.randint(1, 200), "a": draw.randint(1, 200)}
    found = stretches({}, "v", strategy)
    for pool, samples in strategy["pools"].items():
        ranks = [(t, r) for t, p, first, stop in found if p == pool for r in range(first, stop)]
        assert [r for _, r in ranks] == list(range(samples))
        for teacher, share in sources(strategy):
            own = sum(t == teacher for t, _ in ranks)
            assert abs(own - share * samples) <= 1
    assert [p for _, p, _, _ in found] == sorted(p for _, p, _, _ in found)


def test_a_mixture_reads_each_teachers_stretch_of_its_shards(tmp_path):
    plan = make_plan(tmp_path, MIXED)
    node = plan.speculator("small", "a", "mixed", 1)
    rows = [
        (n.names[1:], ranks)
        for n, ranks in zip(node.parents["tokens"], node.settings["ranks"], strict=True)
    ]
    # 0.25 of 26 prompts is 6.5; shards have 10 rows.
    assert rows == [
        (("small", "p", "shard-00000"), [0, 7]), (("other", "p", "shard-00000"), [7, 10]),
        (("other", "p", "shard-00001"), [10, 20]), (("other", "p", "shard-00002"), [20, 26]),
        (("small", "q", "shard-00000"), [0, 3]), (("other", "q", "shard-00000"), [3, 10]),
    ]  # fmt: skip
    # It is validated on the verifier's own responses too.
    assert {n.names[1] for n in node.parents["own_tokens"]} == {"small"}
    assert plan.relation("mixed", "small") == "mixture"


def test_the_table_rows_of_a_mixture_say_who_answered_what(tmp_path):
    (row,) = [
        r for r in study_labels(make_plan(tmp_path, MIXED))["strategies"]
        if r["verifier"] == "small"
    ]  # fmt: skip
    assert (row["relation"], row["teachers"]) == ("mixture", ["small", "other"])
    assert (row["samples"], row["own_samples"]) == (36, 10)
    assert [(e["first"], e["stop"]) for e in row["responses"]] == [
        (0, 7), (7, 26), (7, 26), (7, 26), (0, 3), (3, 10)]  # fmt: skip


def test_a_mixture_of_one_teacher_under_two_names_is_that_teacher(tmp_path):
    both = [{"teacher": "self", "share": 0.3}, {"teacher": "large", "share": 0.7}]
    plan = make_plan(tmp_path, {
        "strategies.twice": {"mixture": both, "pools": {"p": 25}},
        "study.strategies": ["own", "twice"]})  # fmt: skip
    twice, own = (plan.speculator("large", "a", s, 2) for s in ("twice", "own"))
    assert twice is own
    assert plan.relation("twice", "large") == "self"
    assert plan.relation("twice", "small") == "mixture"


def test_an_own_strategy_is_validated_on_its_own_data_alone(tmp_path):
    plan = make_plan(tmp_path)
    assert "own_tokens" not in plan.speculator("small", "a", "own", 1).parents


@pytest.mark.parametrize(
    "strategy, told",
    [
        (SHORT, "shares of strategies.bad.mixture add up to 0.9"),
        (mixture(0.5, 0.5) | {"teacher": "self"}, "either `teacher` or `mixture`"),
        ({"pools": {"p": 1}}, "either `teacher` or `mixture`"),
        (mixture(0.5, 0.5), "unknown teacher 't0'"),
        ({"mixture": [{"teacher": "self", "share": 1}], "pools": {"p": 1}}, "strategies.bad"),
    ],
)
def test_a_wrong_mixture_is_named(tmp_path, strategy, told):
    with pytest.raises(UserError, match=told):
        check(edited(study(tmp_path), {"strategies.bad": strategy}))


# -- terms -------------------------------------------------------------------------


def test_without_consent_the_strategies_that_need_the_model_are_left_out(tmp_path):
    plan = make_plan(tmp_path, {"models.other.terms": "gemma"})
    assert {s for _, _, s in plan.runs} == {"own", "family"}
    (notice,) = plan.notices
    assert notice.startswith("Left out: cross, hybrid, which need other.")
    assert "ai.google.dev/gemma/terms" in notice and "accept_gemma_terms: true" in notice
    assert study_labels(plan)["notices"] == [notice]
    assert not [n for n in plan.all_nodes() if "other" in n.names]


def test_consent_leaves_nothing_out_and_is_in_no_key(tmp_path):
    terms = {"models.other.terms": "gemma", "accept_gemma_terms": True}
    with_terms, without = make_plan(tmp_path, terms), make_plan(tmp_path)
    assert with_terms.notices == []
    assert [n.key for n in with_terms.all_nodes()] == [n.key for n in without.all_nodes()]


def test_terms_cover_what_is_derived_from_a_model(tmp_path):
    changes = {
        "models.large.terms": "gemma",
        "models.small": {"source": "derived", "from": "large", "drop_layers": [1]},
        "study.verifiers": ["small", "other"],
    }
    plan = make_plan(tmp_path, changes)
    assert plan.verifiers == ["other"]
    assert any("small, large" in n or "small" in n for n in plan.notices)


def test_nothing_left_to_do_is_an_error(tmp_path):
    changes = {f"models.{m}.terms": "gemma" for m in ("small", "large")}
    with pytest.raises(UserError, match=r"nothing is left to do\. Left out: own"):
        make_plan(tmp_path, changes)
