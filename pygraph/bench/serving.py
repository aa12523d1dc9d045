"""What a process does at each command, call by call: it is told to compile, to warm up, to run a block, to finish.

Whose calls these are, a workload's or a script's, is not known here: whoever makes them asks before each one.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from pygraph.bench.correctness import Kept
from pygraph.bench.protocol import Channel
from pygraph.bench.watching import decided, what_was_captured

__all__ = ["Serving"]

_SETTLING_SECONDS = 5.0
"""How long warming up goes on for measured selection that has not decided."""
_SETTLING_CALLS = 5000
"""How many calls it goes on for."""
_BETWEEN_LOOKS = 50
"""Calls between two looks whether it goes on."""
_FIRST_SECONDS = 1.5
"""How long the first calls are timed, if there are not enough of them before."""
_MEMORY_CALLS = 3
"""Calls over which the peak of memory is taken."""

Steps = Generator[bool, None, dict[str, Any]]


class Serving:
    """Answers commands of ``channel``; ``calls`` is an iterator to be advanced before each call of the program.

    It yields whether the result of the call is to be kept (``keep``), stays in ``next`` while the process is to wait,
    and ends when the process is to end. ``began`` may be set to the time at which the first call began. Results go to
    the file ``result``. Warming up goes on, for a time, while ``settling`` says that measuring is under way; it is done
    within ``alone``. ``more`` is told at the end beside what was captured.
    """

    def __init__(
        self,
        channel: Channel,
        device: str,
        result: Path | None = None,
        settling: Callable[[], bool] | None = None,
        alone: Callable[[], AbstractContextManager[None]] = nullcontext,
        more: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self.made = 0
        self.began = 0.0
        self._channel, self._kept = channel, Kept()
        self._result, self._settling = result, settling
        self._alone, self._more = alone, more
        self._gpu = device == "cuda"
        self._drain: Callable[[], None] = torch.cuda.synchronize if self._gpu else _nothing
        self.calls: Iterator[bool] = self._serve()

    def keep(self, result: Any) -> None:
        """Keep the result of the call that was made last."""
        self._kept.add(self.made, result)

    def save(self) -> None:
        """Put what was kept where it was asked for."""
        if self._result is not None:
            self._kept.save(self._result)

    def facts(self) -> dict[str, Any]:
        """What is known at the end of all calls."""
        return {**what_was_captured(), **self._more()}

    def _serve(self) -> Iterator[bool]:
        for command in self._channel.commands():
            does = command.pop("do")
            if does == "finish":
                self._channel.answer(self.facts())
                return
            served: dict[str, Callable[..., Steps]]
            served = {"compile": self._compile, "warm": self._warm, "block": self._block}
            with self._alone() if does == "warm" else nullcontext():
                row = yield from served[does](**command)
            self._channel.answer(row)

    def _call(self, keep: bool = False) -> Iterator[bool]:
        self.made += 1
        yield keep

    def _compile(self) -> Steps:
        """The first call, in s until it is done."""
        self.began = time.perf_counter()
        yield from self._call(True)
        self._drain()
        return {"compile_s": round(time.perf_counter() - self.began, 3)}

    def _warm(self, calls: int, seconds: float, first: int = 0) -> Steps:
        """``calls`` in all, and more until ``seconds`` have passed and measuring has ended; then memory is looked at.

        ``first``: how many of those that follow the ``calls`` are timed, measuring and all.
        """
        reserved, free = self._reserved(), self._free()
        while self.made < calls:
            yield from self._call(self._kept.has_room() or self.made + 1 == calls)
        self._drain()
        self.save()
        begun = (yield from self._first(first)) if first else {}
        yield from self._until(time.perf_counter() + seconds)
        gc.collect()
        if self._gpu:
            torch.cuda.empty_cache()  # what compiling and capturing left behind is nobody's
            torch.cuda.reset_peak_memory_stats()
        self._drain()
        start = time.perf_counter()
        for _ in range(_MEMORY_CALLS):
            yield from self._call()
        self._drain()
        each = (time.perf_counter() - start) / _MEMORY_CALLS
        found = {"call_us": each * 1e6, "calls": self.made, "decisions": decided(), **begun}
        return {**found, **self._memory(reserved, free)}

    def _first(self, calls: int) -> Steps:
        """Up to ``calls`` calls: how many there were, and µs per call until the device had done them all."""
        made, start = self.made, time.perf_counter()
        while self.made - made < calls and time.perf_counter() < start + _FIRST_SECONDS:
            yield from self._call()
        self._drain()
        count = self.made - made
        return {"first_calls": {"calls": count, "us": (time.perf_counter() - start) / count * 1e6}}

    def _until(self, end: float) -> Iterator[bool]:
        while time.perf_counter() < end:  # not drained in between, since a measurement that is under way would see it
            yield from self._call()
        last = self.made + _SETTLING_CALLS
        while self._settling is not None and self.made < last and time.perf_counter() < end + _SETTLING_SECONDS:
            if not self._settling():
                return
            for _ in range(_BETWEEN_LOOKS):
                yield from self._call()

    def _block(self, calls: int, lead: int) -> Steps:
        """``lead`` calls that do not count, then ``calls``, drained at both ends: µs per call.

        ``host``: until the calls had returned. ``wall``: until the device had done them. ``gpu``: between two events
        around them on the current stream, what the device waited for the host included.
        """
        for _ in range(lead):
            yield from self._call()
        self._drain()
        before, after = self._event(), self._event()
        start = time.perf_counter()
        if before is not None:
            before.record()
        for _ in range(calls):
            yield False
        if after is not None:
            after.record()
        issued = time.perf_counter()
        self._drain()
        done = time.perf_counter()
        self.made += calls
        row = {"host_us": (issued - start) / calls * 1e6, "wall_us": (done - start) / calls * 1e6}
        if before is not None and after is not None:
            row["gpu_us"] = before.elapsed_time(after) / calls * 1e3
        return row

    def _event(self) -> torch.cuda.Event | None:
        return torch.cuda.Event(enable_timing=True) if self._gpu else None

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved() if self._gpu else 0

    def _free(self) -> int:
        return torch.cuda.mem_get_info()[0] if self._gpu else 0

    def _memory(self, reserved: int, free: int) -> dict[str, Any]:
        """In bytes. What was taken from the device: what torch held when warming up began, and what has gone since.

        While a side warms up, the others wait, so that what goes meanwhile is its own: memory outside of torch's
        allocator included, such as that of graphs.
        """
        if not self._gpu:
            return {}
        return {
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.memory_reserved(),
            "device_bytes": reserved + free - self._free(),
        }


def _nothing() -> None:
    """There is no queue to drain on a CPU."""
