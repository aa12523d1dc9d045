"""Programs, callers and handicaps for a benchmark of measured selection: what is called, and what happens in between.

Nothing here times or judges: ``selection`` does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

__all__ = [
    "CALLERS",
    "PROGRAMS",
    "SCENARIOS",
    "After",
    "Delay",
    "Function",
    "Program",
    "Slowed",
    "arguments",
    "drain",
    "settle",
    "wait",
]

Function = Callable[[list[Any]], Sequence[Any]]
After = Callable[[int, Random], None]
"""What a caller does after call number n, from 0 on; all that is random in it comes from the generator."""


def drain(device: str) -> None:
    """Wait for everything that was submitted on any stream."""
    if device == "cuda":
        torch.cuda.synchronize()


def wait(device: str) -> None:
    """Wait for the caller's stream."""
    if device == "cuda":
        torch.cuda.current_stream().synchronize()


_STREAMS = 40
"""More streams than torch has in a pool."""


def settle(device: str) -> None:
    """Have small kernels on many streams, as in processes that ran for long: some way into it, each kernel of every
    graph takes a third of a microsecond longer from then on, which must not happen between a truth and its trials."""
    if device != "cuda":
        return
    x = torch.ones(64, device=device)
    drain(device)
    for _ in range(_STREAMS):
        with torch.cuda.stream(torch.cuda.Stream()):
            x.sin()
    drain(device)


# -- programs ----------------------------------------------------------------------------------------------------------


def chain(args: list[Any]) -> Sequence[Any]:
    """One kernel after the other."""
    x, launches = args
    args.clear()
    for _ in range(launches):
        x = x.sin()
    return (x,)


def combine(args: list[Any]) -> Sequence[Any]:
    """Kernels all of which read the first argument."""
    x, y, launches = args
    args.clear()
    for _ in range(launches):
        y = y + x
    return (y,)


@dataclass(frozen=True)
class Program:
    """``size``, for each kind of device: elements (of ``fresh`` programs, rows of 1024) and launches.

    ``fresh``: the first argument is made anew for each call, so that a replay with copied inputs is a candidate.
    ``slowed``: the replay is followed by a delay on the ``host`` or on the ``device``, by which it takes ``ratio``
    times as long as the uncaptured run under a steady caller; no handicap if it is empty.
    """

    name: str
    fn: Function
    size: Mapping[str, tuple[int, int]]
    fresh: bool = False
    slowed: str = ""
    ratio: float = 1.0

    @property
    def candidates(self) -> tuple[str, ...]:
        """What a trial of this program chooses among."""
        return ("patched", "copied", "uncaptured") if self.fresh else ("patched", "uncaptured")


_MANY_SMALL = {"cuda": (4096, 60), "cpu": (16, 40)}
_FEW_LARGE = {"cuda": (1 << 24, 4), "cpu": (1 << 14, 3)}
_MANY_LARGE = {"cuda": (1 << 22, 24), "cpu": (1 << 11, 12)}
_ROWS = {"cuda": (512, 40), "cpu": (4, 40)}

_ALL = (
    Program("host-bound", chain, _MANY_SMALL),
    Program("device-bound", chain, _FEW_LARGE),
    Program("queue-bound", chain, _MANY_LARGE),
    Program("fresh inputs", combine, _ROWS, fresh=True),
    Program("host-bound, slowed", chain, _MANY_SMALL, slowed="host", ratio=1.3),
    Program("device-bound, slowed", chain, _FEW_LARGE, slowed="device", ratio=1.25),
    Program("host-bound, evened", chain, _MANY_SMALL, slowed="host", ratio=1.0),
)
PROGRAMS: dict[str, Program] = {program.name: program for program in _ALL}
"""By name. Programs whose uncaptured run is the faster one are rare, hence the handicaps; where the device limits both,
nothing but chance tells them apart, and so it is where a handicap makes them even."""

_WIDTH = 1024
_ALIVE = 3
"""Inputs of earlier calls that are still alive, so that the next one lies elsewhere."""


def arguments(program: Program, device: str) -> Callable[[], list[Any]]:
    """What makes the arguments of each call."""
    elements, launches = program.size[device]
    if not program.fresh:
        x = torch.rand(elements, device=device)
        return lambda: [x, launches]
    source, y = torch.rand(_WIDTH, device=device), torch.rand(elements, _WIDTH, device=device)
    alive: deque[torch.Tensor] = deque(maxlen=_ALIVE)

    def fresh() -> list[Any]:
        alive.append(source.clone())
        return [alive[-1], y, launches]

    return fresh


# -- callers -----------------------------------------------------------------------------------------------------------


