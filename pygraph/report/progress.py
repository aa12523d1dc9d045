"""Progress of long work, on stderr: nothing within the first two seconds, then a line that moves, or a log record.

What the work is and how far it came is told by the caller; nothing here knows what is worked on.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

__all__ = ["QUIET_SECONDS", "working"]

QUIET_SECONDS = 2.0
"""Work that takes no longer than this shows nothing."""

_log = logging.getLogger("pygraph")
_outer: list[_Work] = []


@contextmanager
def working(title: str, *, moving: bool = True) -> Iterator[Callable[[str], None]]:
    """Show that ``title`` is under way, for as long as the context lasts. Yields what tells the current step.

    On a terminal a line moves on stderr, or, where ``moving`` is False (the work itself prints, or reads keys), each
    step becomes a line of its own. Elsewhere steps are logged at INFO. Inside of another ``working``, steps are
    steps of that one.
    """
    if _outer:
        outer = _outer[-1]
        outer.step(title)
        yield lambda text: outer.step(f"{title}: {text}")
        return
    work = _Work(title, moving)
    _outer.append(work)
    work.start()
    try:
        yield work.step
    finally:
        work.stop()
        _outer.remove(work)


class _Work:
    """One piece of work and the timer that makes it visible."""

    def __init__(self, title: str, moving: bool) -> None:
        self.title = title
        self.moving = moving
        self.text = title
        self._lock = threading.Lock()
        self._shown = False
        self._progress: Progress | None = None
        self._timer = threading.Timer(QUIET_SECONDS, self._show)
        self._timer.daemon = True

    def start(self) -> None:
        if sys.stderr.isatty() and self.moving:
            self._progress = _moving_line(self.text)
        self._timer.start()

    def step(self, text: str) -> None:
        with self._lock:
            self.text = f"{self.title}: {text}"
            if self._shown:
                self._tell()

    def stop(self) -> None:
        self._timer.cancel()
        with self._lock:
            if self._shown and self._progress is not None:
                self._progress.stop()
            self._shown = True  # a timer that fires just now finds nothing to do

    def _show(self) -> None:
        with self._lock:
            if self._shown:
                return
            self._shown = True
            if self._progress is not None:
                self._progress.start()
            self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], description=self.text)
        elif sys.stderr.isatty():
            print(f"pygraph: {self.text} …", file=sys.stderr, flush=True)
        else:
            _log.info("%s", self.text)


def _moving_line(text: str) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    both = sys.stdout.isatty()
    progress = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=both)
    progress.add_task(text, total=None)
    return progress
