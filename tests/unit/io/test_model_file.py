"""Model files: exact, without private data, and refused unless sound."""

import json
import os
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import save_file

from partsong.errors import DataError, DataTypeError, FeatureError, FileError, FormatError, PartsongError
from partsong.io.model_file import Model, load_model, save_model
from partsong.io.tensor_file import FileKind, write_tensors

H = np.random.default_rng(0).random((2, 3))
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def model(**changes):
    given = {
        "components": H,
        "feature_names": ("a", "b", "c"),
        "settings": {"rank": 2, "method": "hals"},
        "seed": 7,
        "relative_error": 0.25,
        "shares": np.array([0.6, 0.4]),
        "created": "2025-01-02T03:04:05+00:00",
        "versions": {"partsong": "1.0"},
    }
    return Model(**(given | changes))


def assert_same(one, other):
    for name in Model.__dataclass_fields__:
        left, right = getattr(one, name), getattr(other, name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype
            np.testing.assert_array_equal(left, right)
        else:
            assert left == right


@given(
    components=hnp.arrays(
        st.sampled_from([np.float32, np.float64]),
        hnp.array_shapes(min_dims=2, max_dims=2, max_side=4),
        elements=st.floats(0, 2.0**100, width=32),
    ),
    settings_=st.dictionaries(st.text(), JSON_VALUES, max_size=3),
    seed=st.none() | st.integers(0, 2**200),
    relative_error=st.none() | st.floats(0, 1e300),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_round_trip_is_exact(tmp_path_factory, components, settings_, seed, relative_error, data):
    path = tmp_path_factory.mktemp("model") / "m.safetensors"
    k, m = components.shape
    names = data.draw(st.none() | st.lists(st.text(), min_size=m, max_size=m, unique=True).map(tuple))
    shares = data.draw(st.none() | hnp.arrays(np.float64, k, elements=st.floats(0, 1)))
    written = model(
        components=components,
        feature_names=names,
        settings=settings_,
        seed=seed,
        relative_error=relative_error,
        shares=shares,
    )
    save_model(path, written)
    assert_same(load_model(path), written)


def test_names_used_twice_are_told_with_their_places():
    with pytest.raises(FeatureError, match=r"'a' \(columns 0, 2\)"):
        model(feature_names=("a", "b", "a"))


def test_other_programs_can_read_it_and_find_nothing_private(tmp_path):
    from safetensors import safe_open

    save_model(tmp_path / "m.safetensors", model())
    with safe_open(tmp_path / "m.safetensors", framework="np") as file:
        assert sorted(file.keys()) == ["components", "shares"]
        (text,) = file.metadata().values()
    document = json.loads(text)
    assert (document["format"], document["format_version"]) == ("partsong-model", 1)
    assert "sample" not in text


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"components": H.tolist()}, DataTypeError),
        ({"components": H.astype(np.float16)}, DataTypeError),
        ({"components": H[0]}, ValueError),
        ({"components": H[:0]}, ValueError),
        ({"components": H - 1}, DataError),
        ({"components": H * np.nan}, DataError),
        ({"components": H * np.inf}, DataError),
        ({"feature_names": ("a", "b")}, FeatureError),
        ({"feature_names": ("a", "a", "b")}, FeatureError),
        ({"feature_names": ("a", "b", 3)}, FeatureError),
        ({"seed": True}, TypeError),
        ({"seed": 1.5}, TypeError),
        ({"relative_error": -0.1}, ValueError),
        ({"relative_error": np.nan}, ValueError),
        ({"relative_error": "small"}, TypeError),
        ({"shares": np.ones(3)}, ValueError),
        ({"shares": np.array([np.nan, 1.0])}, DataError),
        ({"shares": [0.5, 0.5]}, TypeError),
        ({"settings": {"clip": np.inf}}, TypeError),
        ({"settings": {"rule": object()}}, TypeError),
        ({"settings": {1: 2}}, TypeError),
        ({"settings": None}, TypeError),
        ({"created": "yesterday"}, ValueError),
        ({"versions": {"numpy": 2}}, TypeError),
    ],
)
def test_unsound_models_cannot_be_made(changes, error):
    with pytest.raises(error) as caught:
        model(**changes)
    assert isinstance(caught.value, PartsongError)


CONTENT = {
    "feature_names": ["a", "b", "c"],
    "settings": {},
    "seed": 1,
    "relative_error": None,
    "created": "2025-01-02T03:04:05",
    "versions": {},
}
NESTED = "[" * 900 + "]" * 900


