"""Packed paths: short, and the same list again."""

import argparse
import random
from pathlib import Path

import pytest

from scripts.lib.paths import Paths, pack, unpack


@pytest.mark.parametrize("seed", range(30))
def test_any_list_survives(seed):
    draw = random.Random(seed)
    names = ["a", "b", "shard-00000", "é ü", '"{', "["]
    paths = [
        draw.choice(["", "/", "../"]) + "/".join(draw.choices(names, k=draw.randint(1, 4)))
        for _ in range(draw.randint(1, 12))
    ]  # fmt: skip
    if len(paths) == 1 and paths[0][:1] in "{[":
        return
    assert [str(p) for p in unpack(pack(tuple(paths)))] == [str(Path(p)) for p in paths]


def test_a_path_above_another_and_a_repeated_one_are_kept():
    for paths in (["a", "a/b"], ["a/b", "a"], ["a", "a"], ["a/b", "c", "a/d"]):
        assert unpack(pack(tuple(paths))) == [Path(p) for p in paths]


def test_a_full_size_training_fits_on_a_command_line():
    draw = random.Random(0)
    store = "/" + "/".join(["a-shared-folder-with-a-long-name"] * 4)
    paths = [
        f"{store}/hidden_states/some-verifier-70b/some-teacher-235b/pool-of-chats/"
        f"shard-{shard:05d}/layer-{layer:03d}/{draw.getrandbits(64):016x}"
        for shard in range(200) for layer in range(7)
    ]  # fmt: skip
    text = pack(tuple(paths))
    assert unpack(text) == [Path(p) for p in paths]
    assert len(" ".join(paths)) > 2 * 2**17
    assert len(text) < 2**16


def test_an_option_takes_paths_written_out_and_packed(capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", nargs="+", action=Paths)
    given = parser.parse_args(["--tokens", "x/y", pack(("a/b", "a/c"))])
    assert given.tokens == [Path("x/y"), Path("a/b"), Path("a/c")]
    with pytest.raises(SystemExit):
        parser.parse_args(["--tokens", '{"a": '])
    assert "--tokens" in capsys.readouterr().err
