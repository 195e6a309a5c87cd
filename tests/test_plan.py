"""The plan: what one edit changes, and what it must leave alone."""

import argparse
import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest
from helpers import edited, make_plan, study

from scripts import links
from scripts.lib.config import check
from scripts.lib.errors import UserError
from scripts.lib.labels import study_labels
from scripts.lib.plan import Plan

CHECKPOINTS = r"^benchmarks/\w+/[ab]\."
OF_OTHER = (
    r"^responses/other/|^(tokens|hidden_states)/\w+/other/|"
    r"^speculators/.*/(cross|hybrid)/|^benchmarks/.*\.(cross|hybrid)\."
)


def parts(plan):
    """Return {stage/name: key} of all parts of a plan."""
    return {f"{row['stage']}/{row['name']}": row["key"] for row in study_labels(plan)["index"]}


def folders(plan):
    return {row["folder"] for row in study_labels(plan)["index"]}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("plan")


@pytest.fixture(scope="module")
def base(root):
    return parts(make_plan(root))


def finish(nodes):
    for node in nodes:
        Path(node.folder).mkdir(parents=True, exist_ok=True)
        Path(node.manifest).write_text("{}")


# -- keys ------------------------------------------------------------------------


def test_keys_and_folders_are_the_same_in_another_process_order_and_layout(root):
    def reordered(value):
        if isinstance(value, dict):
            return {k: reordered(v) for k, v in reversed(value.items())}
        return [reordered(v) for v in value] if isinstance(value, list) else value

    plain = Plan(check(study(root)), root)
    other = Plan(check(json.loads(json.dumps(reordered(study(root))))), root)
    assert folders(other) == folders(plain) and parts(other) == parts(plain)


def test_whole_numbers_written_as_floats_give_the_same_keys(root, base):
    def floats(value):
        if isinstance(value, dict):
            return {k: floats(v) for k, v in value.items()}
        if isinstance(value, list):
            return [floats(v) for v in value]
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value

    assert parts(make_plan(root, {"teachers.small.temperature": 1})) == parts(
        make_plan(root, {"teachers.small.temperature": 1.0})
    )
    assert parts(Plan(check(floats(study(root))), root)) == base


def test_order_of_the_studys_lists_changes_no_folder(root):
    lists = study(root)["study"]
    changes = {f"study.{n}": lists[n][::-1] for n in lists if isinstance(lists[n], list)}
    assert folders(make_plan(root, changes)) == folders(make_plan(root))


def test_names_of_the_catalogue_are_in_no_key(root, base):
    config = study(root)
    config["teachers"]["renamed"] = config["teachers"].pop("other")
    config["strategies"]["cross"]["teacher"] = "renamed"
    config["workloads"]["renamed"] = config["workloads"].pop("w2")
    config["study"]["workloads"] = ["w1", "renamed"]
    assert set(parts(Plan(check(config), root)).values()) == set(base.values())


