"""Commands, run as a user would."""

from __future__ import annotations

import click
from click.testing import CliRunner, Result

from pygraph.cli import main


def run(*args: object, stdin: str | bytes | None = None, command: click.Command = main) -> Result:
    """Run ``pygraph ARGS``; an exception that would show as a traceback fails the test."""
    result = CliRunner().invoke(command, list(map(str, args)), input=stdin, prog_name="pygraph")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert "Traceback" not in result.stderr
    return result
