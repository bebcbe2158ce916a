"""Checkpoints: exact to the bit, and only the classes that were asked for come to life."""

import enum
import json
import os
import random
import stat
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from partsong.core.interfaces import Checkpoint, Message, Outcome
from partsong.errors import DataTypeError, FormatError, ParameterError
from partsong.io.model_file import FileKind, load_checkpoint, save_checkpoint, write_tensors


@dataclass(frozen=True, slots=True)
class Leaf:
    value: Any


@dataclass(frozen=True)
class Twofold:
    left: Any
    right: Any = None
    doubled: Any = field(init=False, default=None)


class Phase(enum.Enum):
    FIRST = 1
    SECOND = "two"


TYPES = (Leaf, Twofold, Phase, Outcome)
ARRAYS = hnp.arrays(
    st.sampled_from(["f2", "f4", "f8", "i1", "i4", "i8", "u1", "u8", "?"]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
SCALARS = st.sampled_from([np.float32(0.1), np.int8(-3), np.float64(2), np.bool_(True)])
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
LEAVES = PLAIN | SCALARS | st.sampled_from([*Phase, *Outcome]) | ARRAYS | ARRAYS.map(np.asfortranarray)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.builds(Leaf, inner)
        | st.builds(Twofold, inner, inner)
        | st.dictionaries(st.text(max_size=3), ARRAYS, max_size=2).map(Message)
    ),
    max_leaves=8,
)


