"""Nodes of the plan: a part, and a batch of parts that one job makes together."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from scripts.lib.identity import canonical_json, digest, part_key
from scripts.lib.store import MANIFEST


@dataclass(frozen=True, eq=False)
class Node:
    """One part: what it is made from, and where it lives.

    A plan has one node per part, so that nodes compare by identity.

    Attributes:
        parents: role -> Node or list of Nodes whose keys enter this key.
        extra: inputs that enter the key without being files this part reads.
        local: values the script needs that do not enter the key (paths).
        aliases: all names that lead to this key in the plan, `names` included.
    """

    store: str
    stage: str
    names: tuple[str, ...]
    settings: dict
    parents: dict = field(default_factory=dict)
    extra: dict = field(default_factory=dict)
    local: dict = field(default_factory=dict)
    aliases: list = field(default_factory=list)

    @property
    def inputs(self) -> dict:
        """Role -> key(s), as they enter the key."""
        keys = {
            role: [n.key for n in value] if isinstance(value, list) else value.key
            for role, value in self.parents.items()
        }
        return keys | self.extra

    @cached_property
    def key(self) -> str:
        """The part's key."""
        return part_key(self.stage, self.settings, self.inputs)

    @property
    def location(self) -> tuple[str, ...]:
        """The names in the part's path: those it was made under, or the first in order.

        Which alias comes first in a configuration must not move a finished part.
        """
        candidates = sorted(self.aliases) or [self.names]
        if len(candidates) > 1:
            for names in candidates:
                if Path("/".join([self.store, self.stage, *names, self.key, MANIFEST])).exists():
                    return names
        return candidates[0]

    @property
    def name(self) -> str:
        """The names of `location`, joined as a path."""
        return "/".join(self.location)

    @property
    def folder(self) -> str:
        """Folder of the part."""
        return f"{self.store}/{self.stage}/{self.name}/{self.key}"

    @property
    def manifest(self) -> str:
        """Path of the manifest, the part's only declared output."""
        return f"{self.folder}/{MANIFEST}"

    @property
    def settings_json(self) -> str:
        """The settings as one command line value."""
        return canonical_json(self.settings)

    def all_parents(self) -> list["Node"]:
        """The parents of all roles in one list."""
        return [
            n for v in self.parents.values() for n in (v if isinstance(v, list) else [v])
        ]  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """Several parts of one stage that one job makes together.

    Its manifest only says that the parts it names were finished; a plan asks for
    it when some of the parts are missing, and refers to the parts themselves when
    they are there.
    """

    folder: str
    missing: tuple[Node, ...]

    @property
    def manifest(self) -> str:
        """Path of the batch's manifest, named after the missing parts."""
        key = digest([n.key for n in self.missing])
        # A batch manifest can outlive its parts (removed by hand): then a new one is due.
        attempt = 0
        while Path(path := f"{self.folder}/batch-{key}-{attempt}/{MANIFEST}").exists():
            attempt += 1
        return path
