"""Reads a text token by token, for the recursive-descent parsers of ``.pgir`` text and of pipelines."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

from pygraph.errors import ParseError, Span
from pygraph.text.words import QUOTED, unquote

T = TypeVar("T")

MAX_DEPTH = 100
"""Maximum depth of nested lists and operands: deeper texts are refused before they exhaust the stack."""


def tokens(kinds: str) -> re.Pattern[str]:
    """A pattern with a named group for each kind of token: those in ``kinds``, strings, the end, and anything else.

    Blanks, and comments from ``//`` to the end of a line, may stand before any token.
    """
    return re.compile(
        rf"(?:[ \t\r\n]+|//[^\n]*)*(?:{kinds}|(?P<string>{QUOTED})|(?P<end>\Z)|(?P<strange>.))", re.DOTALL
    )


class Lexeme(NamedTuple):
    """A token of the text and its start; ``kind`` is the name of its group in the pattern."""

    kind: str
    text: str
    start: int


class Reader:
    """One text, read from left to right. ``next`` is the next token; ``pattern`` is a result of ``tokens``."""

    pattern: ClassVar[re.Pattern[str]]
    names: ClassVar[Mapping[str, str]]
    """The name of a kind of token in errors."""

    def __init__(self, text: str, source: str) -> None:
        self.text = text
        self.source = source
        self.depth = 0
        self.next = self.scan(0)

    def scan(self, at: int) -> Lexeme:
        """The token at position ``at`` of the text. Raises ParseError if there is no valid token."""
        match = self.pattern.match(self.text, at)
        assert match is not None, "any text has some token"
        kind = str(match.lastgroup)
        lexeme = Lexeme(kind, match[kind], match.start(kind))
        if kind == "strange":
            is_string = lexeme.text == '"'
            reason = (
                "this string has an unknown escape, or no end on its line"
                if is_string
                else f"unexpected character {lexeme.text!r}"
            )
            raise self.error(reason, lexeme)
        return lexeme

    def span(self, lexeme: Lexeme) -> Span:
        """Span of a token; the end of the text counts as the position after the last word."""
        start = min(lexeme.start, len(self.text.rstrip()))
        before = self.text[:start]
        return Span(before.count("\n") + 1, start - before.rfind("\n"), max(1, len(lexeme.text)))

    def error(self, reason: str, at: Lexeme) -> ParseError:
        """The error that points at a token."""
        return ParseError(reason, self.span(at), self.text, self.source)

    def refuse(self, wanted: str) -> Any:
        """Raise ParseError for the next token."""
        found = "the text ends too early" if self.next.kind == "end" else f"unexpected '{self.next.text}'"
        raise self.error(f"{found}: expected {wanted}", self.next)

    def take(self) -> Lexeme:
        """Consume the next token, and return it."""
        taken = self.next
        self.next = self.scan(taken.start + len(taken.text))
        return taken

    def accept(self, text: str) -> Lexeme | None:
        """Consume the next token if it is that mark or bare word; else return None."""
        return self.take() if self.next.text == text and self.next.kind in ("mark", "word") else None

    def expect(self, text: str, wanted: str = "") -> Lexeme:
        """Consume that mark or bare word. Raises ParseError for any other token."""
        return self.accept(text) or self.refuse(wanted or f"'{text}'")

    def kind(self, *kinds: str) -> Lexeme:
        """Consume the next token if it is of one of these kinds. Raises ParseError for any other token."""
        return self.take() if self.next.kind in kinds else self.refuse(self.names.get(kinds[0], f"a {kinds[0]}"))

    def integer(self) -> int:
        """Read an integer with its sign."""
        sign = -1 if self.accept("-") else 1
        return sign * int(self.kind("int").text)

    def string(self) -> str:
        """Read a string, and return its content."""
        return unquote(self.kind("string").text)

    def one_of(self, table: Mapping[str, T], what: str) -> T:
        """Read a bare word, and return its value in ``table``. Raises ParseError for any other word."""
        lexeme = self.kind("word")
        if lexeme.text not in table:
            raise self.error(f"unknown {what} '{lexeme.text}': use one of {', '.join(table)}", lexeme)
        return table[lexeme.text]

    def nest(self, step: int) -> None:
        """Change the depth of nesting by ``step``. Raises ParseError if it becomes too deep."""
        self.depth += step
        if self.depth > MAX_DEPTH:
            raise self.error(f"this is nested more than {MAX_DEPTH} deep", self.next)

    def items(self, item: Callable[[], T], brackets: str, separator: str = ",") -> list[T]:
        """Read ``item``s in ``brackets``, separated by ``separator``."""
        self.expect(brackets[0])
        self.nest(1)
        found: list[T] = []
        while not self.accept(brackets[1]):
            found.append(item())
            if separator and self.next.text != brackets[1]:
                self.expect(separator, f"'{separator}' or '{brackets[1]}'")
        self.nest(-1)
        return found
