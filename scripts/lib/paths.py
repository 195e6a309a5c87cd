"""Many paths as one short command line value.

A full-size training reads several hundred parts, and Linux limits one argument, and so
the whole text of a shell command, to 128 KiB.
"""

import argparse
import json
from functools import cache
from pathlib import Path


@cache
def pack(paths: tuple[str, ...]) -> str:
    """Return `paths` as JSON in which folders that they share are written once.

    The value nests by folder: `{"a/b": {"c": {}, "d": {}}}` stands for `a/b/c` and
    `a/b/d`. Where that would change order or number, it is a plain list; one path is itself.
    """
    if len(paths) == 1:
        return paths[0]
    root: dict = {}
    for path in paths:
        node = root
        for name in path.split("/"):
            node = node.setdefault(name, {})
    tree = _joined(root)
    kept = tuple(_walk(tree)) == paths
    return json.dumps(tree if kept else paths, separators=(",", ":"))


def _joined(tree: dict) -> dict:
    """Return a tree without levels that hold a single folder."""
    result = {}
    for name, below in tree.items():
        path, rest = name, _joined(below)
        if len(rest) == 1:
            [(only, rest)] = rest.items()
            path = f"{name}/{only}"
        result[path] = rest
    return result


def unpack(text: str) -> list[Path]:
    """Return the paths of a value that `pack` made, or of one plain path.

    Raises:
        ValueError: when it looks like JSON and is none.
    """
    if text[:1] not in ("{", "["):
        return [Path(text)]
    value = json.loads(text)
    if isinstance(value, list):
        return [Path(p) for p in value]
    return [Path(p) for p in _walk(value)]


def _walk(tree: dict, above: str = ""):
    for name, below in tree.items():
        path = f"{above}{name}"
        if below:
            yield from _walk(below, f"{path}/")
        else:
            yield path


class Paths(argparse.Action):
    """Action of an option that takes paths, each written out or packed."""

    def __call__(self, parser, namespace, values, option_string=None):
        try:
            found = [path for text in values for path in unpack(text)]
        except ValueError as error:
            parser.error(f"{option_string}: {error}")
        setattr(namespace, self.dest, found)
