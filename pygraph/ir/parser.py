"""``.pgir`` text to graphs. Whatever is wrong with a text is a ParseError that points at the place.

The grammar is in ``grammar.lark``, the actions on its rules in ``actions``, the resolving of names in ``builder``.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from lark import Lark
from lark import Token as Lexeme
from lark.exceptions import UnexpectedCharacters, UnexpectedEOF, UnexpectedInput, UnexpectedToken

from pygraph.errors import ParseError, Span
from pygraph.ir.actions import Actions
from pygraph.ir.graph import Graph
from pygraph.ir.records import Problem

__all__ = ["parse", "span_of"]

MAX_DEPTH = 100
"""Brackets within brackets; deeper texts are refused."""

_BRACKETS = re.compile(r'"(?:[^"\\\n]|\\[^\n])*"|//[^\n]*|[\[({]|[\])}]')

_NAMES = {
    "$END": "the end of the text",
    "FLOAT": "a number",
    "INT": "a number",
    "NODE": "'^name'",
    "STRING": "a string",
    "SYMBOL": "'@name'",
    "TOKEN": "'#name'",
    "VALUE": "'%name'",
    "WORD": "a word",
}


def parse(text: str, source: str = "<text>") -> Graph:
    """The graph written in ``text``. ``source`` names it in errors. Raises ParseError."""
    try:
        _check_depth(text)
        return _lark().parse(text)  # type: ignore[return-value]  # with a transformer, lark returns what 'start' makes
    except Problem as problem:
        reason, span = problem.reason, span_of(problem.lexeme)
    except UnexpectedInput as error:
        reason, span = _explain(error, text)
    except RecursionError:
        reason, span = "an expression is nested too deeply", Span(1, 1)
    raise ParseError(reason, span, text, source)


@cache
def _lark() -> Lark:
    grammar = Path(__file__).with_name("grammar.lark").read_text(encoding="utf-8")
    return Lark(grammar, parser="lalr", lexer="contextual", maybe_placeholders=False, transformer=Actions())


def _check_depth(text: str) -> None:
    """Refuse deep nesting before anything recurses into it."""
    depth = 0
    for match in _BRACKETS.finditer(text):
        char = match.group()
        if char in ("(", "[", "{"):
            depth += 1
        elif char in (")", "]", "}"):
            depth -= 1
        if depth > MAX_DEPTH:
            raise Problem(f"brackets are nested more than {MAX_DEPTH} deep", _lexeme_at(text, match.start(), char))


def _lexeme_at(text: str, position: int, value: str) -> Lexeme:
    before = text[:position]
    return Lexeme("BRACKET", value, line=before.count("\n") + 1, column=position - before.rfind("\n"))


def span_of(lexeme: Lexeme) -> Span:
    """Where ``lexeme`` stands in its text."""
    return Span(lexeme.line or 1, lexeme.column or 1, max(1, len(lexeme)))


def _explain(error: UnexpectedInput, text: str) -> tuple[str, Span]:
    if isinstance(error, UnexpectedCharacters):
        char = error.char
        reason = "this string is not closed on its line" if char == '"' else f"unexpected character {char!r}"
        return _with_expected(reason, error.allowed), Span(error.line, error.column)
    if isinstance(error, UnexpectedToken) and error.token.type != "$END":
        return _with_expected(f"unexpected '{error.token}'", error.expected), span_of(error.token)
    end = text.rstrip()
    last = end.rfind("\n")
    expected = error.expected if isinstance(error, (UnexpectedToken, UnexpectedEOF)) else ()
    return _with_expected("the text ends too early", expected), Span(end.count("\n") + 1, len(end) - last)


def _with_expected(reason: str, terminals: object) -> str:
    names = sorted({_readable(str(name)) for name in terminals or ()})  # type: ignore[attr-defined]  # a set of names
    return f"{reason}: expected {' or '.join(names)}" if 0 < len(names) <= 6 else reason


def _readable(terminal: str) -> str:
    if terminal in _NAMES:
        return _NAMES[terminal]
    pattern = next((t.pattern.value for t in _lark().terminals if t.name == terminal), terminal)
    return f"'{pattern}'"