def _steady(device: str) -> After:
    return lambda call, random: None


def _waiting(every: int, offset: int = 0) -> Callable[[str], After]:
    """Waits for its stream after one in ``every`` calls."""

    def caller(device: str) -> After:
        def after(call: int, random: Random) -> None:
            if call % every == offset:
                wait(device)

        return after

    return caller


def _updating(device: str) -> After:
    """Every second call, eight small kernels, as an optimiser's step after accumulated gradients."""
    weights = [torch.ones(4096, device=device) for _ in range(8)]

    def after(call: int, random: Random) -> None:
        if call % 2:
            for weight in weights:
                weight.mul_(0.999)

    return after


_PAUSES, _PAUSE = 0.005, 0.002


def _pausing(device: str) -> After:
    """The host sleeps for 2 ms after one in 200 calls, at random."""

    def after(call: int, random: Random) -> None:
        if random.random() < _PAUSES:
            time.sleep(_PAUSE)

    return after


_DISTURBANCES, _LONGEST = 0.05, 4


def _disturbed(device: str) -> After:
    """Another stream keeps the device's memory busy: after one in 20 calls, for up to 0.3 ms (on an H200)."""
    stream, load = torch.cuda.Stream(), torch.ones(1 << 25, device=device)
    stream.wait_stream(torch.cuda.current_stream())
    load.record_stream(stream)

    def after(call: int, random: Random) -> None:
        if random.random() >= _DISTURBANCES:
            return
        with torch.cuda.stream(stream):
            for _ in range(random.randint(1, _LONGEST)):
                load.mul_(1.0)

    return after


CALLERS: dict[str, Callable[[str], After]] = {
    "steady": _steady,
    "waits": _waiting(1),
    "waits each 16": _waiting(16, 15),
    "period 2": _updating,
    "period 2, waits": _waiting(2, 1),
    "pauses": _pausing,
    "other stream": _disturbed,
}
"""Callers by name, to be made for a device. The last one needs a GPU."""

_HONEST = tuple(program.name for program in _ALL if not program.slowed)
_CHOSEN: dict[str, Sequence[str]] = {
    "steady": tuple(PROGRAMS),
    "waits": tuple(PROGRAMS),
    "period 2": tuple(PROGRAMS),
    "waits each 16": _HONEST,
    "period 2, waits": ("host-bound", "device-bound, slowed"),
    "pauses": ("host-bound", "fresh inputs", "device-bound, slowed"),
    "other stream": ("host-bound", "fresh inputs", "device-bound, slowed"),
}
SCENARIOS: tuple[tuple[str, str], ...] = tuple((name, caller) for caller, names in _CHOSEN.items() for name in names)
"""Programs and callers, those first that are not to be left out where time is short."""


# -- handicaps ---------------------------------------------------------------------------------------------------------


class Delay:
    """Takes ``seconds``: the host spins, or, where ``where`` is ``device`` and there is a GPU, the caller's stream
    sleeps."""

    def __init__(self, device: str, where: str) -> None:
        self.seconds = 0.0
        self.sleeps = device == "cuda" and where == "device"
        self._rate = _cycles_per_second() if self.sleeps else 0.0

    def __call__(self) -> None:
        if self.sleeps:
            torch.cuda._sleep(int(self.seconds * self._rate))
            return
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            pass


_CYCLES = 20_000_000


def _cycles_per_second() -> float:
    """The rate at which the device's sleep counts."""
    times: list[float] = []
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.cuda._sleep(_CYCLES)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return _CYCLES / min(times)


class _Slower:
    """An executable each of whose replays is followed by a delay."""

    def __init__(self, executable: Any, delay: Delay) -> None:
        self._replay = executable.replay
        self._consume = getattr(executable, "consume", None) or executable.replay
        self._delay = delay
        self.stage, self.moves, self.close = executable.stage, executable.moves, executable.close

    def replay(self, args: list[Any]) -> Any:
        """As ``Executable`` says."""
        return self._delayed(self._replay(args))

    def consume(self, args: list[Any]) -> Any:
        """The same, without the arguments being kept."""
        return self._delayed(self._consume(args))

    def _delayed(self, outputs: Any) -> Any:
        if outputs is not None:
            self._delay()
        return outputs


class Slowed:
    """``driver``, but for its executables: each replay is followed by ``delay``."""

    def __init__(self, driver: Any, delay: Delay) -> None:
        self._driver, self._delay = driver, delay

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def instantiate(self, program: Any) -> _Slower:
        """As ``Driver`` says."""
        return _Slower(self._driver.instantiate(program), self._delay)
