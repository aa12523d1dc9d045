"""What holds while a region is captured and compared: one thread does so at a time, signals wait, and torch's modes are
as before when it is over, whatever was raised.

Python code runs meanwhile that is not PyGraph's: operators, finalisers, handlers of signals. So nobody waits for the
turn to capture, and everything here may be left at any point by any exception.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import torch

from pygraph.compat import (
    dispatch_mode_depth,
    dispatch_mode_flags,
    pop_dispatch_mode,
    set_dispatch_mode_flags,
    set_grad_enabled,
)
from pygraph.errors import CaptureError

__all__ = ["capturing", "capturing_turn", "only_capture"]

capturing: list[int] = []
"""The thread that captures or compares now, by its ident; behind it, those that are about to be turned away."""

os.register_at_fork(after_in_child=capturing.clear)


@contextlib.contextmanager
def capturing_turn() -> Iterator[bool]:
    """Yields whether this thread may capture until the block is left: no other one does, and signals wait. It may be
    entered again."""
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
def only_capture() -> Iterator[None]:
    """What a driver captures in: this thread's turn, without garbage collection, since what a finaliser does would be
    captured too. Raises CaptureError (``capture-busy``) if another thread captures."""
    with capturing_turn() as mine:
        if not mine:
            raise CaptureError("capture-busy", "another thread captures")
        collecting = gc.isenabled()
        try:
            gc.disable()
            yield
        finally:
            if collecting:
                gc.enable()


@contextlib.contextmanager
def _critical() -> Iterator[None]:
    """Signals are handled when the block is left, and an exception leaves this thread's dispatch modes and gradient
    mode, and garbage collection, as they were."""
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


class _Waiting:
    """A handler that notes signals for as long as it is ``open``. Then it does what those that it ``replaced`` do: they
    may raise while they are put back, and leave it behind."""

    def __init__(self) -> None:
        self.open = True
        self.noted: list[int] = []
        self.replaced: dict[int, Any] = {}

    def __call__(self, number: int, frame: object) -> None:
        if self.open:
            if number not in self.noted:
                self.noted.append(number)
            return
        signal.signal(number, self.replaced[number])
        self.replaced[number](number, frame)

    def put_back(self, number: int) -> None:
        """Make the handler of a signal the one it was, unless code in the block has set another one."""
        current: object = signal.getsignal(number)
        if current is self:
            signal.signal(number, self.replaced[number])


@contextlib.contextmanager
def _signals_waiting() -> Iterator[None]:
    """Signals that Python code handles, such as Ctrl-C, are noted, and raised again when the block is left.

    Python handles signals on the main thread alone: elsewhere nothing is to be done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting = _Waiting()
    try:
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if isinstance(handler, _Waiting) and not handler.open:
                handler = handler.replaced[number]
            if callable(handler):
                waiting.replaced[number] = handler
                signal.signal(number, waiting)
        yield
    finally:
        waiting.open = False
        with contextlib.ExitStack() as steps:  # from the last to the first, also where handlers raise meanwhile
            for noted in reversed(waiting.noted):
                steps.callback(signal.raise_signal, noted)
            for replaced in waiting.replaced:
                steps.callback(waiting.put_back, replaced)
