"""PYGRAPH_LOGS: level and handler of the package's logger. Progress: a line on a terminal, records elsewhere."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import redirect_stderr

import pytest

from pygraph.logs import configure, progress_lines, working


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    found = logging.getLogger("pygraph")
    state = found.level, list(found.handlers), found.propagate
    yield found
    found.level, found.handlers, found.propagate = state


def test_without_the_variable_nothing_changes(logger: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYGRAPH_LOGS", raising=False)
    before = logger.level, list(logger.handlers)
    configure()
    assert (logger.level, logger.handlers) == before


def test_a_level_is_set_with_one_handler(logger: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    for level in ("INFO", "debug"):
        monkeypatch.setenv("PYGRAPH_LOGS", level)
        configure()
    assert logger.level == logging.DEBUG
    assert [handler.get_name() for handler in logger.handlers].count("pygraph-stderr") == 1


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_line_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()

    def fail() -> None:
        with working("long [bold]work[/]") as step:
            step("call 1 of 3")
            raise ValueError("broken")

    with redirect_stderr(stream), pytest.raises(ValueError, match="broken"):
        fail()
    assert "long [bold]work[/]" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[2K"), "the line is erased"


def test_elsewhere_progress_is_logged(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pygraph")
    with working("outer"), working("inner") as step:
        step("one")
    assert caplog.messages == ["outer", "inner", "inner: one"]
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("logger")
def test_a_command_prints_a_line_for_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Unless the log has them, and never on a terminal; also where the process has worked before."""
    with working("earlier"):
        pass
    with progress_lines(), working("calibrating") as step:
        step("round 1 of 2")
    assert capsys.readouterr() == ("", "calibrating\ncalibrating: round 1 of 2\n")
    with working("later"):
        pass
    with redirect_stderr(Terminal()) as stream, progress_lines():
        step("round 2 of 2")
    assert stream.getvalue() == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYGRAPH_LOGS", "warning")
        with progress_lines():
            step("round 2 of 2")
    assert capsys.readouterr() == ("", "")


def test_work_within_work_on_a_terminal_shows_the_outer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with redirect_stderr(stream), working("outer"), working("inner"):
        pass
    assert "outer" in stream.getvalue()
