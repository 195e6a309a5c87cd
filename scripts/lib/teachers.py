"""Teachers: who answers for which verifier, in which shares, and under whose terms.

Part of the configuration's checks and of the plan: pure, without heavy imports.
"""

from scripts.lib.errors import UserError

ROLES = ("self", "same_family", "cross_family")  # teachers that depend on the verifier
TERMS = {"gemma": "https://ai.google.dev/gemma/terms"}


def need(names, catalogue: dict, where: str, kind: str) -> None:
    """Check that all `names`, which the key `where` gives, are in a catalogue.

    Raises:
        UserError: naming the first that is not.
    """
    for name in names:
        if name not in catalogue:
            raise UserError(
                f"configuration: {where} names the unknown {kind} {name!r}. "
                f"Known: {', '.join(sorted(catalogue)) or 'none'}."
            )


def check_families(config: dict) -> None:
    """Check that each family's teachers exist and are of the family they should be of."""
    for family, entry in config["families"].items():
        for key in ("teacher", "cross_teacher"):
            if key not in entry:
                continue
            where = f"families.{family}.{key}"
            need([entry[key]], config["teachers"], where, "teacher")
            model = config["teachers"][entry[key]]["model"]
            found = config["models"][model]["family"]
            if not found:
                raise UserError(
                    f"configuration: {where} is {entry[key]}, whose model {model} has no family. "
                    f"Set models.{model}.family."
                )
            if (found == family) != (key == "teacher"):
                raise UserError(
                    f"configuration: {where} is {entry[key]}, whose model {model} is of family "
                    f"{found}. Name a teacher of "
                    f"{'that family' if key == 'teacher' else 'another family'}."
                )


def resolve_teacher(config: dict, name: str, verifier: str, where: str) -> str:
    """Return the teacher entry that `name` means for a verifier.

    Args:
        config: a configuration whose names were checked.
        name: an entry of `teachers`, or one of `ROLES`: the one teacher whose model is
            the verifier, the teacher of its family, the family's teacher from elsewhere.
        where: key that names the teacher, for the message.

    Raises:
        UserError: when the role has no teacher, or more than one.
    """
    if name not in ROLES:
        return name
    if name == "self":
        own = [t for t, e in config["teachers"].items() if e["model"] == verifier]
        if len(own) != 1:
            raise UserError(
                f"configuration: teacher 'self' of verifier {verifier} needs exactly one entry "
                f"of `teachers` with model {verifier}, found {own or 'none'}. Add one, or name "
                "the teacher in the strategy."
            )
        return own[0]
    family = config["models"][verifier]["family"]
    if not family:
        raise UserError(
            f"configuration: {where} is {name}, but the verifier {verifier} has no family. Set "
            f"models.{verifier}.family."
        )
    key = "teacher" if name == "same_family" else "cross_teacher"
    if key not in config["families"].get(family, {}):
        raise UserError(
            f"configuration: {where} is {name}, which needs families.{family}.{key}. Name a "
            "teacher there."
        )
    return config["families"][family][key]


def with_starts(strategies: dict, name: str) -> list[str]:
    """Return a strategy, the one it starts from, the one that starts from, and so on."""
    names = [name]
    while start := strategies[names[-1]].get("start"):
        names.append(start["strategy"])
    return names


def sources(strategy: dict) -> list[tuple[str, float]]:
    """Return whose responses a strategy learns from: (teacher or role, share) in order."""
    if "mixture" in strategy:
        return [(s["teacher"], s["share"]) for s in strategy["mixture"]]
    return [(strategy["teacher"], 1.0)]


def check_sources(name: str, strategy: dict, teachers: dict) -> None:
    """Check that a strategy has one teacher, or a mixture whose shares make a whole.

    Raises:
        UserError: naming the key at fault.
    """
    where = f"strategies.{name}"
    if ("teacher" in strategy) == ("mixture" in strategy):
        raise UserError(f"configuration: {where} needs either `teacher` or `mixture`.")
    key = "mixture" if "mixture" in strategy else "teacher"
    found = sources(strategy)
    need([t for t, _ in found if t not in ROLES], teachers, f"{where}.{key}", "teacher")
    if abs((total := sum(share for _, share in found)) - 1) > 1e-6:
        raise UserError(
            f"configuration: the shares of {where}.mixture add up to {total:g}. Make them 1."
        )


def stretches(config: dict, verifier: str, strategy: dict) -> list[tuple[str, str, int, int]]:
    """Return which teacher answers which prompts of a strategy.

    In each pool the teachers of a mixture take turns in the hash order: the first
    answers the first share of the prompts, the next one those that follow. So no prompt
    is answered twice, and each stretch is a random sample of the pool.

    Returns:
        (teacher, pool, first rank, rank to stop before), pools by name. A teacher that
        follows itself, under whatever name, has one stretch.
    """
    result: list[tuple[str, str, int, int]] = []
    for pool, samples in sorted(strategy["pools"].items()):
        first, reached = 0, 0.0
        for name, share in sources(strategy):
            teacher = resolve_teacher(config, name, verifier, "teacher")
            reached += share
            stop = int(reached * samples + 0.5)
            if result and result[-1][:2] == (teacher, pool):
                result[-1] = (teacher, pool, result[-1][2], stop)
            elif stop > first:
                result.append((teacher, pool, first, stop))
            first = stop
    return result


def terms_of(config: dict, model: str) -> str:
    """Return the name of a model's terms of use, or ""; they cover what is derived from it."""
    entry = config["models"][model]
    return terms_of(config, entry["from"]) if entry["source"] == "derived" else entry["terms"]


def unaccepted_models(config: dict, verifier: str, strategy: str) -> list[str]:
    """Return the models that a strategy needs and whose terms were not accepted."""
    strategies, teachers = config["strategies"], config["teachers"]
    names = [t for s in with_starts(strategies, strategy) for t, _ in sources(strategies[s])]
    names += ["self", config["vocabulary"]["teacher"]]
    found = [teachers[resolve_teacher(config, n, verifier, "teacher")]["model"] for n in names]
    return [
        model for model in dict.fromkeys([verifier, *found])
        if (terms := terms_of(config, model)) and not config[f"accept_{terms}_terms"]
    ]  # fmt: skip


def left_out(config: dict, models: tuple[str, ...], strategies: list[str]) -> str:
    """Return the sentence about strategies that need models without consent to their terms."""
    terms = list(dict.fromkeys(terms_of(config, m) for m in models))
    return (
        f"Left out: {', '.join(dict.fromkeys(strategies))}, which need {', '.join(models)}. "
        f"Read the terms ({', '.join(TERMS[t] for t in terms)}) and set "
        f"{', '.join(f'accept_{t}_terms: true' for t in terms)}."
    )