@pytest.mark.parametrize(
    "changes, changed",
    [
        ({"teachers.other.temperature": 0.9}, OF_OTHER),
        ({"teachers.other.max_tokens": 9}, OF_OTHER),
        ({"models.other.version": "2.0"}, r"^models/other$|" + OF_OTHER),
        ({"models.small.chat_template": "w3.jsonl"}, r"^\w+/small(/|$)"),
        ({"algorithms.a.lr": 0.5}, r"^speculators/\w+/a/|^benchmarks/\w+/a\."),
        # `family` shares its parts with `own` for one verifier, and keeps them.
        ({"strategies.own.schedule_epochs": 3},
         r"^speculators/\w+/[ab]/own/|^benchmarks/\w+/[ab]\.own\."),
        ({"tokens.max_length": 77}, rf"^(tokens|hidden_states|vocab|speculators)/|{CHECKPOINTS}"),
        ({"pools.p.shard_size": 20}, rf"/p/shard-|^(vocab|speculators)/|{CHECKPOINTS}"),
        ({"pools.q.shard_size": 20}, r"/q/shard-|/hybrid/|\.hybrid\."),
        ({"seed": 1}, r"^(?!models/)"),
        ({"workloads.w1.prompts": 10}, r"^workloads/w1$|^benchmarks/.*/w1/"),
        ({"benchmark.k": 2}, CHECKPOINTS),
        ({"benchmark.max_tokens": 9}, r"^benchmarks/.*/acceptance-"),
        ({"benchmark.concurrency": 16}, r"^benchmarks/.*/acceptance-c(16|32)$"),
        ({"benchmark.control_concurrency": 4}, r"^benchmarks/.*/acceptance-c[48]$"),
        ({"benchmark.latency.hardware": "8xH100"}, r"^benchmarks/.*/latency-"),
        ({"benchmark.latency.requests_per_stream": 9}, r"^benchmarks/.*/latency-"),
        ({"validation.share": 0.5}, rf"^speculators/|{CHECKPOINTS}"),
        ({"vocabulary.pools": {"p": 10}}, rf"^(vocab|speculators)/|{CHECKPOINTS}"),
        ({"algorithms.a.draft_vocab_size": 48},
         r"^vocab/\w+/size-(48|64)$|^speculators/\w+/a/|^benchmarks/\w+/a\."),
        ({"strategies.hybrid.start.epoch": 1}, r"/hybrid/|\.hybrid\."),
        ({"runtime.threads": 9, "runtime.kv_cache_gib": 9, "runtime.max_num_seqs": 9}, None),
        ({"hidden_states.check_rows": 9, "max_lost_share": 0.5, "python": "/x/python"}, None),
        ({"benchmark.bootstrap_samples": 9, "benchmark.min_prompts": 9, "study.name": "x"}, None),
        ({"models.small.family": "x"}, None),
    ],
    ids=str,
)  # fmt: skip
def test_one_setting_changes_exactly_the_keys_that_depend_on_it(root, base, changes, changed):
    after = parts(make_plan(root, changes))
    found = {n for n in base.keys() | after.keys() if base.get(n) != after.get(n)}
    expected = {n for n in base.keys() | after.keys() if changed and re.search(changed, n)}
    assert sorted(found) == sorted(expected)
    assert bool(found) == bool(changed)


def test_a_stores_place_is_in_no_key(root, base, tmp_path):
    assert parts(make_plan(root, {"store": str(tmp_path)})) == base


def test_editing_a_pools_file_changes_that_pool_and_what_learns_from_it(tmp_path):
    before = parts(make_plan(tmp_path))
    config = study(tmp_path)
    (tmp_path / "q.jsonl").write_text('{"prompt": "new"}\n' * 30)
    after = parts(Plan(check(config), tmp_path))
    changed = {n for n in before if before[n] != after[n]}
    assert changed == {n for n in before if re.search(r"/q/shard-|/hybrid/|\.hybrid\.", n)}
    assert changed


@pytest.mark.parametrize(
    "changes, added",
    [
        ({"study.epochs": 3}, r"^speculators/.*/epoch-3$|^benchmarks/.*\.epoch-3/"),
        ({"workloads.w3": {"source": "file", "path": "w3.jsonl", "prompts": 20},
          "study.workloads": ["w1", "w2", "w3"]}, r"^workloads/w3$|^benchmarks/.*/w3/"),
        ({"algorithms.c": "set below"},
         r"^hidden_states/.*/layer-005$|^speculators/\w+/c/|^benchmarks/\w+/c\."),
        ({"strategies.again": {"teacher": "other", "pools": {"p": 15}},
          "study.strategies": ["own", "family", "cross", "hybrid", "again"]},
         r"^speculators/.*/again/|^benchmarks/.*\.again\."),
        ({"models.third": {"source": "package", "package": "third", "version": "1"},
          "teachers.third": {"model": "third"}, "study.verifiers": ["small", "large", "third"]},
         r"^(models|tokens|hidden_states|vocab|speculators|benchmarks|responses)/third(/|$)"),
        ({"benchmark.latency.concurrencies": [1, 8]}, r"^benchmarks/.*/w1/latency-c8$"),
    ],
    ids=["epoch", "workload", "layer", "strategy", "verifier", "concurrency"],
)  # fmt: skip
def test_an_addition_adds_exactly_its_own_parts(root, base, changes, added):
    if "algorithms.c" in changes:
        recipe = study(root)["algorithms"]["a"]
        changes = {"algorithms.c": recipe | {"layers": [2, 5]}, "study.algorithms": ["a", "b", "c"]}
    after = parts(make_plan(root, changes))
    assert {n: after.get(n) for n in base} == base
    new = after.keys() - base.keys()
    assert new and [n for n in new if not re.search(added, n)] == []
    assert new == {n for n in after if re.search(added, n)}


