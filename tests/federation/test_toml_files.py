"""Typed TOML files: what is wrong is named by file, key and value, with a way out."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import pytest
from msgspec import Meta

from partsong.core.parameters import read_toml
from partsong.errors import FileError, FormatError, ParameterError
from partsong.federation.toml_files import format_toml, load_toml, parse_table, save_toml


@dataclass(frozen=True, slots=True)
class Budget:
    ADVICE: ClassVar[Mapping[str, str]] = {"sigma": "Noise follows from epsilon."}
    epsilon: Annotated[float, Meta(gt=0)]
    unit: Literal["row", "party"] = "row"

    def __post_init__(self):
        if self.unit == "party" and self.epsilon > 5:
            raise ParameterError("epsilon is too large for a party. Use 5 or less.")


@dataclass(frozen=True, slots=True)
class Settings:
    VERSION: ClassVar[int] = 2
    rank: Annotated[int, Meta(ge=1)] | None = None
    secure_aggregation: bool = False
    columns: tuple[str, ...] | None = None
    budget: Budget | None = None
    sites: Mapping[str, str] = field(default_factory=dict)


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "settings.toml"

    def loaded(text, **how):
        path.write_text(text, encoding="utf-8")
        return load_toml(path, Settings, **how)

    loaded.path = path
    return loaded


def test_values_are_typed_and_survive_a_file(load):
    wanted = Settings(3, True, ("a", 'q"\n\x7f'), Budget(1.5, "party"), {"dots. and é": "x"})
    save_toml(load.path, wanted)
    assert load_toml(load.path, Settings) == wanted
    assert load("version = 2\n[budget]\nepsilon = 1\n") == Settings(budget=Budget(1.0))
    assert isinstance(load("budget.epsilon = 1").budget.epsilon, float)
    assert load_toml(load.path, Settings) == load("\ufeffbudget.epsilon = 1")


def test_none_is_left_out(load):
    assert format_toml(Settings(3)) == "rank = 3\nsecure_aggregation = false\n\n[sites]\n"
    save_toml(load.path, {"a": None, "b": {"c": None, "d": 1}}, private=True)
    assert read_toml(load.path) == {"b": {"d": 1}}
    assert load.path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("secure_agregation = true", ("has no setting 'secure_agregation'", "Did you mean 'secure_aggregation'?")),
        ("budget.epsilo = 1", ("has no setting 'budget.epsilo'", "Did you mean 'epsilon'?")),
        ("budget.sigma = 1", ("has no setting 'budget.sigma'", "Noise follows from epsilon.")),
        ("rank = 'x'", (": rank must be a whole number of at least 1; got 'x'. Correct it there.",)),
        ("rank = true", (": rank must be a whole number of at least 1; got True.",)),
        ("rank = 0", (": rank must be a whole number of at least 1; got 0.",)),
        ("secure_aggregation = 1", (": secure_aggregation must be true or false; got 1.",)),
        ("columns = 'all'", (": columns must be a list of texts; got 'all'.",)),
        ("columns = ['a', 1]", (": columns must be a list of texts; got ['a', 1].",)),
        ("budget.unit = 'row'", (" needs budget.epsilon: a number above 0. Add it.",)),
        ("budget = 3", (": budget must be a table of settings; got 3.",)),
        ("budget.epsilon = nan", (": budget.epsilon must be a number above 0; got nan.",)),
        ("budget.epsilon = 0x" + "f" * 5000, ("budget.epsilon", "thousands of digits")),
        ("[budget]\nepsilon = 1\nunit = 'cell'", ("budget.unit must be", '"row"', "'cell'")),
        ("[budget]\nepsilon = 9\nunit = 'party'", (": epsilon is too large for a party. Use 5 or less.",)),
        ("[sites]\nnorth = 3", (": sites must be a table", "{'north': 3}")),
    ],
)
def test_errors_name_file_key_value_and_way_out(load, text, words):
    with pytest.raises(ParameterError) as caught:
        load(text)
    for word in (str(load.path), *words):
        assert word in str(caught.value)


def test_a_file_of_a_newer_version_asks_for_an_update(load):
    with pytest.raises(FormatError, match=r"settings\.toml has version = 3.*up to 2.*Update partsong"):
        load("version = 3\nunknown = 1")
    for text in ("version = 0", "version = 'two'", "version = true"):
        with pytest.raises(FormatError, match="version must be a whole number"):
            load(text)


def test_files_that_cannot_be_read(load, tmp_path):
    with pytest.raises(FileError, match="Check the path"):
        load_toml(tmp_path / "none.toml", Settings)
    with pytest.raises(FormatError, match="not TOML"):
        load("a = = b")
    load.path.write_bytes(b"a = '\xff'")
    with pytest.raises(FileError, match="cannot be read"):
        load_toml(load.path, Settings)


def test_received_files_have_their_own_error_and_way_out(load):
    for text in ("rank = 'x'", "unknown = 1"):
        with pytest.raises(FormatError, match=r"settings\.toml"):
            load(text, error=FormatError, way_out="Ask for it again.")
    with pytest.raises(FormatError, match="Ask for it again"):
        load("rank = 'x'", error=FormatError, way_out="Ask for it again.")


def test_a_table_of_a_message_is_named_by_what_it_is():
    assert parse_table({"rank": None, "columns": ("a",)}, Settings, "The message") == Settings(columns=("a",))
    with pytest.raises(ParameterError, match=r"^The message must be a table of settings; got 3\.$"):
        parse_table(3, Settings, "The message")
    with pytest.raises(ParameterError, match=r"^The message: secure_aggregation must be true or false; got None\.$"):
        parse_table({"secure_aggregation": None}, Settings, "The message")
    assert math.isinf(parse_table({"epsilon": math.inf}, Budget, "The message").epsilon)
