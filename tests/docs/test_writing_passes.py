"""Runs the page on writing passes: its code, in order, must print what it shows; its entry point must be found."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

from pygraph.passes import Registry, default_registry
from pygraph.passes import parse as parse_pipeline
from tests.docs.blocks import DOCS, blocks, run_block

PAGE = DOCS / "writing_passes.md"


@pytest.fixture
def page_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that the page calls ``my_package.passes``; what it registers is forgotten afterwards."""
    module = ModuleType("my_package.passes")
    monkeypatch.setitem(sys.modules, "my_package", ModuleType("my_package"))
    monkeypatch.setitem(sys.modules, "my_package.passes", module)
    monkeypatch.setattr(default_registry, "_classes", dict(default_registry._classes))
    return module


def test_every_block_prints_what_is_shown(page_module: ModuleType) -> None:
    found = blocks(PAGE, "python")
    assert len(found) >= 4
    for block in found:
        assert run_block(PAGE, block, page_module) == (block.shown or ""), f"{PAGE}:{block.line}"


def test_the_entry_point_finds_the_pass(page_module: ModuleType) -> None:
    first = blocks(PAGE, "python")[0]
    run_block(PAGE, first, page_module)
    (toml,) = blocks(PAGE, "toml")
    header, assignment = toml.text.strip().splitlines()
    assert header == '[project.entry-points."pygraph.passes"]'
    name, _, value = (part.strip().strip('"') for part in assignment.partition("="))
    registry = Registry([EntryPoint(name, value, "pygraph.passes")])
    (item,) = parse_pipeline("keep-out{functions=[debug]}", registry=registry)
    assert type(item) is page_module.KeepOut
    assert {info.name: info.error for info in registry.describe()}["keep-out"] is None
