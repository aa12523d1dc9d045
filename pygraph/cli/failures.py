"""How commands fail: a place and a reason on stderr and exit status 1, never a traceback for bad input.

Also where a node stands in a text, for errors that name a node rather than a place.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

from pygraph.errors import PassError, PygraphError, Span, VerifyError
from pygraph.ir.text.words import name_text

__all__ = ["Failure", "failing", "write_out"]


class Failure(click.ClickException):
    """Ends a command with exit status 1 and a message that is shown as it is."""

    exit_code = 1

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message on stderr."""
        click.echo(self.message, file=file or sys.stderr)


@contextmanager
def failing(source: str = "", text: str = "") -> Iterator[None]:
    """Turn PyGraph's exceptions into a Failure. ``text``, read from ``source``, shows the node that they name."""
    try:
        yield
    except (VerifyError, PassError) as error:
        raise Failure(_at_node(str(error), error.node, source, text)) from error
    except PygraphError as error:
        raise Failure(str(error)) from error


def _at_node(message: str, node: str | None, source: str, text: str) -> str:
    span = None if node is None else _definition(node, text)
    if span is None:
        return f"{source}: {message}" if source else message
    return f"{source}:{span.line}:{span.column}: {message}\n{span.underline(text)}"


def _definition(node: str, text: str) -> Span | None:
    """Where ``node`` is defined in ``.pgir`` text; None where it is not (a pass may have made it)."""
    pattern = re.compile(rf"^\s*([%^]{re.escape(name_text(node))})(?=[\s:=])")
    for number, line in enumerate(text.splitlines(), 1):
        found = pattern.match(line)
        if found:
            return Span(number, found.start(1) + 1, len(found[1]))
    return None


def write_out(path: str, text: str) -> None:
    """Write ``text`` to a file, or to stdout for ``-``. Raises Failure when the file cannot be written."""
    if path == "-":
        encoding = sys.stdout.encoding or "utf-8"
        click.echo(text.encode(encoding, "replace").decode(encoding), nl=False)
        return
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise Failure(f"{path}: cannot be written: {error.strerror}") from error
