"""The command line: ``pygraph bench``, ``calibrate``, ``explain``, ``opt``, ``passes``. One module per command.

A command is imported when it is named, and torch when a command needs it: ``opt`` and ``passes`` work on text and start
fast. A command fails with a place and a reason on stderr and exit status 1, never with a traceback for bad input.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

from pygraph import __version__
from pygraph.errors import PassError, PygraphError, Span, VerifyError
from pygraph.ir.text.words import name_text
from pygraph.logs import configure

__all__ = ["Failure", "ScriptCommand", "failing", "main", "write_out"]

_COMMANDS = ("bench", "calibrate", "explain", "opt", "passes")
_CODES = """
\b
Exit status:
  0  done
  1  a file, a graph, a pipeline or the script is at fault; stderr says where
  2  the command line is wrong
  3  'explain --strict': something could not be captured
"""


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


class ScriptCommand(click.Command):
    """A command that takes a script and its arguments: options that it does not know are refused before '--'."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does. Raises UsageError that says how the script gets an option."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            hint = f"{error.format_message()} Options of the script go after '--'."
            raise click.UsageError(hint, error.ctx) from error


class _Commands(click.Group):
    """Finds each command in the module of its name."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - as click calls it
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:  # noqa: ARG002
        if name not in _COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"pygraph.cli.{name}"), name)
        return command


@click.group(cls=_Commands, epilog=_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pygraph", message="%(prog)s %(version)s")
def main() -> None:
    """Look at what PyGraph captures of a program, and run its passes on graphs in files."""
    with failing():
        configure()
