"""Every ``.pgir`` file in this folder is a test: see ``pygraph.testing.filecheck`` for its directives."""

from __future__ import annotations

from pathlib import Path

import pytest

from pygraph.testing import check_file

FILES = sorted(Path(__file__).parent.rglob("*.pgir"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(Path(__file__).parent)))
def test_file(path: Path) -> None:
    check_file(path)


def test_there_are_files() -> None:
    assert FILES
