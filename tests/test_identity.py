"""Keys: equal for equal meanings, different for everything that counts."""

import hashlib
import itertools
import json

import pytest

from scripts.lib import identity
from scripts.lib.errors import UserError


def test_order_of_keys_and_spelling_of_numbers_do_not_change_a_digest():
    first = {"a": 1, "b": [0.5, {"x": 2.0, "y": None}], "c": (True, "t")}
    second = {"c": [True, "t"], "b": [0.5, {"y": None, "x": 2}], "a": 1.0}
    assert identity.digest(first) == identity.digest(second)
    assert identity.canonical_json(first) == identity.canonical_json(second)


@pytest.mark.parametrize(
    "left, right",
    [
        (1, "1"),
        (1, True),
        (0, False),
        (None, ""),
        ([1, 2], [2, 1]),
        (0.1, 0.2),
        ({}, []),
        ("a", "A"),
    ],
)
def test_different_meanings_have_different_digests(left, right):
    assert identity.digest({"x": left}) != identity.digest({"x": right})


def test_canonical_json_is_json_of_the_same_value():
    value = {"ü": "日本\n", "n": [1, 2.5, None, False], "d": {"z": 1, "a": {}}}
    text = identity.canonical_json(value)
    assert json.loads(text) == value
    assert text == json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


@pytest.mark.parametrize("value", [{1, 2}, b"x", object()])
def test_values_without_json_form_are_refused(value):
    with pytest.raises(TypeError):
        identity.digest({"x": value})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_json_cannot_hold_are_refused(value):
    with pytest.raises((TypeError, ValueError)):
        identity.digest({"x": value})


def test_part_key_depends_on_stage_contract_settings_and_inputs(monkeypatch):
    def key(stage="tokens", settings=(("n", 1),), inputs=(("model", "k1"), ("shards", ("a", "b")))):
        return identity.part_key(stage, dict(settings), dict(inputs))

    keys = {
        "base": key(),
        "stage": key(stage="vocab"),
        "setting": key(settings=(("n", 2),)),
        "input": key(inputs=(("model", "k2"), ("shards", ("a", "b")))),
        "role": key(inputs=(("teacher", "k1"), ("shards", ("a", "b")))),
        "order": key(inputs=(("model", "k1"), ("shards", ("b", "a")))),
    }
    monkeypatch.setitem(identity.CONTRACTS, "tokens", identity.CONTRACTS["tokens"] + 1)
    keys["contract"] = key()
    for (one, left), (two, right) in itertools.combinations(keys.items(), 2):
        assert left != right, (one, two)
    assert all(len(k) == 16 and int(k, 16) >= 0 for k in keys.values())


def test_file_hash_is_the_sha256_of_the_content(tmp_path):
    content = bytes(range(256)) * 5000
    (tmp_path / "f").write_bytes(content)
    expected = hashlib.sha256(content).hexdigest()
    assert identity.sha256_file(tmp_path / "f") == expected
    assert identity.pin_file(tmp_path / "f") == expected[:16]


def test_pin_of_a_large_file_sees_size_and_both_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "_FULL_HASH_LIMIT", 100)
    monkeypatch.setattr(identity, "_SMALL_FILE_LIMIT", 10)
    path, content = tmp_path / "f", bytearray(200)

    def pin(**change):
        altered = bytearray(content)
        for position in change.get("at", []):
            altered[position] = 1
        path.write_bytes(bytes(altered) + b"\0" * change.get("longer", 0))
        return identity.pin_file(path)

    pins = [pin(), pin(at=[0]), pin(at=[199]), pin(longer=1)]
    assert len(set(pins)) == len(pins)
    assert pin() == pins[0]


def test_missing_data_file_is_a_user_error_that_names_it(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.jsonl"):
        identity.pin_file(tmp_path / "nothing.jsonl")


def test_pin_of_a_directory_sees_names_sizes_and_small_contents(tmp_path, monkeypatch):
    def tree(name, files):
        for path, content in files.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(content)
        return identity.pin_tree(tmp_path / name)

    base = {"config.json": "{}", "sub/w": "0123456789" * 3}
    assert tree("one", base) == tree("two", dict(reversed(base.items())))
    others = [
        tree("content", base | {"config.json": "[]"}),
        tree("renamed", {"config2.json": "{}", "sub/w": base["sub/w"]}),
        tree("moved", {"config.json": "{}", "w": base["sub/w"]}),
        tree("more", base | {"x": ""}),
    ]
    assert len({identity.pin_tree(tmp_path / "one"), *others}) == 5
    # Weights are pinned by size: hashing them on every parse would take minutes.
    monkeypatch.setattr(identity, "_SMALL_FILE_LIMIT", 10)
    assert tree("a", base) == tree("b", base | {"sub/w": "x" * 30})
    assert tree("a", base) != tree("c", base | {"sub/w": "x" * 31})


def test_pin_of_no_directory_or_an_empty_one_is_a_user_error(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing"):
        with pytest.raises(UserError, match=name):
            identity.pin_tree(tmp_path / name)
