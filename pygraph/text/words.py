"""The words of ``.pgir`` text: names that are written bare, and quoting of other names and of strings.

The printer and the parser share this module, so that they agree.
"""

from __future__ import annotations

import re

WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:(?:\.|::)[A-Za-z0-9_]+)*")
_ESCAPE = r'\\(?:["\\ntr]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4})'
QUOTED = rf'"(?:[^"\\\n]|{_ESCAPE})*"'
NAME = re.compile(r"[A-Za-z0-9_]+(?:(?:\.[0-9]+)*\.[0-9]*[A-Za-z_][A-Za-z0-9_]*)*")
"""A bare name of a node or value. Its last part is not a number: in ``%name.0``, that is the index of a result."""
_SYMBOL = re.compile(r"[A-Za-z0-9_.]+")
_SPECIAL = re.compile(r"[^ -!#-\[\]-~]")


def quote(text: str) -> str:
    """``text`` in double quotes, with quotes, backslashes and unprintable characters escaped as in Python."""
    return f'"{_SPECIAL.sub(_escape, text)}"'


def unquote(text: str) -> str:
    """The string whose quoted form is ``text``."""
    return text[1:-1].encode("ascii", "backslashreplace").decode("unicode_escape") if "\\" in text else text[1:-1]


def word_text(name: str) -> str:
    """The name of an operator, attribute or annotation: bare if it is a word, else quoted."""
    return name if WORD.fullmatch(name) else quote(name)


def name_text(name: str) -> str:
    """The name of a node or value, without its sigil."""
    return name if NAME.fullmatch(name) else quote(name)


def symbol_text(name: str) -> str:
    """The name of a graph or device, without its sigil."""
    return name if _SYMBOL.fullmatch(name) else quote(name)


def _escape(match: re.Match[str]) -> str:
    char = match[0]
    if char == '"':
        return '\\"'
    return char if char.isprintable() and char != "\\" else char.encode("unicode_escape").decode("ascii")
