"""Files of states, and the codec within: exact to the bit, and only classes with a name come to life."""

import contextlib
import enum
import json
import os
import random
import stat
import tracemalloc
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from partsong.core import codec
from partsong.core.codec import decode, encode
from partsong.core.interfaces import Checkpoint, Message, Outcome
from partsong.core.states import state
from partsong.errors import DataTypeError, FormatError, ParameterError
from partsong.io.state_file import HEADER, read_state, write_state


@state("tests.leaf")
@dataclass(frozen=True, slots=True)
class Leaf:
    value: Any


@state("tests.twofold")
@dataclass(frozen=True)
class Twofold:
    left: Any
    right: Any = None
    doubled: Any = field(init=False, default=None)


@state("tests.phase")
class Phase(enum.Enum):
    FIRST = 1
    SECOND = "two"


ARRAYS = hnp.arrays(
    st.sampled_from(["f2", "f4", "f8", ">f8", "c16", "i1", "i4", "i8", ">i4", "u1", "u8", "?"]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
SCALARS = st.sampled_from([np.float32(0.1), np.int8(-3), np.float64(2), np.bool_(True)])
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
LEAVES = PLAIN | SCALARS | st.sampled_from([*Phase, *Outcome]) | ARRAYS | ARRAYS.map(np.asfortranarray)
KEYS = st.text(max_size=3) | st.integers()
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3)
        | st.lists(st.binary(max_size=3), max_size=3).map(tuple)
        | st.frozensets(st.text(max_size=3), max_size=3)
        | st.dictionaries(KEYS | st.tuples(KEYS, KEYS), inner, max_size=3)
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
    elif isinstance(one, tuple | list):
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
    write_state(path, written)
    assert_same(read_state(path), written)


@given(tree=TREES)
@settings(max_examples=100, deadline=None)
def test_ranks_get_what_was_sent(tree):
    parcel = encode(tree)
    assert_same(decode(parcel), tree)
    assert_same(decode(parcel.tobytes(), copy=True), tree)


def test_states_are_for_their_owner_alone_and_appear_whole(path):
    for _ in range(2):
        write_state(path, checkpoint())
        path.chmod(0o644)
    write_state(path, checkpoint())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]


def test_a_shared_array_is_stored_once(path):
    shared = np.random.default_rng(0).random((100, 100))
    write_state(path, checkpoint((shared, shared, Leaf(shared))))
    assert path.stat().st_size < 1.5 * shared.nbytes
    one, two, leaf = read_state(path).parties["p"]
    assert one is two
    np.testing.assert_array_equal(leaf.value, shared)


@dataclass(frozen=True)
class Nameless:
    value: int = 0


ODD_ARRAYS = (np.array(["text"]), np.array([None]), np.ones(2, dtype=[("a", int)]), np.array("2020", "M8[D]"))
ODD = [{1, 2}, object(), Leaf, {1.5: 1}, {(1.5,): 1}, 1j, lambda: 0, Nameless(), np.ma.ones(2), *ODD_ARRAYS]


@pytest.mark.parametrize("value", ODD)
def test_what_cannot_be_stored_is_refused_with_its_place(path, value):
    with pytest.raises(DataTypeError, match=r"value.parties\['p'\]\['deep'\]"):
        write_state(path, checkpoint({"deep": value}))
    assert not path.exists()


def test_only_classes_that_were_asked_for_are_made():
    parcel = encode((Leaf(1), Phase.FIRST, Message({})))
    for only in ((), ("tests.leaf",), ("tests.phase", "core.message")):
        with pytest.raises(FormatError, match="is not allowed here"):
            decode(parcel, only=only)
    decode(parcel, only=("tests.leaf", "tests.phase", "core.message"))


def test_a_name_is_given_once():
    with pytest.raises(ParameterError, match="already"):
        state("tests.leaf")(Nameless)
    for bad in ("leaf", "Tests.leaf", "tests.", "tests leaf", ""):
        with pytest.raises(ParameterError, match=r"averaging\.party"):
            state(bad)
    with pytest.raises(ParameterError, match="above @dataclass"):
        state("tests.plain")(type("Plain", (), {}))