@pytest.mark.parametrize(
    ("kind", "tensors", "content"),
    [
        (FileKind("partsong-model", 2), {"components": H}, CONTENT),
        (FileKind("partsong-checkpoint", 1), {"components": H}, CONTENT),
        (FileKind("partsong-model", 0), {"components": H}, CONTENT),
        (FileKind("partsong-model", 1), {}, CONTENT),
        (FileKind("partsong-model", 1), {"components": H, "W": H}, CONTENT),
        (FileKind("partsong-model", 1), {"components": H.astype(np.int64)}, CONTENT),
        (FileKind("partsong-model", 1), {"components": H[0]}, CONTENT),
        (FileKind("partsong-model", 1), {"components": np.zeros((0, 3))}, CONTENT),
        (FileKind("partsong-model", 1), {"components": -H}, CONTENT),
        (FileKind("partsong-model", 1), {"components": H * np.nan}, CONTENT),
        (FileKind("partsong-model", 1), {"components": H[:, :2]}, CONTENT),
        (FileKind("partsong-model", 1), {"components": H, "shares": np.ones(5)}, CONTENT),
        (FileKind("partsong-model", 1), {"components": H}, []),
        (FileKind("partsong-model", 1), {"components": H}, CONTENT | {"sample_names": ["x"]}),
        (FileKind("partsong-model", 1), {"components": H}, CONTENT | {"feature_names": 5}),
        (FileKind("partsong-model", 1), {"components": H}, CONTENT | {"feature_names": "abc1"}),
        (FileKind("partsong-model", 1), {"components": H}, CONTENT | {"feature_names": [["a"], "b", "c"]}),
        (FileKind("partsong-model", 1), {"components": H}, CONTENT | {"settings": 1}),
        (FileKind("partsong-model", 1), {"components": H}, CONTENT | {"versions": {"a": 1}}),
        (FileKind("partsong-model", 1), {"components": H}, CONTENT | {"seed": "x"}),
        (FileKind("partsong-model", 1), {"components": H}, CONTENT | {"created": 5}),
    ],
)
def test_unsound_files_are_refused(tmp_path, kind, tensors, content):
    write_tensors(tmp_path / "m.safetensors", kind, tensors, content)
    with pytest.raises(FormatError, match=r"m\.safetensors"):
        load_model(tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"format": "pt"},
        {"partsong": "{"},
        {"partsong": "[]"},
        {"partsong": "null"},
        {"partsong": '{"format": "partsong-model"}'},
        {"partsong": "[" * 100_000},
        {"partsong": '{"a":' * 100_000},
        {"partsong": "1" * 10_000},
        {"partsong": '{"format": "partsong-model", "format_version": "1", "sha256": "", "content": {}}'},
        {"partsong": '{"format": "partsong-model", "format_version": NaN, "sha256": "", "content": {}}'},
        {"partsong": '{"format": "partsong-model", "format_version": 1, "sha256": 5, "content": {}}'},
        {"partsong": f'{{"format": "partsong-model", "format_version": 1, "sha256": "", "content": {NESTED}}}'},
    ],
)
def test_foreign_and_hostile_metadata(tmp_path, metadata):
    save_file({"components": H}, tmp_path / "m.safetensors", metadata=metadata)
    with pytest.raises(FormatError, match=r"m\.safetensors"):
        load_model(tmp_path / "m.safetensors")


def test_every_cut_and_flip_is_noticed(tmp_path):
    path = tmp_path / "m.safetensors"
    save_model(path, model())
    raw, whole = path.read_bytes(), load_model(path)
    dice = random.Random(0)
    cuts = [raw[: dice.randrange(len(raw))] for _ in range(60)]
    flips = []
    for _ in range(300):
        data = bytearray(raw)
        data[dice.randrange(len(raw))] ^= 1 << dice.randrange(8)
        flips.append(bytes(data))
    for data in cuts:
        path.write_bytes(data)
        with pytest.raises(FormatError):
            load_model(path)
    for data in flips:
        path.write_bytes(data)
        try:
            assert_same(load_model(path), whole)  # white space in the header may change
        except FormatError:
            continue


def test_a_header_that_claims_absurd_sizes(tmp_path):
    header = json.dumps({"components": {"dtype": "F64", "shape": [2**40, 2**20], "data_offsets": [0, 8]}}).encode()
    for size in (len(header), 2**60):
        (tmp_path / "m.safetensors").write_bytes(size.to_bytes(8, "little") + header + bytes(8))
        with pytest.raises(FormatError):
            load_model(tmp_path / "m.safetensors")


def test_saving_is_all_or_nothing(tmp_path):
    path = tmp_path / "m.safetensors"
    save_model(path, model())
    save_model(path, model(seed=8))
    assert load_model(path).seed == 8
    assert os.listdir(tmp_path) == [path.name]
    with pytest.raises(FileError, match="cannot be written"):
        save_model(tmp_path / "absent" / "m.safetensors", model())
    with pytest.raises(FileError, match="no such file"):
        load_model(tmp_path / "absent.safetensors")
