"""The API reference lists what there is: public names, fields of dataclasses, arguments and options."""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import pygraph
from pygraph.passes.pipeline import BUILT_IN, default_registry
from pygraph.settings import Settings

DOCS = Path(__file__).parents[2] / "docs"

_DIRECTIVE = re.compile(r"^::: ([\w.]+)\n(?: +options:\n +members: \[(.*)\]\n)?", re.MULTILINE)
_ENTRY = re.compile(r"    (\*{0,2}\w+)(?: \([^)]*\))?: \S")

WORDS = {
    "passes": "the five passes",
    "launch_passes": "the four passes",
    "memory_limit": "a tenth of the device's memory",
    "cache_dir": "the user's cache folder",
}
"""Defaults that the table of options has in words."""


def shown() -> dict[str, Any]:
    """Classes and functions on the page, by full name."""
    found: dict[str, Any] = {}
    for path, members in _DIRECTIVE.findall((DOCS / "api.md").read_text(encoding="utf-8")):
        value = pkgutil.resolve_name(path)
        if isinstance(value, ModuleType):
            names = members.split(", ") if members else value.__all__
            found.update({f"{path}.{name}": getattr(value, name) for name in names})
        else:
            found[path] = value
    return {path: value for path, value in found.items() if callable(value)}


SHOWN = shown() | {f"the pass {name}": default_registry.lookup(name) for name in BUILT_IN}


def listed(value: Any, section: str) -> list[str]:
    """Names that a section of the docstring of ``value`` has, one a line."""
    text = inspect.getdoc(value) or ""
    _, _, rest = f"\n{text}\n".partition(f"\n{section}:\n")
    lines = re.split(r"\n(?! )", rest)[0].split("\n")
    return [entry[1] for line in lines if (entry := _ENTRY.match(line))]


def test_all_public_names_are_on_the_page() -> None:
    assert {f"pygraph.{name}" for name in pygraph.__all__} - SHOWN.keys() == {"pygraph.__version__"}


@pytest.mark.parametrize("name", SHOWN)
def test_all_fields_and_arguments_are_listed(name: str) -> None:
    value = SHOWN[name]
    arguments, attributes = listed(value, "Args"), listed(value, "Attributes")
    if dataclasses.is_dataclass(value):
        public = [field for field in dataclasses.fields(value) if not field.name.startswith("_")]
        assert arguments == [field.name for field in public if field.init]
        assert {field.name for field in public if not field.init} <= set(attributes)
    elif arguments:
        parameters = inspect.signature(value).parameters.values()
        stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
        assert arguments == [stars.get(each.kind, "") + each.name for each in parameters]


def test_the_table_of_options_has_their_defaults() -> None:
    text = (DOCS / "operation.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", text.partition("## Options")[2].partition("\n## ")[0], re.M))
    expected = dict(WORDS)
    for field in dataclasses.fields(Settings):
        value = getattr(Settings(), field.name)
        expected.setdefault(field.name, f"`{value}`" if isinstance(value, str | dict) else str(value).lower())
    assert rows == expected
