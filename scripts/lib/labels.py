"""Labels: what tables and links need to know about a plan, as one JSON-ready value."""

from typing import Any

from scripts.lib.nodes import Node
from scripts.lib.plan import Plan
from scripts.lib.teachers import stretches, with_starts


def study_labels(plan: Plan) -> dict:
    """Return every part of a plan's study with its labels."""
    config, bench = plan.config, plan.config["benchmark"]
    acceptance: list[dict] = []
    latency: list[dict] = []
    for verifier, checkpoint in plan.servers():
        names = _checkpoint_labels(plan, verifier, checkpoint)
        for workload, node in plan.benchmark_parts(verifier, checkpoint):
            row = names | node.settings | {
                "workload": workload, "folder": node.folder, "key": node.key}  # fmt: skip
            if node.settings["kind"] == "latency":
                latency.append(row)
                continue
            same = node.settings["concurrency"] == bench["concurrency"]
            row["role"] = "checkpoint" if checkpoint else "baseline" if same else "control"
            acceptance.append(row)
    pools = sorted({(n.names[0], n.folder) for n in plan.nodes("prompts")})
    workloads = dict.fromkeys(config["study"]["workloads"] + bench["latency"]["workloads"])
    return {
        "study": config["study"]["name"], "seed": config["seed"],
        "bench": {k: bench[k] for k in ("bootstrap_samples", "min_prompts", "overlap_ngram")},
        "acceptance": acceptance, "latency": latency, "training": _training_rows(plan),
        "strategies": _strategy_rows(plan), "notices": plan.notices,
        "economics": config["economics"],
        "methods": {name: recipe["algorithm"] for name, recipe in config["algorithms"].items()},
        "pools": [{"pool": p, "folder": f} for p, f in pools],
        "workloads": [{"workload": w, "folder": plan.workload(w).folder} for w in workloads],
        "index": [
            {"stage": n.stage, "name": "/".join(names), "key": n.key, "folder": n.folder}
            for n in plan.all_nodes()
            for names in n.aliases
        ],
    }  # fmt: skip


def _checkpoint_labels(plan: Plan, verifier: str, checkpoint) -> dict:
    algorithm, strategy, epoch = checkpoint or (None, None, None)
    spec = plan.config["strategies"].get(strategy)
    return {
        "verifier": verifier, "model": model_text(plan, verifier), "algorithm": algorithm,
        "strategy": strategy, "epoch": epoch, "schedule_epochs": spec and spec["schedule_epochs"],
    }  # fmt: skip


def _training_rows(plan: Plan) -> list[dict]:
    """Return every checkpoint with the keys of all epochs that led to it (`chain`)."""
    measured, rows = set(plan.checkpoints()), []
    for verifier, checkpoint in plan.trained():
        node = plan.speculator(verifier, *checkpoint)
        chain: list[str] = []
        step: Node | None = node
        while step:
            chain.insert(0, step.key)
            step = step.parents.get("previous") or step.parents.get("start")
        rows.append(_checkpoint_labels(plan, verifier, checkpoint) | {
            "folder": node.folder, "key": node.key, "chain": chain,
            "benchmarked": (verifier, checkpoint) in measured})  # fmt: skip
    return rows


def _strategy_rows(plan: Plan) -> list[dict]:
    """Return whose responses each strategy (starts included) learns from, per verifier."""
    strategies = plan.config["strategies"]
    used = [(v, n) for v, _, s in plan.runs for n in with_starts(strategies, s)]
    rows: list[dict[str, Any]] = []
    sharing: dict[str, set[str]] = {}  # key of a responses part -> verifiers that use it
    for verifier, name in dict.fromkeys(used):
        spec, parts, own = strategies[name], [], 0
        found = stretches(plan.config, verifier, spec)
        for teacher, pool, first, stop in found:
            if plan.config["teachers"][teacher]["model"] == verifier:
                own += stop - first
            for index in plan.shards(pool, first, stop):
                part = plan.responses(teacher, pool, index)
                sharing.setdefault(part.key, set()).add(verifier)
                parts.append({
                    "folder": part.folder, "key": part.key, "first": first, "stop": stop
                })  # fmt: skip
        rows.append({
            "verifier": verifier, "strategy": name, "start": spec.get("start"),
            "relation": plan.relation(name, verifier),
            "teachers": list(dict.fromkeys(t for t, *_ in found)),
            "samples": sum(spec["pools"].values()), "own_samples": own, "responses": parts,
        })  # fmt: skip
    for row in rows:
        for entry in row["responses"]:
            entry["verifiers"] = len(sharing[entry["key"]])
    return rows


def model_text(plan: Plan, name: str) -> str:
    """Return a model's source and revision as text."""
    entry = plan.config["models"][name]
    if entry["source"] == "package":
        return f"{entry['package']} {entry['version']}"
    if entry["source"] == "hub":
        return f"{entry['repo']} {entry['revision'][:12]}"
    if entry["source"] == "derived":
        dropped = ", ".join(map(str, sorted(entry["drop_layers"])))
        return f"{model_text(plan, entry['from'])} without layers {dropped}"
    return f"{entry['path']} ({plan.model(name).settings['pin']})"