def test_more_samples_keep_the_finished_shards(root, base):
    changes = {f"strategies.{s}.pools": {"p": 45} for s in ("own", "family", "cross")}
    after = parts(make_plan(root, changes))
    shards = {n: k for n, k in base.items() if re.match("prompts|resp|tokens|hidden|vocab", n)}
    assert {n: after[n] for n in shards} == shards
    new = {n for n in after.keys() - base.keys()}
    assert new and all(re.search(r"/p/shard-0000[34]", n) for n in new)
    trained = {n for n in base if n.startswith("speculators/")}
    assert trained and all(after[n] != base[n] for n in trained)


@pytest.mark.parametrize("samples, count", [(1, 1), (10, 1), (11, 2), (20, 2), (25, 3)])
def test_number_of_shards(root, samples, count):
    plan = make_plan(root)
    assert len(plan.shards("q", 0, samples)) == count
    shards, ranks = plan.token_ranks("small", {"teacher": "other", "pools": {"q": samples, "p": 5}})
    assert [n.names[2:] for n in shards] == [
        ("p", "shard-00000"), *[("q", f"shard-{i:05d}") for i in range(count)],
    ]  # fmt: skip
    assert ranks[0] == [0, 5]
    assert [r for first, stop in ranks[1:] for r in range(first, stop)] == list(range(samples))
    assert all(r // 10 == i for i, rank in enumerate(ranks[1:]) for r in range(*rank))


# -- structure ---------------------------------------------------------------------


def test_equal_strategies_share_one_part_and_are_both_labelled(root):
    plan = make_plan(root)
    for epoch in (1, 2):
        own = plan.speculator("large", "a", "own", epoch)
        assert plan.speculator("large", "a", "family", epoch) is own
        assert plan.speculator("small", "a", "own", epoch) is not own
        assert plan.speculator("small", "a", "family", epoch).key != own.key
    rows = [
        r
        for r in study_labels(plan)["training"]
        if (r["verifier"], r["algorithm"]) == ("large", "a")
    ]
    folder = {(r["strategy"], r["epoch"]): r["folder"] for r in rows}
    assert folder["own", 2] == folder["family", 2] != folder["cross", 2]
    names = Counter(n.folder for n in plan.nodes("speculators"))
    assert set(names.values()) == {1}
    # 2 algorithms x 2 epochs x (4 strategies of small + 3 different ones of large)
    assert len(names) == 2 * 2 * (4 + 3)


def test_epochs_form_a_chain_that_continues_the_start_with_its_vocabulary(root):
    plan = make_plan(root)
    first, second = (plan.speculator("small", "a", "hybrid", e) for e in (1, 2))
    start = plan.speculator("small", "a", "cross", 2)
    assert first.parents["start"] is start and "previous" not in first.parents
    assert second.parents["previous"] is first and "start" not in second.parents
    assert first.parents["vocab"] is second.parents["vocab"] is start.parents["vocab"]
    assert start.parents["vocab"].names == ("small", "size-64")
    own = plan.speculator("small", "a", "own", 1)
    assert not {"start", "previous"} & own.parents.keys()


def test_strategy_on_foreign_responses_is_also_validated_on_the_verifiers_own(root):
    plan = make_plan(root)
    cross, own = (plan.speculator("small", "a", s, 1) for s in ("cross", "own"))
    assert {t.names[1] for t in cross.parents["tokens"]} == {"other"}
    assert {t.names[1] for t in cross.parents["own_tokens"]} == {"small"}
    assert "own_tokens" not in own.parents
    states = plan.training_states(cross)
    assert {(s.names[1], s.names[-1]) for s in states} == {
        (t, layer) for t in ("small", "other") for layer in ("layer-001", "layer-002", "layer-last")
    }


def test_algorithms_share_the_states_of_common_layers(root):
    plan = make_plan(root)
    a, b = (
        {n.key for n in plan.training_states(plan.speculator("small", x, "own", 1))} for x in "ab"
    )
    # 3 shards; layer 2 and the last are common, 1 and 3 are not.
    assert (len(a), len(b), len(a & b)) == (9, 9, 6)


def test_start_outside_the_study_is_laid_out_with_the_states_it_trains_on(root):
    plan = make_plan(root, {"study.strategies": ["hybrid"]})
    start = plan.speculator("small", "a", "cross", 2)
    planned = {n.key for n in plan.nodes("hidden_states")}
    assert start.key in {n.key for n in plan.nodes("speculators")}
    assert {n.key for n in plan.training_states(start)} <= planned


@pytest.mark.parametrize("teachers", [{}, {"again": {"model": "small", "temperature": 1}}])
def test_self_needs_exactly_one_teacher_entry_of_the_verifier(root, teachers):
    config = study(root)
    config["teachers"] |= teachers
    if not teachers:
        del config["teachers"]["small"]
    with pytest.raises(UserError, match="exactly one entry"):
        Plan(check(config), root).targets()


def test_local_model_is_pinned_by_its_content(root, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    change = {"models.other": {"source": "local", "path": str(tmp_path / "m")}}
    before = parts(make_plan(root, change))
    assert parts(make_plan(root, change)) == before
    (tmp_path / "m" / "config.json").write_text("[]")
    assert parts(make_plan(root, change))["models/other"] != before["models/other"]


def test_a_nodes_folder_is_its_stage_names_and_key(root):
    for node in make_plan(root).nodes("responses"):
        assert Path(node.folder).name == node.key
        assert node.folder == f"{root}/store/responses/{node.name}/{node.key}"
        assert json.loads(node.settings_json) == node.settings


def test_unknown_key_is_a_user_error(root):
    plan = make_plan(root)
    node = plan.nodes("tokens")[0]
    assert plan.get("tokens", node.key) is node
    with pytest.raises(UserError, match="0000"):
        plan.get("tokens", "0" * 16)


# -- batches -----------------------------------------------------------------------


def test_batch_holds_only_the_missing_parts_and_none_when_all_exist(tmp_path):
    plan = make_plan(tmp_path)
    nodes = plan.states(plan.tokens("small", "other", "p", 0), "a")
    assert plan.batch(nodes).missing == tuple(nodes)
    finish(nodes[:1])
    batch = plan.batch(nodes)
    assert batch.missing == tuple(nodes[1:])
    assert batch.manifest.startswith(f"{tmp_path}/store/hidden_states/small/other/p/shard-00000/")
    finish(nodes)
    assert plan.batch(nodes) is None


def test_batch_gets_a_fresh_name_when_its_manifest_outlived_its_parts(tmp_path):
    plan = make_plan(tmp_path)
    nodes = [n for _, n in plan.benchmark_parts("small", ("a", "own", 1))]
    names = []
    for _ in range(3):
        path = Path(plan.batch(nodes).manifest)
        assert path == Path(plan.batch(nodes).manifest) and not path.exists()
        path.parent.mkdir(parents=True)
        path.write_text("{}")
        names.append(path)
    assert len(set(names)) == 3


def test_parts_of_one_server_are_one_batch_and_of_two_servers_two(root):
    plan = make_plan(root)
    folder = {}
    for server in plan.servers():
        found = {plan.batch_folder(n) for _, n in plan.benchmark_parts(*server)}
        assert len(found) == 1
        folder[server] = found.pop()
    alias = folder.pop(("large", ("a", "own", 1)))
    assert alias == folder[("large", ("a", "family", 1))]
    assert alias not in {f for s, f in folder.items() if s[1] != ("a", "family", 1)}
    for path in set(folder.values()):
        made = plan.batch_parts("benchmarks", path)
        assert made and {plan.batch_folder(n) for n in made} == {path}


def test_inputs_name_finished_parts_and_one_batch_per_folder_for_the_rest(tmp_path):
    states = make_plan(tmp_path).training_states(
        make_plan(tmp_path).speculator("small", "a", "own", 1)
    )
    finish(states[:2])  # two of three layers of the first shard
    found = make_plan(tmp_path).inputs(states)
    batches = [f for f in found if "/batch-" in f]
    assert sorted(set(found) - set(batches)) == sorted(n.manifest for n in states[:2])
    assert len(batches) == 3  # three shards
    plan = make_plan(tmp_path)
    # The job of a shard also makes the layer that only the other algorithm needs.
    (batch,) = (b for b in batches if "shard-00000" in b)
    folder = str(Path(batch).parents[1])
    missing = plan.batch(plan.batch_parts("hidden_states", folder)).missing
    assert {n.names[-1] for n in missing} == {"layer-last", "layer-003"}
    assert batch == plan.batch(plan.batch_parts("hidden_states", folder)).manifest


def test_no_inputs_are_left_to_make_when_everything_exists(tmp_path):
    plan = make_plan(tmp_path)
    finish(plan.targets())
    assert make_plan(tmp_path).inputs(plan.targets()) == sorted(
        {n.manifest for n in plan.targets()}
    )


# -- labels ------------------------------------------------------------------------


def test_labels_name_every_combination_and_agree_with_the_plan(root):
    plan = make_plan(root)
    labels = json.loads(json.dumps(study_labels(plan)))
    index = {row["folder"]: row for row in labels["index"]}
    names = [(row["stage"], row["name"]) for row in labels["index"]]
    assert len(set(names)) == len(names)
    for row in labels["index"]:
        # An alias has a row of its own that leads to the same part.
        assert row["folder"].startswith(f"{root}/store/{row['stage']}/")
        assert row["folder"].endswith(f"/{row['key']}")
    for table, stage in (
        ("acceptance", "benchmarks"), ("latency", "benchmarks"), ("training", "speculators"),
        ("pools", "prompts"), ("workloads", "workloads"),
    ):  # fmt: skip
        assert labels[table]
        for row in labels[table]:
            assert index[row["folder"]]["stage"] == stage
            assert row.get("key", index[row["folder"]]["key"]) == index[row["folder"]]["key"]
    combinations = [
        (v, a, s, e) for v in ("small", "large") for a in "ab"
        for s in ("own", "family", "cross", "hybrid") for e in (1, 2)
    ]  # fmt: skip
    names = ("verifier", "algorithm", "strategy", "epoch")
    assert sorted(tuple(r[n] for n in names) for r in labels["training"]) == sorted(combinations)
    measured = Counter(
        (r["role"], *(r[n] for n in names), r["workload"]) for r in labels["acceptance"]
    )
    expected = [("checkpoint", *c, w) for c in combinations for w in ("w1", "w2")]
    expected += [
        (role, v, None, None, None, w) for role in ("baseline", "control")
        for v in ("small", "large") for w in ("w1", "w2")
    ]  # fmt: skip
    assert measured == Counter(expected)
    timed = {(*(r[n] for n in names), r["workload"], r["concurrency"]) for r in labels["latency"]}
    assert timed == {(*c, "w1", 1) for c in combinations if c[3] == 2} | {
        (v, None, None, None, "w1", 1) for v in ("small", "large")
    }
    for row in labels["acceptance"] + labels["latency"]:
        assert row["k"] == (3 if row["algorithm"] else 0)
        assert f"/{row['workload']}/" in row["folder"]


def test_workloads_of_equal_content_keep_their_own_labels(root):
    plan = make_plan(root, {"workloads.w2.path": "w1.jsonl"})
    rows = [r for r in study_labels(plan)["acceptance"] if r["role"] == "baseline"]
    assert Counter(r["workload"] for r in rows) == {"w1": 2, "w2": 2}
    assert len({r["key"] for r in rows}) == 2


def test_pools_of_equal_content_are_refused(root):
    (root / "copy.jsonl").write_bytes((root / "p.jsonl").read_bytes())
    pool = {"source": "file", "path": "copy.jsonl", "shard_size": 10}
    with pytest.raises(UserError, match="pools p and copy have the same content"):
        make_plan(root, {"pools.copy": pool, "strategies.cross.pools": {"copy": 25}})


def test_links_lead_to_the_finished_parts_and_follow_the_configuration(tmp_path):
    def refresh(changes=None):
        plan = make_plan(tmp_path, changes)
        finish(plan.nodes("speculators") + plan.nodes("models"))
        (tmp_path / "plan.json").write_text(json.dumps(study_labels(plan)))
        args = argparse.Namespace(plan=tmp_path / "plan.json", out=tmp_path / "current")
        (tmp_path / "current").mkdir(exist_ok=True)
        links.main(args)
        return plan

    path = tmp_path / "current/speculators/small/a/own/epoch-2"
    for changes in ({}, {}, {"algorithms.a.lr": 0.5}):
        plan = refresh(changes)
        assert path.resolve() == Path(plan.speculator("small", "a", "own", 2).folder)
        assert not os.path.isabs(os.readlink(path))
    assert not (tmp_path / "current/tokens").exists()  # not finished
    refresh({"study.epochs": 1, "study.strategies": ["own"], "benchmark.latency.epochs": []})
    assert not path.is_symlink()
    assert (tmp_path / "current/speculators/small/a/own/epoch-1").is_symlink()


def test_an_alias_is_linked_under_both_of_its_names(root):
    index = study_labels(make_plan(root))["index"]
    folder = {r["name"]: r["folder"] for r in index if r["stage"] == "speculators"}
    assert folder["large/a/own/epoch-2"] == folder.get("large/a/family/epoch-2")


def test_the_argument_is_not_changed_by_planning(root):
    config = check(edited(study(root), {}))
    before = json.dumps(config)
    study_labels(Plan(config, root))
    assert json.dumps(config) == before


# -- families, derived models, runs -------------------------------------------------

FAMILIES = {
    "models.small.family": "f", "models.large.family": "f", "models.other.family": "g",
    "families": {"f": {"teacher": "large", "cross_teacher": "other"}},
}  # fmt: skip


def test_roles_of_teachers_give_the_parts_that_their_names_give(root, base):
    changes = FAMILIES | {
        "strategies.family.teacher": "same_family", "strategies.cross.teacher": "cross_family",
    }  # fmt: skip
    plan = make_plan(root, changes)
    assert parts(plan) == base
    assert [plan.relation(s, "small") for s in ("own", "family", "cross", "hybrid")] == [
        "self", "same_family", "cross_family", "self",
    ]  # fmt: skip
    assert plan.relation("family", "large") == "self"


def test_one_generation_of_the_families_teacher_serves_all_its_verifiers(root):
    rows = study_labels(make_plan(root, FAMILIES))["strategies"]
    found = {(r["verifier"], r["strategy"]): r for r in rows}
    small, large = found["small", "family"]["responses"], found["large", "family"]["responses"]
    assert small == large and len(small) == 3
    assert {e["verifiers"] for e in small} == {2}
    assert found["small", "hybrid"]["own_samples"] == 10
    assert found["small", "family"]["own_samples"] == 0


def test_a_derived_model_follows_its_base(root):
    changes = {"models.small": {"source": "derived", "from": "large", "drop_layers": [3, 1]}}
    plan = make_plan(root, changes)
    node = plan.model("small")
    assert node.settings["drop_layers"] == [1, 3]
    assert node.parents["base"] is plan.model("large")
    other = make_plan(root, changes | {"models.large.version": "2.0"}).model("small")
    assert other.key != node.key
    assert study_labels(plan)["training"][0]["model"] == "large 1.0 without layers 1, 3"


def test_runs_train_and_benchmark_only_what_they_name(root):
    changes = {
        "study.runs": [
            {"algorithms": ["a"], "strategies": ["own"], "epochs": 3},
            {"algorithms": ["a"], "strategies": ["cross"], "benchmark_epochs": "last"},
            {"algorithms": ["b"], "strategies": ["own"], "verifiers": ["small"], "epochs": 1},
        ]
    }
    plan = make_plan(root, changes | {"benchmark.latency.epochs": None})
    small = {c for v, c in plan.checkpoints() if v == "small"}
    assert small == {
        ("a", "own", 1), ("a", "own", 2), ("a", "own", 3), ("a", "cross", 2), ("b", "own", 1),
    }  # fmt: skip
    assert {c for v, c in plan.checkpoints() if v == "large"} == small - {("b", "own", 1)}
    assert {c for v, c in plan.trained() if v == "small"} == small | {("a", "cross", 1)}
    entries = study_labels(plan)["training"]
    unmeasured = [(r["strategy"], r["epoch"]) for r in entries if not r["benchmarked"]]
    assert set(unmeasured) == {("cross", 1)}
    # Without named epochs, latency is measured for the last epoch of each run.
    latency = {(r["algorithm"], r["strategy"], r["epoch"]) for r in study_labels(plan)["latency"]}
    assert latency == {
        (None, None, None), ("a", "own", 3), ("a", "cross", 2), ("b", "own", 1),
    }  # fmt: skip


def test_a_chain_lists_everything_that_leads_to_a_checkpoint(root):
    plan = make_plan(root)
    (entry,) = [
        r for r in study_labels(plan)["training"]
        if (r["verifier"], r["algorithm"], r["strategy"], r["epoch"]) == ("small", "a", "hybrid", 2)
    ]  # fmt: skip
    chain = [("cross", 1), ("cross", 2), ("hybrid", 1), ("hybrid", 2)]
    assert entry["chain"] == [plan.speculator("small", "a", *step).key for step in chain]


def test_the_reasoning_policy_is_the_strategys(root, base):
    after = parts(make_plan(root, {"strategies.cross.reasoning": "drop"}))
    changed = {n for n in base if base[n] != after.get(n)}
    expected = r"^(tokens|hidden_states)/\w+/other/|/(cross|hybrid)/|\.(cross|hybrid)\."
    assert changed == {n for n in base if re.search(expected, n)} and changed
