"""Runs the page on debugging: its code, in order, must print what it shows."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

from pygraph.passes import default_registry
from tests.docs.blocks import DOCS, blocks, run_block

PAGE = DOCS / "debugging.md"


def test_every_block_prints_what_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = ModuleType("debugging_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(default_registry, "_classes", dict(default_registry._classes))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = blocks(PAGE, "python")
    assert len(found) >= 3
    for block in found:
        assert run_block(PAGE, block, module) == (block.shown or ""), f"{PAGE}:{block.line}"
