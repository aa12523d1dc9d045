"""Every ``.pgir`` file in this folder is a test: see ``runner`` for its directives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.filecheck.runner import run_text

FILES = sorted(Path(__file__).parent.rglob("*.pgir"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(Path(__file__).parent)))
def test_file(path: Path) -> None:
    run_text(path.read_text(encoding="utf-8"))


def test_there_are_files() -> None:
    assert FILES
