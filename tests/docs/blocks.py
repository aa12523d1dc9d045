"""Code blocks of a Markdown page, each with the output that is shown below it."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

__all__ = ["DOCS", "Block", "blocks", "run_block"]

DOCS = Path(__file__).parents[2] / "docs"

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$\n?(?:^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, text and line, and the text block right below it (None when there is none)."""

    language: str
    text: str
    line: int
    shown: str | None


def blocks(page: Path, language: str) -> list[Block]:
    """The blocks of ``page`` in that language, in order."""
    text = page.read_text(encoding="utf-8")
    found = [Block(m[1], m[2], text.count("\n", 0, m.start()) + 1, m[3]) for m in _FENCE.finditer(text)]
    return [block for block in found if block.language == language]


def run_block(page: Path, block: Block, module: ModuleType) -> str:
    """Run one Python block as part of ``module`` and return what it printed; tracebacks show the page's lines."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * block.line + block.text, str(page), "exec"), module.__dict__)
    return printed.getvalue()
