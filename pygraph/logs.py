"""The ``pygraph`` logger, and the progress of long work.

Everything in the package logs to ``pygraph``. ``PYGRAPH_LOGS`` sets its level and gives it a handler on stderr; an
application that configures logging itself does not need it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from pygraph.errors import OptionError

_steps = logging.getLogger("pygraph.progress")

VARIABLE = "PYGRAPH_LOGS"
"""The environment variable that sets the level."""
_LEVELS = ("debug", "info", "warning", "error")
_HANDLER = "pygraph-stderr"


def configure() -> None:
    """Set up the logger as the environment variable says, if set. Raises OptionError for an unknown level."""
    level = os.environ.get(VARIABLE, "").lower()
    if not level:
        return
    if level not in _LEVELS:
        raise OptionError(f"{VARIABLE} must be one of {', '.join(_LEVELS)}, not '{level}'")
    logger = logging.getLogger("pygraph")
    logger.setLevel(level.upper())
    if all(handler.get_name() != _HANDLER for handler in logger.handlers):
        handler = logging.StreamHandler()
        handler.set_name(_HANDLER)
        handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


class _Lines(logging.Handler):
    """Prints messages on the current ``sys.stderr``."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # its reader is gone
            print(record.getMessage(), file=sys.stderr, flush=True)


@contextmanager
def progress_lines() -> Iterator[None]:
    """For commands: print each step as a line on stderr, unless it is a terminal or a log shows them."""
    if sys.stderr.isatty() or os.environ.get(VARIABLE):
        yield
        return
    handler, before = _Lines(), (_steps.level, _steps.propagate)
    _steps.addHandler(handler)
    _steps.setLevel(logging.INFO)  # not by assignment: a logger caches the levels that it ignores
    _steps.propagate = False
    try:
        yield
    finally:
        _steps.removeHandler(handler)
        _steps.setLevel(before[0])
        _steps.propagate = before[1]


def step(text: str) -> None:
    """Log that a step of long work begins."""
    _steps.info("%s", text)


@contextmanager
def working(title: str) -> Iterator[Callable[[str], None]]:
    """Show that ``title`` is under way while the context lasts. Yields a function that shows the current step.

    On a terminal, a progress line is shown on stderr; elsewhere, or if another one is shown there, steps are logged at
    INFO by ``pygraph.progress``.
    """
    if sys.stderr.isatty():
        from rich.console import Console  # takes a while
        from rich.errors import LiveError
        from rich.live import Live
        from rich.spinner import Spinner
        from rich.text import Text

        line = Spinner("dots", Text(title))
        live = Live(line, console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty())
        try:
            live.start()
        except LiveError:
            pass
        else:
            with live:
                yield lambda text: line.update(text=Text(f"{title}: {text}"))
            return
    step(title)
    yield lambda text: step(f"{title}: {text}")
