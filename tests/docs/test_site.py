"""The pages that docs/generate.py writes say what the code says; building the site itself is `make docs`."""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import typer

from partsong import errors, methods
from partsong.cli import main as command_line
from partsong.federation.wire import CODES
from partsong.methods import reference

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    folder = tmp_path_factory.mktemp("generated")
    generate.write(folder)
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


def commands():
    for name, place in command_line.COMMANDS.items():
        yield from inner(place.load(name), f"partsong {name}")


def inner(command, path):
    yield path, command
    for name, one in getattr(command, "commands", {}).items():
        if not one.hidden:
            yield from inner(one, f"{path} {name}")


def test_the_page_of_methods_is_that_of_the_registrations(pages):
    assert pages["methods.md"].endswith(reference.page())
    sections = [line.removeprefix("## ") for line in pages["methods.md"].splitlines() if line.startswith("## ")]
    assert set(methods.TABLE) <= set(sections)


def test_every_command_has_all_of_its_options(pages):
    lines = pages["cli.md"].splitlines()
    headings = {line.lstrip("# "): at for at, line in enumerate(lines) if line.startswith("#")}
    for path, command in commands():
        first = headings[path]
        end = min((at for at in headings.values() if at > first), default=len(lines))
        section = "\n".join(lines[first:end])
        for option in command.params:
            for name in option.opts if option.param_type_name == "option" else (option.display_name_raw,):
                assert f"`{name}`" in section, (path, name)
        assert typer.Context(command, info_name=path).info_name in section


def test_every_error_is_on_the_page(pages):
    for name, one in vars(errors).items():
        if inspect.isclass(one) and one.__module__ == errors.__name__:
            assert f"| `{name}` |" in pages["errors.md"]


def test_public_names_are_in_the_api(pages):
    import partsong

    for name in set(partsong.__all__) - {"__version__"}:
        assert f":: partsong.{name}\n" in pages["api.md"]


def test_every_refusal_of_a_site_has_its_meaning_and_advice(pages):
    def plain(text):
        return re.sub(r"\\(.)", r"\1", text)

    lines = [plain(line) for line in pages["errors.md"].splitlines()]
    for code, (meaning, advice) in CODES.items():
        assert f"| `{code}` | {meaning} | {advice} |" in lines
