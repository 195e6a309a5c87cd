"""The plan: every part that a configuration asks for, with its key and inputs.

Pure and light (no torch, no network): Snakemake evaluates it on every parse.
The rules ask it for inputs and command line values; nothing else decides what
a result is made from.
"""

from functools import wraps
from itertools import product
from pathlib import Path
from typing import Any

from scripts.lib.errors import UserError
from scripts.lib.identity import CONTRACTS, pin_file, pin_tree
from scripts.lib.nodes import Batch, Node
from scripts.lib.teachers import (
    left_out,
    resolve_teacher,
    stretches,
    unaccepted_models,
)


def remembered(method):
    """Give a method of `Plan` a memory: every epoch of every strategy asks for the same."""

    @wraps(method)
    def once(self, *arguments):
        memo = (method.__name__, *arguments)
        if memo not in self._memo:
            self._memo[memo] = method(self, *arguments)
        return self._memo[memo]

    return once


class Plan:
    """All parts of one validated configuration.

    Args:
        config: the result of `scripts.lib.config.check`.
        root: folder that relative data paths refer to.
    """

    def __init__(self, config: dict, root: Path = Path()):
        self.config, self.root, self.store = config, Path(root), config["store"].rstrip("/")
        self._nodes: dict[tuple[str, str], Node] = {}
        self._memo: dict[tuple, Any] = {}
        # (verifier, algorithm, strategy) -> epochs trained, epochs benchmarked
        self.runs: dict[tuple[str, str, str], tuple[int, set[int]]] = {}
        refusals: dict[tuple[str, ...], list[str]] = {}  # models -> strategies without consent
        for run in config["study"]["runs"]:
            for name in product(run["verifiers"], run["algorithms"], run["strategies"]):
                if refused := self._unaccepted(name[0], name[2]):
                    refusals.setdefault(tuple(refused), []).append(name[2])
                    continue
                trained, measured = self.runs.get(name, (0, set()))
                self.runs[name] = (
                    max(trained, run["epochs"]), measured | set(run["benchmark_epochs"])
                )  # fmt: skip
        self.verifiers = list(dict.fromkeys(v for v, _, _ in self.runs))
        self.notices = [left_out(config, *item) for item in refusals.items()]
        if not self.runs and self.notices:
            raise UserError(f"configuration: nothing is left to do. {self.notices[0]}")

    @remembered
    def _unaccepted(self, verifier: str, strategy: str) -> list[str]:
        return unaccepted_models(self.config, verifier, strategy)

    # -- helpers ---------------------------------------------------------------

    def _node(self, stage: str, names, settings, parents=None, extra=None, local=None) -> Node:
        node = Node(
            self.store, stage, tuple(names), settings, parents or {}, extra or {}, local or {}
        )
        # Equal keys are one part, whatever names lead to it.
        node = self._nodes.setdefault((stage, node.key), node)
        if tuple(names) not in node.aliases:
            node.aliases.append(tuple(names))
        return node

    def get(self, stage: str, key: str) -> Node:
        """Return the node of a key, after the whole plan was laid out.

        Raises:
            UserError: when the configuration does not lead to that key.
        """
        self.targets()
        try:
            return self._nodes[stage, key]
        except KeyError:
            raise UserError(f"no {stage} part of this configuration has the key {key}.") from None

    def all_nodes(self) -> list[Node]:
        """Return all nodes in the order of planning."""
        self.targets()
        return list(self._nodes.values())

    def nodes(self, stage: str) -> list[Node]:
        """Return all nodes of a stage in the order of planning."""
        return [n for n in self.all_nodes() if n.stage == stage]

    def batch(self, parts: list[Node]) -> Batch | None:
        """Return the batch of those of `parts` that do not exist yet, or None."""
        missing = tuple(n for n in parts if not Path(n.manifest).exists())
        if not missing:
            return None
        return Batch(self.batch_folder(parts[0]), missing)

    @staticmethod
    def batch_folder(part: Node) -> str:
        """Return the folder that the parts made together with `part` share."""
        if part.stage == "hidden_states":
            names, anchor = part.location[:-1], part.parents["tokens"]
        else:
            names, anchor = (
                part.location[:-2],
                part.parents.get("speculator", part.parents["model"]),
            )
        return "/".join([part.store, part.stage, *names, anchor.key])

    def batch_parts(self, stage: str, folder: str) -> list[Node]:
        """Return all parts of this configuration that one job of `folder` makes."""
        return self._batches(stage).get(folder, [])

    @remembered
    def _batches(self, stage: str) -> dict[str, list[Node]]:
        batches: dict[str, list[Node]] = {}
        for node in self.nodes(stage):
            batches.setdefault(self.batch_folder(node), []).append(node)
        return batches

    def inputs(self, parts: list[Node]) -> list[str]:
        """Return manifests to wait for: of the parts that exist, and of their batches else.

        `parts` may come from several batches. A batch is asked for with everything that
        this configuration still lacks in its folder, so that one job makes it all.
        """
        return sorted({self._input(part) for part in parts})

    @remembered
    def _input(self, part: Node) -> str:
        if Path(part.manifest).exists():
            return part.manifest
        return self._missing_batch(part.stage, self.batch_folder(part)) or part.manifest

    @remembered
    def _missing_batch(self, stage: str, folder: str) -> str | None:
        batch = self.batch(self.batch_parts(stage, folder))
        return batch.manifest if batch else None

    # -- data ------------------------------------------------------------------

    @remembered
    def model(self, name: str) -> Node:
        """The model part of a catalogue name."""
        entry = self.config["models"][name]
        template = entry["chat_template"]
        settings = {"source": entry["source"]}
        local, parents = {"path": "", "chat_template": template}, {}
        if entry["source"] == "package":
            settings |= {k: entry[k] for k in ("package", "version", "dtype")}
            how = "assemble" if entry["assemble"] else "file"
            settings[how] = entry[how]
        elif entry["source"] == "hub":
            settings |= {k: entry[k] for k in ("repo", "revision")}
        elif entry["source"] == "derived":
            settings["drop_layers"] = sorted(entry["drop_layers"])
            parents["base"] = self.model(entry["from"])
        else:
            path = self.root / entry["path"]
            settings["pin"], local["path"] = pin_tree(path), str(path)
        if template:
            settings["chat_template"] = pin_file(self.root / template)
        return self._node("models", [name], settings, parents, local=local)

    def tensor_parallel(self, model: Node) -> int:
        """Return how many GPUs an engine of a model part takes."""
        sizes = self.config["runtime"]["tensor_parallel"]
        return max(sizes.get(names[0], 1) for names in model.aliases)

    def runtime(self, model: Node) -> dict:
        """Return the engine settings for a model part, as scripts take them.

        `tensor_parallel` (model -> GPUs) is resolved to `tensor_parallel_size`.
        """
        settings = {k: v for k, v in self.config["runtime"].items() if k != "tensor_parallel"}
        return settings | {"tensor_parallel_size": self.tensor_parallel(model)}

    def _source(self, entry: dict) -> tuple[list[str], list[str]]:
        paths = entry["path"] if isinstance(entry["path"], list) else [entry["path"]]
        full = [str(self.root / p) for p in paths]
        return full, self._pins(*full)

    @remembered
    def _pins(self, *paths: str) -> list[str]:
        return [pin_file(Path(p)) for p in paths]

    @remembered
    def prompts(self, pool: str, index: int) -> Node:
        """One shard of a pool."""
        entry = self.config["pools"][pool]
        paths, pins = self._source(entry)
        twin = self._memo.setdefault(("pool", *pins, entry["shard_size"]), pool)
        if twin != pool:
            raise UserError(
                f"configuration: the pools {twin} and {pool} have the same content. Keep one."
            )
        settings = {
            "pins": pins, "seed": self.config["seed"], "size": entry["shard_size"], "index": index,
        }  # fmt: skip
        return self._node("prompts", [pool, f"shard-{index:05d}"], settings, local={"paths": paths})

    def shards(self, pool: str, first: int, stop: int) -> range:
        """Numbers of the shards that hold the ranks from `first` to before `stop` of a pool."""
        size = self.config["pools"][pool]["shard_size"]
        return range(first // size, -(-stop // size))

    @remembered
    def workload(self, name: str) -> Node:
        """The prompts of a workload."""
        entry = self.config["workloads"][name]
        paths, pins = self._source(entry)
        settings = {"pins": pins, "seed": self.config["seed"], "prompts": entry["prompts"]}
        return self._node("workloads", [name], settings, local={"paths": paths})

    def teacher_name(self, name: str, verifier: str) -> str:
        """Resolve a teacher's name or role for a verifier (`teachers.resolve_teacher`)."""
        return resolve_teacher(self.config, name, verifier, "teacher")

    def relation(self, strategy: str, verifier: str) -> str:
        """Return whose responses a strategy learns from.

        One of self, same_family, cross_family, mixture (of several teachers).
        """
        models, spec = self.config["models"], self.config["strategies"][strategy]
        teachers = {t for t, *_ in stretches(self.config, verifier, spec)}
        if len(teachers) > 1:
            return "mixture"
        model = self.config["teachers"][teachers.pop()]["model"]
        if model == verifier:
            return "self"
        family = models[verifier]["family"]
        return "same_family" if family and family == models[model]["family"] else "cross_family"

    @remembered
    def responses(self, teacher: str, pool: str, index: int) -> Node:
        """A teacher's responses to one prompt shard."""
        entry = self.config["teachers"][teacher]
        settings = {k: v for k, v in entry.items() if k != "model"}
        settings |= {"seed": self.config["seed"]}
        prompts = self.prompts(pool, index)
        parents = {"model": self.model(entry["model"]), "prompts": prompts}
        names = [teacher, pool, f"shard-{index:05d}"]
        return self._node("responses", names, settings, parents)

    @remembered
    def tokens(
        self, verifier: str, teacher: str, pool: str, index: int, reasoning: str = "template"
    ) -> Node:
        """One response shard under the verifier's tokenizer and template."""
        teacher = self.teacher_name(teacher, verifier)
        responses = self.responses(teacher, pool, index)
        settings = {"max_length": self.config["tokens"]["max_length"], "reasoning": reasoning}
        parents = {"model": self.model(verifier), "responses": responses}
        names = [verifier, teacher, pool, f"shard-{index:05d}"]
        return self._node("tokens", names, settings, parents)

    def token_ranks(
        self, verifier: str, source: dict, reasoning: str = "template"
    ) -> tuple[list[Node], list[list[int]]]:
        """Return the token shards of a strategy's data and which rows of each it reads.

        Args:
            verifier: whose tokens.
            source: has `pools` (pool -> samples) and `teacher` or `mixture`.
            reasoning: of the strategy.

        Returns:
            Token parts, and for each [first rank, rank to stop before] in its pool.
        """
        shards, ranks = [], []
        for teacher, pool, first, stop in stretches(self.config, verifier, source):
            size = self.config["pools"][pool]["shard_size"]
            for index in self.shards(pool, first, stop):
                shards.append(self.tokens(verifier, teacher, pool, index, reasoning))
                ranks.append([max(first, index * size), min(stop, (index + 1) * size)])
        return shards, ranks

    @remembered
    def hidden_state(self, tokens: Node, layer: int) -> Node:
        """One layer's states of one token shard."""
        settings = {"layer": layer, "dtype": self.config["hidden_states"]["dtype"]}
        parents = {"model": tokens.parents["model"], "tokens": tokens}
        name = f"layer-{layer:03d}" if layer >= 0 else "layer-last"
        return self._node("hidden_states", [*tokens.names, name], settings, parents)

    def layers(self, algorithm: str) -> list[int]:
        """The layer ids an algorithm's draft reads; the verifier's last layer is added later."""
        return list(self.config["algorithms"][algorithm]["layers"])

    def states(self, tokens: Node, algorithm: str) -> list[Node]:
        """The hidden-state parts of a token shard that an algorithm trains on.

        The targets need the last layer's output. Its number is only known once the
        model is, so it has the id -1 here and in the key.
        """
        return [self.hidden_state(tokens, layer) for layer in [*self.layers(algorithm), -1]]

    def vocab(self, verifier: str, size: int) -> Node:
        """The verifier's named draft vocabulary, the same for all strategies."""
        spec = self.config["vocabulary"]
        shards, ranks = self.token_ranks(verifier, spec)
        settings = {"size": size, "ranks": ranks}
        return self._node(
            "vocab", [verifier, f"size-{size}"], settings,
            {"model": self.model(verifier), "tokens": shards},
        )  # fmt: skip

    # -- training --------------------------------------------------------------

    @remembered
    def speculator(self, verifier: str, algorithm: str, strategy: str, epoch: int) -> Node:
        """The checkpoint after `epoch` passes over a strategy's data."""
        recipe, spec = self.config["algorithms"][algorithm], self.config["strategies"][strategy]
        shards, ranks = self.token_ranks(verifier, spec, spec["reasoning"])
        parents: dict[str, Any] = {"model": self.model(verifier), "tokens": shards}
        settings: dict[str, Any] = {"ranks": ranks}
        if self.relation(strategy, verifier) != "self":
            # Accuracies of strategies compare on the verifier's own answers only.
            most = self.config["validation"]["own_samples"]
            few = {p: min(n, most) for p, n in spec["pools"].items()}
            own = self.token_ranks(verifier, {"teacher": "self", "pools": few})
            parents["own_tokens"], settings["own_ranks"] = own
        start = spec.get("start")
        if epoch > 1:
            parents["previous"] = self.speculator(verifier, algorithm, strategy, epoch - 1)
        elif start:
            parents["start"] = self.speculator(
                verifier, algorithm, start["strategy"], start["epoch"]
            )
        # A continued draft keeps its start's vocabulary: its weights are tied to it.
        origin = parents.get("previous") or parents.get("start")
        parents["vocab"] = (
            origin.parents["vocab"] if origin else self.vocab(verifier, recipe["draft_vocab_size"])
        )
        settings |= {
            **recipe, "epoch": epoch, "schedule_epochs": spec["schedule_epochs"],
            "seed": self.config["seed"],
            "validation_share": self.config["validation"]["share"],
        }  # fmt: skip
        extra = {
            "hidden_states": [
                CONTRACTS["hidden_states"], self.config["hidden_states"]["dtype"],
                *map(str, self.layers(algorithm)),
            ]
        }  # fmt: skip
        names, local = [verifier, algorithm, strategy, f"epoch-{epoch}"], {"algorithm": algorithm}
        return self._node("speculators", names, settings, parents, extra, local)

    def training_states(self, speculator: Node) -> list[Node]:
        """The hidden-state parts that training `speculator` reads."""
        shards = speculator.parents["tokens"] + speculator.parents.get("own_tokens", [])
        return [s for t in shards for s in self.states(t, speculator.local["algorithm"])]

    # -- benchmarks ------------------------------------------------------------

    def _benchmark(
        self, names, model: Node, speculator: Node | None, workload: str, settings
    ) -> Node:
        parents = {"model": model, "workload": self.workload(workload)}
        if speculator:
            parents["speculator"] = speculator
        return self._node("benchmarks", names, settings, parents)

    def acceptance(
        self, verifier, checkpoint, workload: str, concurrency: int | None = None
    ) -> Node:
        """Acceptance (or, without a speculator, plain greedy output) on one workload.

        Args:
            verifier: catalogue name of the model.
            checkpoint: (algorithm, strategy, epoch), or None for the bare verifier.
            workload: catalogue name.
            concurrency: requests in flight; the configured one when None.
        """
        bench = self.config["benchmark"]
        settings = {k: bench[k] for k in ("temperature", "max_tokens", "max_model_len")}
        settings |= {
            "kind": "acceptance", "k": bench["k"] if checkpoint else 0,
            "concurrency": concurrency or bench["concurrency"], "seed": self.config["seed"],
        }  # fmt: skip
        speculator = self.speculator(verifier, *checkpoint) if checkpoint else None
        part = f"acceptance-c{settings['concurrency']}"
        names = [verifier, *self._checkpoint_names(checkpoint), workload, part]
        return self._benchmark(names, self.model(verifier), speculator, workload, settings)

    def latency(self, verifier, checkpoint, workload: str, concurrency: int) -> Node:
        """Latency under one fixed concurrency on one workload (arguments as `acceptance`)."""
        bench = self.config["benchmark"]
        spec = bench["latency"]
        settings = {
            k: spec[k] for k in ("requests_per_stream", "max_seconds", "max_tokens", "hardware")
        }
        settings |= {
            "kind": "latency", "k": bench["k"] if checkpoint else 0, "concurrency": concurrency,
            "temperature": bench["temperature"], "max_model_len": bench["max_model_len"],
            "seed": self.config["seed"],
            "tensor_parallel": self.tensor_parallel(self.model(verifier)),
        }  # fmt: skip
        speculator = self.speculator(verifier, *checkpoint) if checkpoint else None
        names = [verifier, *self._checkpoint_names(checkpoint), workload, f"latency-c{concurrency}"]
        return self._benchmark(names, self.model(verifier), speculator, workload, settings)

    @staticmethod
    def _checkpoint_names(checkpoint) -> list[str]:
        if checkpoint is None:
            return ["baseline"]
        algorithm, strategy, epoch = checkpoint
        return [f"{algorithm}.{strategy}.epoch-{epoch}"]

    def trained(self) -> list[tuple[str, tuple[str, str, int]]]:
        """All (verifier, (algorithm, strategy, epoch)) that the study trains."""
        return [(v, (a, s, e)) for (v, a, s), (n, _) in self.runs.items() for e in range(1, n + 1)]

    def checkpoints(self) -> list[tuple[str, tuple[str, str, int]]]:
        """Those of `trained` that the study benchmarks."""
        return [(v, c) for v, c in self.trained() if c[2] in self.runs[v, c[0], c[1]][1]]

    def benchmark_parts(self, verifier: str, checkpoint) -> list[tuple[str, Node]]:
        """All (workload, part) benchmarks of one checkpoint, or of the bare verifier (None)."""
        bench, workloads = self.config["benchmark"], self.config["study"]["workloads"]
        latency = bench["latency"]
        parts = [(w, self.acceptance(verifier, checkpoint, w)) for w in workloads]
        if checkpoint is None:
            other = bench["control_concurrency"]
            parts += [(w, self.acceptance(verifier, None, w, other)) for w in workloads]
        if checkpoint is None or checkpoint[2] in (
            latency["epochs"] or [self.runs[verifier, *checkpoint[:2]][0]]
        ):
            parts += [
                (w, self.latency(verifier, checkpoint, w, c))
                for w in latency["workloads"]
                for c in latency["concurrencies"]
            ]
        return parts

    def servers(self) -> list[tuple[str, Any]]:
        """Every (verifier, checkpoint or None) that is benchmarked: one server start each."""
        bare: list[tuple[str, Any]] = [(v, None) for v in self.verifiers]
        return bare + self.checkpoints()

    # -- the whole -------------------------------------------------------------

    @remembered
    def targets(self) -> list[Node]:
        """Lay out the whole plan; return the benchmark parts, its leaves."""
        leaves = [n for v, c in self.servers() for _, n in self.benchmark_parts(v, c)]
        for verifier, checkpoint in self.trained():
            self.speculator(verifier, *checkpoint)
        # Starts of strategies are trained too, though not benchmarked.
        for node in [n for (s, _), n in self._nodes.items() if s == "speculators"]:
            self.training_states(node)
        return leaves
