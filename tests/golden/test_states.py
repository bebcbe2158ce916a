"""Names and fields of states are for good: what was encoded once is read by every later version."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from states import ENCODED, all_names, fields_of, load, sample

from partsong.core.codec import decode, encode
from partsong.core.states import MODULES, class_of

FIELDS, VALUES = load()


def header(parcel):
    length = int.from_bytes(parcel[:8].tobytes(), "little")
    return json.loads(parcel[8 : 8 + length].tobytes())


def contains(node, stored):
    """Whether a node says what was stored; states may have got further fields."""
    if isinstance(stored, dict):
        return all(name in node and contains(node[name], one) for name, one in stored.items())
    if isinstance(stored, list):
        return len(node) == len(stored) and all(map(contains, node, stored))
    return node == stored


def test_every_state_is_in_the_table_with_its_module():
    assert all_names() == MODULES


def test_names_and_fields_are_those_that_were_written():
    """A new state or field: python tests/golden/states.py. Nothing is ever renamed or taken out."""
    assert {name: sorted(fields_of(name)) for name in MODULES} == {name: sorted(FIELDS[name]) for name in FIELDS}
    assert FIELDS.keys() == VALUES.keys()


@pytest.mark.parametrize("name", FIELDS)
def test_what_was_encoded_is_read_again(name):
    again = decode(VALUES[name])
    assert type(again) is class_of(name)
    assert contains(header(encode(again))["value"], header(VALUES[name])["value"])
    assert header(encode(again))["arrays"][: len(header(VALUES[name])["arrays"])] == header(VALUES[name])["arrays"]


@pytest.mark.parametrize("name", FIELDS)
def test_every_kind_of_state_comes_back_as_it_was(name):
    parcel = encode(sample(name))
    np.testing.assert_array_equal(encode(decode(parcel)), parcel)


def test_reading_a_state_imports_its_module_and_no_other_method():
    code = (
        "import sys; from pathlib import Path; from partsong.core.codec import decode; "
        f"values = decode(Path({str(ENCODED)!r}).read_bytes()); print(type(decode(values['fedlda.party'])).__name__); "
        "print(*(name for name in sys.modules if name.startswith('partsong.methods.')))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    registry = {"partsong.methods.table", "partsong.methods.registry"}
    assert [name for name in said if name not in registry] == ["LDAPartyState", "partsong.methods.fedlda"]
