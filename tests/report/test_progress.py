"""Progress shows nothing for short work, a line on a terminal, and a log record elsewhere."""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import pytest

from pygraph.report import progress
from pygraph.report.progress import working


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def wait_for(shown: object, seconds: float = 10.0) -> None:
    """Until ``shown()`` holds."""
    end = time.monotonic() + seconds
    while not shown() and time.monotonic() < end:  # type: ignore[operator]
        time.sleep(0.005)


@contextmanager
def terminal() -> Iterator[Terminal]:
    """A terminal as stderr. No fixture, because pytest sets stderr anew between a test's set-up and its call."""
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(Terminal()) as stream:
        patch.setenv("TERM", "xterm")
        yield stream


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)


def test_short_work_shows_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pygraph")
    assert progress.QUIET_SECONDS == 2.0
    with terminal() as stream, working("short work") as step:
        step("one")
    assert stream.getvalue() == ""
    assert caplog.records == []


@pytest.mark.usefixtures("at_once")
def test_a_terminal_gets_a_line_that_goes_away() -> None:
    with terminal() as stream:
        with working("long [bold]work[/]") as step:
            step("call 1 of 3")
            wait_for(lambda: "call 1 of 3" in stream.getvalue())
            assert "long [bold]work[/]: call 1 of 3" in stream.getvalue()
        assert stream.getvalue().endswith("\x1b[2K"), "the line is erased"
        assert sys.stderr is stream


@pytest.mark.usefixtures("at_once")
def test_work_that_prints_gets_lines_of_its_own() -> None:
    with terminal() as stream:
        with working("running net.py", moving=False) as step:
            wait_for(lambda: stream.getvalue().endswith("\n"))
            step("compiling graph0_inference")
        assert stream.getvalue() == (
            "pygraph: running net.py …\npygraph: running net.py: compiling graph0_inference …\n"
        )


@pytest.mark.usefixtures("at_once")
def test_elsewhere_it_is_logged(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pygraph")
    with working("long work"):
        wait_for(lambda: caplog.messages)
    assert caplog.messages == ["long work"]
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("at_once")
def test_work_within_work_is_a_step(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pygraph")
    with working("outer"):
        wait_for(lambda: caplog.messages)
        with working("inner") as step:
            step("one")
    assert caplog.messages == ["outer", "outer: inner", "outer: inner: one"]


@pytest.mark.usefixtures("at_once")
def test_it_ends_with_the_work_also_when_that_fails() -> None:
    def fail() -> None:
        with working("long work"):
            wait_for(stream.getvalue)
            raise ValueError("broken")

    with terminal() as stream:
        with pytest.raises(ValueError, match="broken"):
            fail()
        before = stream.getvalue()
        assert "long work" in before
        time.sleep(0.3)
        assert stream.getvalue() == before
    assert progress._outer == []
