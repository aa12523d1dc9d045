"""``docs/ir.md``: every block of text parses, verifies and prints back, and what the page says of it holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pygraph.errors import ParseError
from pygraph.ir import DType, parse, verify
from pygraph.ir.dims import FUNCTIONS, TRANSLATED
from pygraph.ir.interp import interpret
from pygraph.ir.verify import RULES

PAGE = (Path(__file__).parents[2] / "docs" / "ir.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```pgir\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("text", BLOCKS)
def test_blocks_are_canonical_and_keep_the_rules(text: str) -> None:
    graph = parse(text)
    verify(graph)
    assert str(graph) == text
    assert interpret(graph) == interpret(graph.clone())


def test_the_error_shown_is_the_error_raised() -> None:
    shown = re.search(r"## Errors\n\n```\n(.*?)\n```", PAGE, re.DOTALL)
    assert shown is not None
    line = shown.group(1).split("\n")[1]
    with pytest.raises(ParseError) as caught:
        parse(f"graph @g (\n  %x : f32[s0, 16]@cpu) {{\n{line}\n  return () }}", "graph.pgir")
    assert str(caught.value) == shown.group(1)


def test_every_word_of_the_language_is_on_the_page() -> None:
    words = [dtype.value for dtype in DType] + list(FUNCTIONS) + list(TRANSLATED)
    words += [rule.__name__ for rules in RULES.values() for rule in rules] + [stage.value for stage in RULES]
    assert [word for word in words if not re.search(rf"\b{word}\b", PAGE)] == []
