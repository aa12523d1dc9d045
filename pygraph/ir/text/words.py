"""The words of ``.pgir`` text: which names are written bare, how others and strings are quoted, how literals look.

Shared by the printer and the parser, so that both agree.
"""

from __future__ import annotations

import re
import sys

__all__ = [
    "COST_FIELDS",
    "LITERAL_WORDS",
    "name_text",
    "quote",
    "symbol_text",
    "unquote",
    "word_text",
]

COST_FIELDS = ("flops", "read", "written", "launches", "host_us")
"""Annotation names that hold a node's cost; see also ``node.RESERVED``."""

LITERAL_WORDS: dict[str, object] = {
    "None": None,
    "true": True,
    "false": False,
    "inf": float("inf"),
    "nan": float("nan"),
}
"""Bare words that are literals; names of dtypes are the others."""

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:(?:\.|::)[A-Za-z0-9_]+)*")
_NAME = re.compile(r"[A-Za-z0-9_]+")
_SYMBOL = re.compile(r"[A-Za-z0-9_.]+")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_SHORT = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f"}
_ESCAPED = {"\n": "\\n", "\t": "\\t", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


def quote(text: str) -> str:
    """``text`` in double quotes, with everything that is not printable escaped."""
    return f'"{"".join(map(_escape, text))}"' if not _is_plain(text) else f'"{text}"'


def unquote(text: str) -> str:
    """The string that ``quote`` wrote. Raises ValueError for an escape that does not exist."""
    body = text[1:-1]
    return _ESCAPE.sub(_unescape, body) if "\\" in body else body


def word_text(name: str) -> str:
    """An operator, attribute or annotation name: bare where it reads as a word, else quoted."""
    return name if _WORD.fullmatch(name) else quote(name)


def name_text(name: str) -> str:
    """The name of a node or value, without its sigil."""
    return name if _NAME.fullmatch(name) else quote(name)


def symbol_text(name: str) -> str:
    """The name of a graph or device, without its sigil."""
    return name if _SYMBOL.fullmatch(name) else quote(name)


def _is_plain(text: str) -> bool:
    return text.isprintable() and '"' not in text and "\\" not in text


def _escape(char: str) -> str:
    if char in _ESCAPED:
        return _ESCAPED[char]
    if char.isprintable():
        return char
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


def _unescape(match: re.Match[str]) -> str:
    short, long, char = match.groups()
    if char is None:
        code = int(short or long, 16)
        if code > sys.maxunicode:
            raise ValueError(f"there is no character '{match.group()}'")
        return chr(code)
    if char not in _SHORT:
        raise ValueError(f"unknown escape '\\{char}'")
    return _SHORT[char]
