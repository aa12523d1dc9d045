"""The native sources: what the two halves share lies in one place, and a library is built anew when that changes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pygraph.runtime import native_build
from pygraph.runtime.native_build import SHARED, NativeLibrary

RUNTIME = SHARED.parent
ALIKE = 4
"""Lines of code in a row that may not stand in both halves."""
BINDING = re.compile(r"^\s*py::(class|enum)_<")
"""How a type is bound."""
FRAME = re.compile(r"#|using |namespace |public|private")
"""How lines begin that say nothing about a half: what it includes, and where it stands."""


def headers() -> list[str]:
    """The names of the shared headers."""
    return sorted(path.name for path in SHARED.iterdir())


def code(path: Path) -> list[str]:
    """The lines of a source that say something: no comments, no braces alone, no directives, no namespaces."""
    lines = (re.sub(r"//.*", "", line).strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if re.search(r"\w", line) and not FRAME.match(line)]


def passages(directory: Path) -> Iterator[tuple[str, ...]]:
    """Every ALIKE lines of code in a row, of every source in ``directory``."""
    for path in sorted([*directory.glob("*.h"), *directory.glob("*.cpp")]):
        lines = code(path)
        yield from (tuple(lines[i : i + ALIKE]) for i in range(len(lines) - ALIKE + 1))


def functions(directory: Path) -> set[str]:
    """The functions that the sources in ``directory`` define outside of classes."""
    defined = re.compile(r"^(?!using |constexpr |static )[A-Za-z].*?[\s&*](\w+)\([^;]*$", re.MULTILINE)
    texts = [path.read_text(encoding="utf-8") for path in [*directory.glob("*.h"), *directory.glob("*.cpp")]]
    return {name for text in texts for name in defined.findall(text)}


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


def test_every_shared_header_is_included_by_somebody() -> None:
    texts = [path.read_text(encoding="utf-8") for name in ("host", "cuda") for path in (RUNTIME / name).glob("*.*")]
    included = set(re.findall(r'#include "\.\./native/(\w+\.h)"', "\n".join(texts)))
    for header in headers():
        included |= set(re.findall(r'#include "(\w+\.h)"', (SHARED / header).read_text(encoding="utf-8")))
    assert included == set(headers())


def test_no_function_is_defined_in_both_halves() -> None:
    host, cuda = functions(RUNTIME / "host"), functions(RUNTIME / "cuda")
    assert {"tensor_at", "extent", "reserve"} <= host, "the host's functions are no longer found"
    assert {"random_memory", "release_ticket"} <= cuda, "the CUDA half's functions are no longer found"
    shared = functions(SHARED)
    assert {"tensor_over", "modes_active", "is_plain"} <= shared, "the shared functions are no longer found"
    assert not (host & cuda) - {"bind", "PYBIND11_MODULE"}
    assert not (host | cuda) & shared


def test_no_passage_stands_in_both_halves() -> None:
    host, cuda = set(passages(RUNTIME / "host")), set(passages(RUNTIME / "cuda"))
    assert len(host) > 200
    assert len(cuda) > 200
    assert sorted(host & cuda) == []


def test_what_a_shared_header_binds_belongs_to_each_library_by_itself() -> None:
    """Else the second library of a process cannot be loaded: pybind11 registers types for the whole process."""
    bound = [line for header in SHARED.glob("*.h") for line in header.read_text().splitlines() if BINDING.search(line)]
    assert bound
    assert [line for line in bound if "py::module_local()" not in line] == []
