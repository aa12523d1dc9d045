"""The native sources: what the two halves share lies in one place, and a library is built anew when that changes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from pygraph.runtime import native_build
from pygraph.runtime.native_build import SHARED, NativeLibrary

BINDING = re.compile(r"^\s*py::(class|enum)_<")
"""How a type is bound."""


def headers() -> list[str]:
    """The names of the shared headers."""
    return sorted(path.name for path in SHARED.iterdir())


def library(directory: Path) -> NativeLibrary:
    """A library of one source."""
    (directory / "one.cpp").write_text("int one;\n")
    return NativeLibrary("one", "test", directory, ("one.cpp",), ())


@pytest.mark.parametrize("header", headers())
def test_a_shared_header_that_changes_makes_another_library(
    header: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "native"
    shutil.copytree(SHARED, shared)
    monkeypatch.setattr(native_build, "SHARED", shared)
    before = library(tmp_path).path(tmp_path)
    assert library(tmp_path).path(tmp_path) == before
    with (shared / header).open("a") as file:
        file.write("// more\n")
    assert library(tmp_path).path(tmp_path) != before


def test_a_shared_header_more_or_less_makes_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "native"
    shutil.copytree(SHARED, shared)
    monkeypatch.setattr(native_build, "SHARED", shared)
    paths = {library(tmp_path).path(tmp_path)}
    (shared / "more.h").touch()
    paths.add(library(tmp_path).path(tmp_path))
    (shared / "more.h").rename(shared / "other.h")
    paths.add(library(tmp_path).path(tmp_path))
    assert len(paths) == 3


def test_what_a_shared_header_binds_belongs_to_each_library_by_itself() -> None:
    """Else the second library of a process cannot be loaded: pybind11 registers types for the whole process."""
    bound = [line for header in SHARED.glob("*.h") for line in header.read_text().splitlines() if BINDING.search(line)]
    assert bound
    assert [line for line in bound if "py::module_local()" not in line] == []