def assert_same(one, other):
    """Equal to the bit, in class, type, order of memory and order of keys."""
    if isinstance(one, MappingProxyType):
        one, other = dict(one), dict(other)
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes(order="A") == other.tobytes(order="A")
        assert one.flags.c_contiguous == other.flags.c_contiguous
    elif isinstance(one, np.generic):
        assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes())
    elif isinstance(one, float):
        assert repr(one) == repr(other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert_same(tuple(one.values()), tuple(other.values()))
    elif isinstance(one, tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    elif hasattr(one, "__dataclass_fields__"):
        for name in one.__dataclass_fields__:
            assert_same(getattr(one, name), getattr(other, name))
    else:
        assert one == other


def checkpoint(party=None, server=()):
    return Checkpoint(3, {"p": party}, server, Message({"H": np.eye(2)}, weight=2.5))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.checkpoint"


@given(party=TREES, server=TREES)
@settings(max_examples=150, deadline=None)
def test_round_trip_is_exact(tmp_path_factory, party, server):
    path = tmp_path_factory.mktemp("checkpoint") / "c.safetensors"
    written = checkpoint(party, server)
    save_checkpoint(path, written, context={})
    assert_same(load_checkpoint(path, TYPES)[0], written)


def test_the_context_comes_back(path):
    context = {"method": "hals", "settings": {"rank": 3, "tolerance": 1e-4}, "fingerprint": "ab", "list": [1, None]}
    save_checkpoint(path, checkpoint(), context=context)
    assert load_checkpoint(path, ())[1] == context
    with pytest.raises(DataTypeError, match="context"):
        save_checkpoint(path, checkpoint(), context={"bad": np.ones(2)})


def test_states_are_for_their_owner_alone_and_appear_whole(path):
    for _ in range(2):
        save_checkpoint(path, checkpoint(), context={})
        path.chmod(0o644)
    save_checkpoint(path, checkpoint(), context={})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]


def test_a_shared_array_is_stored_once(path):
    shared = np.random.default_rng(0).random((100, 100))
    save_checkpoint(path, checkpoint((shared, shared, Leaf(shared))), context={})
    assert path.stat().st_size < 1.5 * shared.nbytes
    one, two, leaf = load_checkpoint(path, (Leaf,))[0].parties["p"]
    assert one is two
    np.testing.assert_array_equal(leaf.value, shared)


ODD_ARRAYS = (np.array(["text"]), np.array([None]), np.ones(2, dtype=">f8"), np.ones(2) * 1j)


@pytest.mark.parametrize("value", [[1], {1, 2}, b"x", object(), Leaf, {1.5: 1}, 1j, lambda: 0, *ODD_ARRAYS])
def test_what_cannot_be_stored_is_refused_with_its_place(path, value):
    with pytest.raises(DataTypeError):
        save_checkpoint(path, checkpoint({"deep": value}), context={})
    assert not path.exists()


def test_only_classes_that_were_asked_for_are_made(path):
    save_checkpoint(path, checkpoint(Leaf(1), Phase.FIRST), context={})
    for types in ((), (Leaf,), (Phase,)):
        with pytest.raises(FormatError, match="does not belong to this method"):
            load_checkpoint(path, types)
    load_checkpoint(path, (Leaf, Phase))


def test_two_classes_of_one_name_are_refused(path):
    with pytest.raises(ParameterError, match="Leaf"):
        load_checkpoint(path, (Leaf, dataclass(frozen=True)(type("Leaf", (), {}))))


def test_a_class_that_has_changed(path):
    save_checkpoint(path, checkpoint(Leaf(1)), context={})

    @dataclass(frozen=True)
    class Renamed:
        amount: int

    Renamed.__name__ = "Leaf"
    with pytest.raises(FormatError, match="another version"):
        load_checkpoint(path, (Renamed,))


def tree(party):
    return {
        "record": "Checkpoint",
        "fields": {
            "index": 1,
            "parties": {"mapping": [["p", party]]},
            "server": None,
            "model": {"record": "Message", "fields": {"arrays": {"mapping": []}, "weight": 1.0}},
        },
    }


@pytest.mark.parametrize(
    "node",
    [
        [1],
        {},
        {"array": "9", "order": "C"},
        {"array": ["0"], "order": "C"},
        {"scalar": "0"},
        {"float": "1e5"},
        {"float": "__import__"},
        {"tuple": 5},
        {"mapping": [[1]]},
        {"mapping": [[[1], 2]]},
        {"mapping": [[1.5, 2]]},
        {"enum": "Leaf", "member": "value"},
        {"enum": "Phase", "member": "THIRD"},
        {"enum": "Phase", "member": ["FIRST"]},
        {"record": "Phase", "fields": {}},
        {"record": "Leaf", "fields": []},
        {"record": "Leaf", "fields": {}},
        {"record": "Leaf", "fields": {"value": 1, "extra": 2}},
        {"record": "os.system", "fields": {"command": "true"}},
        {"record": ["Leaf"], "fields": {}},
        {"record": "Leaf", "fields": {"value": 1}, "more": 1},
        {"record": "Message", "fields": {"arrays": 5, "weight": 1.0}},
    ],
)
def test_hostile_nodes(path, node):
    write_tensors(path, FileKind("partsong-checkpoint", 1), {"0": np.eye(2)}, {"context": {}, "tree": tree(node)})
    with pytest.raises(FormatError, match=path.name):
        load_checkpoint(path, TYPES)


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        {},
        {"context": {}, "tree": 1},
        {"context": [], "tree": tree(1)},
        {"context": {}, "tree": tree(1)["fields"]},
        {"context": {}, "tree": tree(1)["fields"]["model"]},
    ],
)
def test_trees_that_are_no_checkpoint(path, content):
    write_tensors(path, FileKind("partsong-checkpoint", 1), {}, content)
    with pytest.raises(FormatError):
        load_checkpoint(path, TYPES)


def test_every_cut_and_flip_is_noticed(path):
    whole = checkpoint(Twofold(np.arange(4.0), Phase.SECOND), Leaf(np.float32(2)))
    save_checkpoint(path, whole, context={"a": 1})
    raw, dice = path.read_bytes(), random.Random(0)
    for case in range(300):
        data = bytearray(raw)
        data[dice.randrange(len(raw))] ^= 1 << dice.randrange(8)
        path.write_bytes(data[: dice.randrange(len(raw))] if case % 3 == 0 else data)
        try:
            loaded, context = load_checkpoint(path, TYPES)
        except FormatError:
            continue
        assert_same(loaded, whole)
        assert json.dumps(context) == '{"a": 1}'