def test_a_class_that_has_changed(path):
    @state("tests.changing")
    @dataclass(frozen=True)
    class Changing:
        value: int = 0

    def changed(**fields):
        other = dataclass(frozen=True)(type("Changing", (), {"__annotations__": fields, "later": 5}))
        other.__module__, other.__qualname__ = Changing.__module__, Changing.__qualname__
        return state("tests.changing")(other)

    write_state(path, Changing(1))
    with pytest.raises(FormatError, match=r"fields \['value'\], but this version of partsong has \['amount'\]"):
        changed(amount=int) and read_state(path)
    changed(value=int, later=int)
    again = read_state(path)
    assert (again.value, again.later) == (1, 5), "a field that is new has its default"


def test_objects_that_are_given_are_not_in_the_file(path):
    source = object()
    write_state(path, checkpoint(Leaf(source)), given={"source": source})
    assert read_state(path, given={"source": path}).parties["p"].value is path
    with pytest.raises(FormatError, match="source"):
        read_state(path)


def test_a_file_is_read_for_what_it_was_written_for(path):
    write_state(path, checkpoint(), "checkpoint")
    with pytest.raises(FormatError, match="a file of 'checkpoint'"):
        read_state(path, "federation")


def parcel(node, arrays=(["<f8", [2, 2], "C", "numpy"],), data=bytes(64)):
    header = json.dumps({"arrays": list(arrays), "value": node}).encode()
    start = len(header).to_bytes(8, "little") + header
    return start + bytes(-len(start) % 64) + data


def test_a_parcel_made_by_hand_is_read():
    np.testing.assert_array_equal(decode(parcel({"array": 0})), np.zeros((2, 2)))


@pytest.mark.parametrize(
    "node",
    [
        {},
        {"array": 9},
        {"array": -1},
        {"array": True},
        {"array": "0"},
        {"array": [0]},
        {"scalar": 0},
        {"float": "1e5"},
        {"float": "__import__"},
        {"tuple": 5},
        {"tuple": "ab"},
        {"set": [[1]]},
        {"mapping": [[1]]},
        {"mapping": [[[1], 2]]},
        {"mapping": [[1.5, 2]]},
        {"mapping": [[1, 2], [1, 3]]},
        {"bytes": "xy"},
        {"bytes": 5},
        {"pieces": [0, 0]},
        {"given": "source"},
        {"enum": "tests.leaf", "member": "value"},
        {"enum": "tests.phase", "member": "THIRD"},
        {"enum": "tests.phase", "member": ["FIRST"]},
        {"state": "tests.phase", "fields": {}},
        {"state": "tests.leaf", "fields": []},
        {"state": "tests.leaf", "fields": {}},
        {"state": "tests.leaf", "fields": {"value": 1, "extra": 2}},
        {"state": "os.system", "fields": {"command": "true"}},
        {"state": ["tests.leaf"], "fields": {}},
        {"state": "tests.leaf", "fields": {"value": 1}, "more": 1},
        {"state": "core.message", "fields": {"arrays": 5, "weight": 1.0}},
        {"state": "secure.array", "fields": {"name": "x", "shape": [], "kind": "U8", "library": "os"}},
    ],
)
def test_hostile_nodes(node):
    with pytest.raises(FormatError):
        decode(parcel(node))


