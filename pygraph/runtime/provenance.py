"""Where in a region's function, and in the user's program, the thread that captures it is right now.

A region says which operators the lines of its function run; drivers ask while they capture, and tell of Python bodies
that they run. Nothing is kept after it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["UNKNOWN", "Failure", "Origin", "blame", "blamed", "forgive", "here", "merged", "ran", "tracing"]

_SHOWN = 3
"""Lines of the user's that one launch is said to come from; more are counted."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What one line runs: the operators of the compiled graph by name (several, where it cannot be told which of them
    it is), and the user's line or lines, if known."""

    nodes: tuple[str, ...] = ()
    locs: tuple[str, ...] = ()

    @property
    def loc(self) -> str | None:
        """The user's lines as one text, or None."""
        more = [f"and {len(self.locs) - _SHOWN} more"] if len(self.locs) > _SHOWN else []
        return ", ".join([*self.locs[:_SHOWN], *more]) or None


UNKNOWN = Origin()


@dataclass(frozen=True, slots=True)
class Failure:
    """The call that a capture failed in, and where it stands."""

    name: str
    origin: Origin


@dataclass
class _Trace:
    code: types.CodeType | None
    origins: Mapping[int, Origin]
    failure: Failure | None = field(default=None)
    ran: Counter[str] = field(default_factory=Counter)


_local = threading.local()


@contextlib.contextmanager
def tracing(fn: Callable[..., Any], origins: Mapping[int, Origin]) -> Iterator[Counter[str]]:
    """While open, ``here`` and ``blame`` on this thread speak of ``fn``, whose lines ``origins`` explains.

    Yields how often the body of each operator that is written in Python ran for a capture so far, by name.
    """
    outer = getattr(_local, "trace", None)
    _local.trace = _Trace(getattr(fn, "__code__", None), origins)
    try:
        yield _local.trace.ran
    finally:
        _local.trace = outer


def here() -> Origin:
    """What the line runs that the innermost frame of the traced function, or of a copy of it, has reached."""
    trace: _Trace | None = getattr(_local, "trace", None)
    if trace is None or trace.code is None or not trace.origins:
        return UNKNOWN
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not trace.code:
        frame = frame.f_back
    return UNKNOWN if frame is None else trace.origins.get(frame.f_lineno, UNKNOWN)


def blame(name: str, origin: Origin | None = None) -> None:
    """Note that the capture under way fails in the call ``name``: the first one to be blamed since ``forgive``."""
    trace: _Trace | None = getattr(_local, "trace", None)
    if trace is not None and trace.failure is None:
        trace.failure = Failure(name, here() if origin is None else origin)


def ran(name: str) -> None:
    """Count a run of the body of the operator ``name``, for the capture under way."""
    trace: _Trace | None = getattr(_local, "trace", None)
    if trace is not None:
        trace.ran[name] += 1


def forgive() -> None:
    """Forget who was blamed: another capture begins."""
    trace: _Trace | None = getattr(_local, "trace", None)
    if trace is not None:
        trace.failure = None


def blamed(error: BaseException) -> Failure | None:
    """The call that ``error`` is blamed on; where nobody was blamed, the line of the traced function that it came
    through, if that runs anything."""
    trace: _Trace | None = getattr(_local, "trace", None)
    if trace is None:
        return None
    if trace.failure is not None:
        return trace.failure
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code is not trace.code:
        step = step.tb_next
    origin = UNKNOWN if step is None else trace.origins.get(step.tb_lineno, UNKNOWN)
    return Failure(", ".join(origin.nodes), origin) if origin.nodes else None


def merged(origins: list[Origin]) -> Origin:
    """Everything that any of ``origins`` names, in order."""
    nodes = dict.fromkeys(name for origin in origins for name in origin.nodes)
    locs = dict.fromkeys(loc for origin in origins for loc in origin.locs)
    return Origin(tuple(nodes), tuple(locs))
