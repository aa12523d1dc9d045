"""The grammar of pipeline text: names, options and values with their places, before anything is looked up.

What names and values mean is decided in ``options``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from pygraph.errors import ParseError, Span
from pygraph.ir.text.parse import span_of

__all__ = ["OptionSyntax", "PassSyntax", "ValueSyntax", "parse_syntax"]

_GRAMMAR = r"""
pipeline: (pass ("," pass)*)?
pass: WORD ("{" (option ("," option)*)? "}")?
option: WORD "=" value
value: NUMBER | STRING | WORD | list
list: "[" (value ("," value)*)? "]"

WORD: /[A-Za-z_][A-Za-z0-9_]*([-.:][A-Za-z0-9_]+)*/
NUMBER: /[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?|[+-]inf(?![A-Za-z0-9_-])/
STRING: /"([^"\\\n\r]|\\.)*"/
%ignore /[ \t\n\r]+/
"""

_SPELLED = {
    "COMMA": "','",
    "LBRACE": "'{'",
    "RBRACE": "'}'",
    "LSQB": "'['",
    "RSQB": "']'",
    "EQUAL": "'='",
    "WORD": "a name",
    "NUMBER": "a number",
    "STRING": "a string",
    "$END": "the end",
}


@dataclass(frozen=True, slots=True)
class ValueSyntax:
    """One value: ``kind`` is number, string, word or list; ``text`` as written (empty for a list)."""

    kind: str
    text: str
    span: Span
    items: tuple[ValueSyntax, ...] = ()


@dataclass(frozen=True, slots=True)
class OptionSyntax:
    """``name=value`` inside braces."""

    name: str
    value: ValueSyntax
    span: Span


@dataclass(frozen=True, slots=True)
class PassSyntax:
    """The name of a pass and the options written after it."""

    name: str
    options: tuple[OptionSyntax, ...]
    span: Span


def parse_syntax(text: str, source: str = "<pipeline>") -> tuple[PassSyntax, ...]:
    """The passes that ``text`` spells. Raises ParseError."""
    try:
        tree = _parser().parse(text)
    except UnexpectedInput as error:
        raise _syntax_error(error, text, source) from None
    _check_strings(tree, text, source)
    return tuple(_pass(child) for child in tree.children if isinstance(child, Tree))


@cache
def _parser() -> Lark:
    return Lark(_GRAMMAR, start="pipeline", parser="lalr")


def _syntax_error(error: UnexpectedInput, text: str, source: str) -> ParseError:
    if isinstance(error, UnexpectedCharacters):
        return ParseError(f"unexpected character {error.char!r}", Span(error.line, error.column), text, source)
    if not isinstance(error, UnexpectedToken):
        raise error
    wanted = " or ".join(sorted(_SPELLED[name] for name in error.accepts or error.expected))
    if error.token.type == "$END":
        return ParseError(f"the text ends where {wanted} is expected", _end_of(text), text, source)
    return ParseError(f"expected {wanted}, found '{error.token}'", span_of(error.token), text, source)


def _end_of(text: str) -> Span:
    kept = text.rstrip(" \t\n\r")
    return Span(kept.count("\n") + 1, len(kept) - (kept.rfind("\n") + 1) + 1)


def _check_strings(tree: Tree[Token], text: str, source: str) -> None:
    for token in tree.scan_values(lambda leaf: isinstance(leaf, Token) and leaf.type == "STRING"):
        try:
            json.loads(token)
        except json.JSONDecodeError as error:
            raise ParseError(f"malformed string: {error.msg}", span_of(token), text, source) from None


def _pass(tree: Tree[Token]) -> PassSyntax:
    name, *options = tree.children
    assert isinstance(name, Token)
    return PassSyntax(str(name), tuple(_option(item) for item in options if isinstance(item, Tree)), span_of(name))


def _option(tree: Tree[Token]) -> OptionSyntax:
    name, value = tree.children
    assert isinstance(name, Token)
    assert isinstance(value, Tree)
    return OptionSyntax(str(name), _value(value, span_of(name)), span_of(name))


def _value(tree: Tree[Token], place: Span) -> ValueSyntax:
    (content,) = tree.children
    if isinstance(content, Token):
        return ValueSyntax(content.type.lower(), str(content), span_of(content))
    items = tuple(_value(item, place) for item in content.children if isinstance(item, Tree))
    return ValueSyntax("list", "", items[0].span if items else place, items)
