"""The section in which a region is captured: one thread at a time, signals wait, and torch's modes
are as before when it is over, whatever was raised.

    a signal comes while                           its handler runs
    a region is captured or compared               before the user's own run, or when all is over
    …, and another one came before in the call     at once
    the user's own run answers the call            at once
    what a capture has changed is put back         right after

Python code runs meanwhile that is not PyGraph's: operators, finalisers, handlers of signals. So nobody waits for the
turn to capture, and everything here may be left at any point by any exception.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch

from pygraph.compat import (
    dispatch_mode_depth,
    dispatch_mode_flags,
    pop_dispatch_mode,
    set_dispatch_mode_flags,
    set_grad_enabled,
)
from pygraph.errors import CaptureError

capturing: list[int] = []
"""The ident of the thread that captures or compares now, followed by those that are about to be turned away."""

_Made = TypeVar("_Made", bound=Callable[..., Any])

_unbroken: set[CodeType] = set()


def unbroken(function: _Made) -> _Made:
    """Make signals wait while ``function``, or anything that it calls, runs: it restores an earlier state."""
    _unbroken.add(function.__code__)
    return function


@contextlib.contextmanager
@unbroken
def capturing_turn() -> Iterator[bool]:
    """Yields whether this thread may capture until the block is left: if so, no other thread captures, and signals
    wait. It may be entered again."""
    me = threading.get_ident()
    entered = me in capturing
    try:
        if not entered:
            capturing.append(me)
        mine = capturing[0] == me
        with _critical() if mine else contextlib.nullcontext():
            yield mine
    finally:
        if not entered and me in capturing:
            capturing.remove(me)


@contextlib.contextmanager
@unbroken
def without_collection() -> Iterator[None]:
    """Python collects no garbage until the block is left. Otherwise, the short-lived objects of a capture would count
    as lasting ones, and so many make Python scan all objects: that takes a second once torch has compiled."""
    collecting = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
@unbroken
def only_capture() -> Iterator[None]:
    """A driver's section: this thread's turn, without garbage collection, since actions of a finaliser would be
    captured, too. Raises CaptureError (``capture-busy``) if another thread captures."""
    with capturing_turn() as mine:
        if not mine:
            raise CaptureError("capture-busy", "another thread captures")
        with without_collection():
            yield


@contextlib.contextmanager
@unbroken
def _critical() -> Iterator[None]:
    """A signal waits until the block is left, and an exception leaves this thread's dispatch modes and gradient mode,
    and garbage collection, as they were."""
    depth, flags = dispatch_mode_depth(), dispatch_mode_flags()
    gradients, collecting = torch.is_grad_enabled(), gc.isenabled()
    with _signals_waiting():
        try:
            yield
        except BaseException:
            while dispatch_mode_depth() > depth:
                pop_dispatch_mode(None)
            set_dispatch_mode_flags(flags)
            set_grad_enabled(gradients)
            if collecting:
                gc.enable()
            raise


def interruptible(run: Callable[[list[Any]], Sequence[Any]], args: list[Any]) -> Sequence[Any]:
    """The user's own ``run``, in a call that captures: waiting signals are handled before it, later ones at once."""
    waiting = _waiting
    if waiting is None or waiting.thread != threading.get_ident():
        return run(args)
    try:
        waiting.answering = True
        waiting.handle(sys._getframe())
        return run(args)
    finally:
        waiting.answering = False


class _Waiting:
    """A handler in place of those that it ``replaced``, on one ``thread``. It makes the first signal wait, and calls
    the replaced handler once for each signal: directly, since a signal of its own would wake event loops again. It may
    stay installed, with ``over`` set, if a handler raises while handlers are restored."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.replaced: dict[int, Any] = {}
        self.noted: list[int] = []
        self.came = 0
        self.answering = self.over = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.over:
            self.put_back(number)
            self.replaced[number](number, frame)
            return
        self.came += 1
        self.noted.append(number)
        if self.answering or (self.came > 1 and not _puts_back(frame)):
            self.handle(frame)

    def handle(self, frame: FrameType | None) -> None:
        """Call the handler of each signal that waits, in order, whatever another one raises."""
        noted, self.noted = self.noted, []
        with contextlib.ExitStack() as steps:
            for number in reversed(noted):
                steps.callback(self.replaced[number], number, frame)

    def finish(self, frame: FrameType) -> None:
        """Let no signal wait any more."""
        self.over = True
        self.handle(frame)

    def put_back(self, number: int) -> None:
        """Restore the handler of a signal, unless code in the block has set another one."""
        current: object = signal.getsignal(number)
        if current is self:
            signal.signal(number, self.replaced[number])


def _puts_back(frame: FrameType | None) -> bool:
    """True if an exception that is raised in ``frame`` may prevent a state from being restored, or be swallowed."""
    if frame is not None and frame.f_code.co_name in ("__enter__", "__exit__"):
        return True
    while frame is not None:
        if frame.f_code in _unbroken or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


_waiting: _Waiting | None = None
"""The section that holds signals back now."""


@contextlib.contextmanager
@unbroken
def _signals_waiting() -> Iterator[None]:
    """A signal that Python code handles, such as Ctrl-C, waits until the block is left, or another one comes.

    Python handles signals only on the main thread: on other threads, this does nothing.
    """
    global _waiting
    if threading.current_thread() is not threading.main_thread() or _waiting is not None:
        yield
        return
    waiting = _Waiting()
    try:
        _waiting = waiting
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if isinstance(handler, _Waiting):  # it stayed installed
                handler = handler.replaced[number]
            if callable(handler):
                waiting.replaced[number] = handler
                signal.signal(number, waiting)
        yield
    finally:
        _waiting = None
        with contextlib.ExitStack() as steps:  # from the last to the first, also where handlers raise meanwhile
            steps.callback(waiting.finish, sys._getframe())
            for replaced in waiting.replaced:
                steps.callback(waiting.put_back, replaced)


def _in_child() -> None:
    """A forked process has only the thread that forked: captures of other threads never end there."""
    global _waiting
    capturing.clear()
    if _waiting is not None and _waiting.thread != threading.get_ident():
        _waiting.over, _waiting = True, None


os.register_at_fork(after_in_child=_in_child)
