"""Why a region is not replayed, and where in the user's program the reason lies.

A region knows the operators that each line of its function runs. While a driver captures, it asks ``here`` for the
current line's operators, names a failing call with ``blame``, and counts Python bodies with ``ran``. A failed capture
results in a Refusal: data with a reason code (of a CaptureError, or of discovery or comparison), never an exception.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pygraph.errors import CaptureError
from pygraph.program.recording import UNKNOWN, Launch, Origin


class _Trace(threading.local):
    """State of each thread: the traced function, if any, the origins of its lines, and the outcome of its capture."""

    def __init__(self) -> None:
        self.code: types.CodeType | None = None
        self.lines: tuple[list[int], list[int]] | None = None
        self.origins: Mapping[int, Origin] | Callable[[], Origin] = {}
        self.failure: tuple[str, Origin] | None = None
        self.ran: Counter[str] = Counter()


_trace = _Trace()


@contextlib.contextmanager
def tracing(fn: Callable[..., Any], origins: Mapping[int, Origin] | Callable[[], Origin]) -> Iterator[Counter[str]]:
    """While open, ``here`` and ``blame`` on this thread refer to ``fn``; ``origins``: origins of its lines. Yields how
    often the body of each operator that is written in Python has run for a capture so far, by name."""
    outer = dict(vars(_trace))
    vars(_trace).update(code=getattr(fn, "__code__", None), lines=None, origins=origins, failure=None, ran=Counter())
    try:
        yield _trace.ran
    finally:
        vars(_trace).update(outer)


def here() -> Origin:
    """The origin of the line that the innermost frame of the traced function, or of a copy of it, has reached."""
    if callable(_trace.origins):
        return _trace.origins()
    frame = sys._getframe(1) if _trace.origins else None
    while frame is not None and frame.f_code is not _trace.code:
        frame = frame.f_back
    return UNKNOWN if frame is None else _trace.origins.get(_line(frame), UNKNOWN)


def _line(frame: types.FrameType) -> int:
    """The line of ``frame``, one of the traced function. Python computes its ``f_lineno`` by a walk from the first line
    on, which takes 50 µs in a long function."""
    if _trace.lines is None:
        _trace.lines = _lines(frame.f_code)
    starts, lines = _trace.lines
    return lines[bisect_right(starts, frame.f_lasti) - 1]


def _lines(code: types.CodeType) -> tuple[list[int], list[int]]:
    """The offsets in ``code`` at which another line begins, and these lines."""
    starts, lines = [0], [code.co_firstlineno]
    for start, _, line in code.co_lines():
        if line is not None and line != lines[-1]:
            starts.append(start)
            lines.append(line)
    return starts, lines


def blame(name: str, origin: Origin | None = None) -> None:
    """Note that the capture under way fails in the call ``name``: the first one to be blamed since ``reset_blame``."""
    if _trace.failure is None:
        _trace.failure = (name, here() if origin is None else origin)


@contextlib.contextmanager
def blaming(name: str, blame: Callable[[str], None] = blame) -> Iterator[None]:
    """Blame the call ``name`` for any exception in the block: operators and kernels raise anything."""
    try:
        yield
    except Exception:
        blame(name)
        raise


def blamed() -> str | None:
    """The call that was blamed since ``reset_blame``, even if its exception was caught."""
    return None if _trace.failure is None else _trace.failure[0]


def ran(name: str) -> None:
    """Count a run of the body of the operator ``name``, for the capture under way."""
    _trace.ran[name] += 1


def reset_blame() -> None:
    """Forget who was blamed: another capture begins."""
    _trace.failure = None


def merged(origins: list[Origin]) -> Origin:
    """Everything that any of ``origins`` names, in order."""
    nodes = dict.fromkeys(name for origin in origins for name in origin.nodes)
    locs = dict.fromkeys(loc for origin in origins for loc in origin.locs)
    modules = dict.fromkeys(module for origin in origins for module in origin.modules)
    return Origin(tuple(nodes), tuple(locs), tuple(modules))


def _raised_at(error: BaseException) -> Origin:
    """The origin of the line of the traced function through which ``error`` came."""
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code is not _trace.code:
        step = step.tb_next
    if step is None or callable(_trace.origins):
        return UNKNOWN
    return _trace.origins.get(step.tb_lineno, UNKNOWN)


_NO_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
"""Messages of errors that have no class in torch: of the CUDA runtime, the CPU's allocator, and libraries."""


def is_out_of_memory(error: BaseException) -> bool:
    """True if ``error`` means that memory was short, which may pass."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A ``reason`` code, its ``detail`` in words, and its place: the launch's name and the user's line, if known, and
    the operators of the compiled graph from which it may have come (``nodes``). ``operators``: operators of the
    dispatcher that were called there."""

    reason: str
    detail: str = ""
    launch: str | None = None
    loc: str | None = None
    nodes: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()

    @classmethod
    def at(cls, launch: Launch, reason: str, detail: str) -> Refusal:
        """A refusal caused by ``launch``."""
        called = (launch.call or launch.name,)
        return cls(reason, detail, launch.name, launch.origin.loc, launch.origin.nodes, called)

    @classmethod
    def of(cls, error: BaseException) -> Refusal:
        """A failed capture's error, and the call in which it failed: the blamed call, or else the operators of the line
        of the traced function through which ``error`` came, if any. No call is blamed for a shortage of memory
        (``out-of-memory``). Only text is kept, so that no traceback keeps a tensor alive."""
        reason, detail = "capture-raised", f"{type(error).__name__}: {error}"
        if is_out_of_memory(error):
            return cls("out-of-memory", detail.split("\n")[0])
        if isinstance(error, CaptureError):
            reason, detail = error.reason, error.detail
        if _trace.failure is not None:
            name, origin = _trace.failure
        else:
            origin = _raised_at(error)
            name = ", ".join(origin.nodes)
        called = tuple(name.split(" or ")) if _trace.failure is not None else ()
        return cls(reason, detail, name, origin.loc, origin.nodes, called) if name else cls(reason, detail)

    def __str__(self) -> str:
        where = f" [{self.launch}{f' at {self.loc}' if self.loc else ''}]" if self.launch else ""
        return f"{self.reason}: {self.detail}{where}" if self.detail else f"{self.reason}{where}"
