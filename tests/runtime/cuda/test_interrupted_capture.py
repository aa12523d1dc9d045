"""However a CUDA capture is left, it is ended, and its memory is let go of. Without a device."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import torch

from pygraph.errors import CaptureError
from pygraph.runtime.cuda.capture import _Attempt

ENDED = ["memory.end", "capture_end"]


class Graph:
    """A graph that notes what is asked of it; ``broken``: its capture cannot be ended."""

    def __init__(self, events: list[str], *, broken: bool = False, interrupts: str | None = None) -> None:
        self._events, self._broken, self._interrupts = events, broken, interrupts

    def capture_begin(self, **how: Any) -> None:
        self._note("capture_begin")

    def capture_end(self) -> None:
        self._note("capture_end")
        if self._broken:
            raise RuntimeError("operation failed due to a previous error during capture")

    def _note(self, event: str) -> None:
        self._events.append(event)
        if event == self._interrupts:  # as a signal that is handled when the call returns
            raise KeyboardInterrupt


class Memory:
    """The memory of a capture that notes when it is in use."""

    pool = None

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def begin(self) -> None:
        self._events.append("memory.begin")

    def end(self) -> None:
        self._events.append("memory.end")


def attempt(events: list[str], run: Any) -> _Attempt:
    """A capture in which the region is ``run``."""
    made = _Attempt.__new__(_Attempt)
    made._memory = Memory(events)  # type: ignore[assignment]
    made._observer = type("Observer", (), {"failed": None})()
    made._call = run  # type: ignore[method-assign]
    return made


def raising(error: BaseException) -> Any:
    def run() -> Any:
        raise error

    return run


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, MemoryError])
def test_what_says_nothing_about_the_region_ends_the_capture_and_is_raised(error: type[BaseException]) -> None:
    events: list[str] = []
    with pytest.raises(error):
        attempt(events, raising(error("x")))._run(Graph(events))  # type: ignore[arg-type]
    assert events == ["capture_begin", "memory.begin", *ENDED]


def test_an_interrupt_as_the_capture_begins_ends_it() -> None:
    events: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        attempt(events, list)._run(Graph(events, interrupts="capture_begin"))  # type: ignore[arg-type]
    assert events == ["capture_begin", *ENDED]


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_broken_capture_is_mended_by_an_empty_one(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | None
) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda **_: Graph(events))
    run = list if error is None else raising(error())
    with pytest.raises(error or CaptureError):
        attempt(events, run)._run(Graph(events, broken=True))  # type: ignore[arg-type]
    assert events == ["capture_begin", "memory.begin", *ENDED, "capture_begin", "capture_end"]


def test_the_callers_stream_is_current_again_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            events.append(f"{self.name} waits for {other.name}")

    caller, side = Stream("caller"), Stream("side")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: caller)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: events.append(f"on {stream.name}"))

    made = _Attempt.__new__(_Attempt)
    made._device = type(
        "Device", (), {"index": 0, "stream": side, "random_turn": staticmethod(contextlib.nullcontext)}
    )()
    with pytest.raises(KeyboardInterrupt), made._on_side_stream():
        raise KeyboardInterrupt
    assert events == ["side waits for caller", "on side", "on caller", "caller waits for side"]
