"""The pages keep what they promise: Python blocks run and print what is shown below them, IR text verifies, links lead
somewhere.

Blocks of one page run in order, in one module. A block after ``<!-- gpu -->`` runs on a GPU only, one after
``<!-- needs vllm -->`` with the others that need this package.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from pygraph.ir import parse_graph, verify
from pygraph.ir.dims import FUNCTIONS
from pygraph.passes import default_registry
from pygraph.program.text import parse_program
from pygraph.program.verify import verify as verify_program

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CLIENTS = ROOT / "docs" / "clients.md"

_BLOCK = re.compile(
    r"^(?:<!-- (?:needs )?(?P<needs>\w+) -->\n)?"
    r"```(?P<language>\w*)\n(?P<text>.*?)^```$\n?(?:^```text\n(?P<shown>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, text and line, the output shown below it, and what it needs: a package, ``gpu``."""

    language: str
    text: str
    line: int
    shown: str
    needs: str


def blocks(page: Path, language: str) -> list[Block]:
    """The blocks of ``page`` in that language, in order."""
    text = page.read_text(encoding="utf-8")
    found = (
        Block(m["language"], m["text"], text.count("\n", 0, m.start("text")), m["shown"] or "", m["needs"] or "")
        for m in _BLOCK.finditer(text)
    )
    return [block for block in found if block.language == language]


def run(page: Path, *needs: str) -> None:
    """Run the blocks of ``page`` that need one of ``needs``; tracebacks show the page's lines."""
    module = ModuleType(f"page_{page.stem}")
    sys.modules[module.__name__] = module
    try:
        for block in blocks(page, "python"):
            if block.needs not in needs:
                continue
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("\n" * block.line + block.text, str(page), "exec"), module.__dict__)
            text = printed.getvalue()
            if block.needs not in ("", "gpu"):  # a package may print lines of its own before
                text = text[-len(block.shown) :]
            assert text == block.shown, f"{page}:{block.line}"
    finally:
        del sys.modules[module.__name__]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_prints_what_is_shown(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(default_registry, "_classes", dict(default_registry._classes))
    monkeypatch.setattr(default_registry, "_paths", dict(default_registry._paths))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run(page, "")
    for block in blocks(page, "pgir"):
        if block.text.startswith("program"):
            program = parse_program(block.text)
            verify_program(program)
            assert str(program) == block.text
        else:
            verify(parse_graph(block.text))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.usefixtures("fresh")
def test_the_programs_of_the_readme_are_right_on_a_gpu() -> None:
    run(ROOT / "README.md", "", "gpu")


@pytest.mark.clients
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("package", sorted({block.needs for block in blocks(CLIENTS, "python")} - {""}))
def test_blocks_with_a_package_print_what_is_shown(
    package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    run(CLIENTS, package)


def test_functions_of_expressions_are_those_that_the_page_lists() -> None:
    page = (ROOT / "docs" / "ir.md").read_text(encoding="utf-8")
    listed = " ".join(page.split()).partition("and these functions")[2].partition("any other in quotes")[0]
    assert sorted(" ".join(re.findall("`([^`]*)`", listed)).split()) == sorted(FUNCTIONS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
