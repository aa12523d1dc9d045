"""The command line: ``pygraph bench``, ``calibrate``, ``explain``, ``opt``, ``passes``, ``profile``, ``run``.

Each command is in a module of its name, which is imported on use; torch is imported when a command needs it: ``opt``
and ``passes`` work on text and start fast. For bad input, a command prints a place and a reason on stderr, without a
traceback, and exits with status 1.
"""

from __future__ import annotations

import importlib
import io
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, Any

import click

from pygraph import __version__
from pygraph.errors import ProgramError, PygraphError, Span
from pygraph.logs import configure, progress_lines
from pygraph.text.words import name_text

_COMMANDS = ("bench", "calibrate", "explain", "opt", "passes", "profile", "run")
_CODES = """
\b
Exit status:
  0  done
  1  error in a file, a graph, a pipeline or the script; stderr has the place. 'run': a result differs
  2  invalid command line
  3  'explain --strict' or '--min-coverage': less was captured than required
"""


class Failure(click.ClickException):
    """Ends a command with exit status 1 and an unchanged message."""

    exit_code = 1

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message on stderr."""
        click.echo(self.message, file=file or sys.stderr)


@contextmanager
def failing(source: str = "", text: str = "") -> Iterator[None]:
    """Turn PyGraph's exceptions into a Failure. If an exception names a node or launch, the Failure points at it in
    ``text``, which was read from ``source``."""
    try:
        yield
    except PygraphError as error:
        if isinstance(error, ProgramError):
            name = f"l{error.launch}"
        elif hasattr(error, "node"):
            name = f"[%^]{re.escape(name_text(error.node or ''))}"
        else:
            raise Failure(str(error)) from error
        # a node made by a pass has no line
        defined = re.search(rf"^[^\S\n]*({name})(?=[\s:=])", text, re.MULTILINE)
        if defined is None:
            raise Failure(f"{source}: {error}") from error
        before = text[: defined.start(1)]
        span = Span(before.count("\n") + 1, len(before) - before.rfind("\n"), len(defined[1]))
        raise Failure(f"{source}:{span.line}:{span.column}: {error}\n{span.underline(text)}") from error


def read_text(file: IO[str]) -> str:
    """The content of ``file``. Raises Failure if it is not UTF-8 text."""
    try:
        return file.read()
    except UnicodeDecodeError as error:
        raise Failure(f"{file.name}: is no UTF-8 text: {error}") from error


@contextmanager
def writing(*paths: str | None) -> Iterator[list[IO[Any] | None]]:
    """Output files, ``-`` for stdout, opened at the start, so that a long run does not fail at its end."""
    with ExitStack() as stack:
        try:
            files = [
                None if path is None else stack.enter_context(click.open_file(path, "w", encoding="utf-8"))
                for path in paths
            ]
        except OSError as error:
            raise Failure(f"{error.filename}: cannot be written: {error.strerror}") from error
        yield files


class ScriptCommand(click.Command):
    """A command that takes a script and its arguments. It refuses unknown options before '--'."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does. The UsageError for an unknown option says how to pass it to the script."""
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

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve as click does. The UsageError for an unknown command names the nearest known one."""
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            from pygraph.passes.pipeline import nearest  # takes a while

            ctx.fail(f"no command is called '{args[0]}'{nearest(args[0], _COMMANDS)}")
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, epilog=_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pygraph", message="%(prog)s %(version)s")
def main() -> None:
    """Report what PyGraph captures of a program, and run its passes on graphs in files."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # some terminals lack characters of reports
    with failing():
        configure()
    click.get_current_context().with_resource(progress_lines())