@pytest.mark.parametrize(
    "entry",
    [
        ["|O8", [2, 2], "C", "numpy"],
        ["<U8", [1], "C", "numpy"],
        ["<V8", [4], "C", "numpy"],
        ["<f8,<f8", [4], "C", "numpy"],
        ["<f3", [2, 2], "C", "numpy"],
        ["<f8", [2, 2], "A", "numpy"],
        ["<f8", [2, 3], "C", "numpy"],
        ["<f8", [2, 20], "C", "numpy"],
        ["<f8", [-2, -2], "C", "numpy"],
        ["<f8", [2.0, 2], "C", "numpy"],
        ["<f8", [1 << 62, 4], "C", "numpy"],
        ["<f8", [1] * 40, "C", "numpy"],
        ["<f8", "ab", "C", "numpy"],
        ["<f8", [2, 2], "C", "os"],
        ["<f8", [2, 2], "C"],
        "numpy",
    ],
)
def test_hostile_arrays(entry):
    with pytest.raises(FormatError):
        decode(parcel({"array": 0}, [entry], bytes(64 if entry[:2] != ["<f8", [2, 3]] else 32)))


def test_more_memory_than_there_are_bytes_is_never_asked_for():
    tracemalloc.start()
    for shape in ([1 << 30, 1 << 10], [1 << 40], [0, 1 << 62]):
        with pytest.raises(FormatError):
            decode(parcel({"array": 0}, [["<f8", shape, "C", "numpy"]]))
    for length in (1 << 40, 1 << 63, (1 << 64) - 1):
        with pytest.raises(FormatError):
            decode(length.to_bytes(8, "little") + bytes(56))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_deep_nesting_is_refused():
    header = b'{"arrays":[],"value":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    start = len(header).to_bytes(8, "little") + header
    with pytest.raises(FormatError):
        decode(start + bytes(-len(start) % 64))


def test_tensors_are_refused_where_only_arrays_are_accepted():
    entry = ["float64", [2, 2], "C", "torch cpu"]
    with pytest.raises(FormatError, match="only NumPy arrays are accepted"):
        decode(parcel({"array": 0}, [entry]), numpy_only=True)


def test_every_cut_and_flip_is_noticed(path):
    write_state(path, checkpoint(Twofold(np.arange(4.0), Phase.SECOND), Leaf(np.float32(2))))
    raw, dice = path.read_bytes(), random.Random(0)
    for case in range(300):
        data = bytearray(raw)
        data[dice.randrange(len(raw))] ^= 1 << dice.randrange(8)
        path.write_bytes(data[: dice.randrange(len(raw))] if case % 3 == 0 else data)
        with pytest.raises(FormatError, match=path.name):
            read_state(path)


def test_parcels_without_a_checksum_are_read_or_refused():
    whole = encode(checkpoint(Twofold(np.arange(4.0), Phase.SECOND), Leaf(np.float32(2)))).tobytes()
    dice = random.Random(0)
    for case in range(1000):
        data = bytearray(whole)
        for _ in range(dice.randrange(1, 4)):
            data[dice.randrange(len(whole) if case % 2 else 600)] ^= 1 << dice.randrange(8)
        with contextlib.suppress(FormatError):
            decode(bytes(data[: dice.randrange(len(whole))] if case % 5 == 0 else data))


def test_arrays_lie_at_multiples_of_64_bytes(path):
    trees = (np.arange(5.0), np.arange(3, dtype=np.int8), np.arange(4.0)[None])
    write_state(path, trees)
    raw = path.read_bytes()
    assert len(raw) % 64 == 0
    assert all(raw.index(array.tobytes(), HEADER) % 64 == 0 for array in trees[::2])
    assert decode(np.frombuffer(raw, np.uint8)[HEADER:])[0].flags.aligned


def test_bytes_that_are_referred_to_often_are_copied_once():
    """A message cannot make its reader take more memory than a small multiple of its own size."""
    decoder = codec._Decoder({}, None, [np.zeros(100_000, np.uint8)])
    found = [decoder.value({"bytes": 0}) for _ in range(50)]
    assert all(one is found[0] for one in found)


def test_too_little_memory_is_not_damage(monkeypatch):
    def full(*given):
        raise MemoryError

    data = encode({"H": np.zeros((3, 2))})
    monkeypatch.setattr(codec, "_arrays", full)
    with pytest.raises(MemoryError):
        decode(data)
