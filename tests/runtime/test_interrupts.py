"""Exceptions that come from outside, at any line and by signals: the arguments have seen no run or one, nothing of a
capture is left on the thread, and the region is captured by a later call."""

from __future__ import annotations

import gc
import linecache
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils import _python_dispatch

import pygraph.runtime
from pygraph.compat import dispatch_mode_depth, dispatch_mode_flags
from pygraph.runtime.critical import capturing
from pygraph.runtime.host import HostDriver
from pygraph.runtime.region import Region, RegionOptions
from tests.runtime.regions import RegionCall, compile_regions, copy_arguments, same_bits

WATCHED = (str(Path(pygraph.runtime.__file__).parent), _python_dispatch.__file__)
"""Where exceptions are raised: the runtime, and where torch enters and leaves dispatch modes."""

UNDOING = (
    "undo",
    "apart",
    "_told",
    "capturing_turn",
    "_signals_waiting",
    "__del__",
    "_end",
    "_recording",
    "_on_side_stream",
)
"""Functions that bring back what was before, or whose errors Python swallows. What an exception at any of their lines
leaves cannot be helped. Signals do not come there: they wait meanwhile, and Python has them wait at such lines."""

LATER = 6
"""Calls within which the region is captured and replayed again."""


def program(x: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mutates an argument, draws, and calls operators besides fused kernels."""
    keys.mul_(0.5).add_(x)
    values, _ = torch.sort(x @ keys, -1)
    return torch.multinomial(values.softmax(-1), 3), values * 2 + 1


@pytest.fixture(scope="module")
def call() -> RegionCall:
    with torch.no_grad():
        compiled = compile_regions(program, size_asserts=False)
        compiled.call(torch.randn(6, 6), torch.randn(6, 6))
    return compiled.regions[0]


@dataclass
class Lines:
    """A trace function that notes the lines that run, or raises ``error`` at the one with number ``target``."""

    target: int = -1
    error: type[BaseException] = KeyboardInterrupt
    met: list[tuple[str, int]] = field(default_factory=list)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        return self._line if code.co_filename.startswith(WATCHED) and code.co_name not in UNDOING else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "line" and not _undoes(frame):
            self.met.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.met) - 1 == self.target:
                raise self.error("injected")
        return self._line

    def run(self, region: Region, args: list[Any]) -> Any:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            return region(args)
        finally:
            sys.settrace(before)


def _undoes(frame: FrameType | None) -> bool:
    if frame is not None and "self.random.undo()" in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
        return True  # the line does nothing else
    while frame is not None and frame.f_code.co_filename.startswith(WATCHED):
        if frame.f_code.co_name in UNDOING:
            return True
        frame = frame.f_back
    return False


def due_region(call: RegionCall) -> Region:
    """A region whose next call captures."""
    region = Region(call.fn, HostDriver(), name="interrupted", options=RegionOptions(measure=False))
    region(call.fresh(0))
    return region


def numbers_of_lines(call: RegionCall) -> list[int]:
    """The first time that each line runs, while a region is captured, compared, and then replayed."""
    lines = Lines()
    region = due_region(call)
    for seed in range(2):
        lines.run(region, call.fresh(seed))
    assert (region.record.captures, region.record.replays) == (1, 1)
    first = {line: number for number, line in reversed(list(enumerate(lines.met)))}
    return sorted(first.values())


@dataclass
class Expected:
    """What one uncaptured run does to copies of ``args``."""

    args: list[Any]
    state: torch.Tensor = field(init=False)
    left: list[Any] = field(init=False)
    outputs: list[Any] = field(init=False)
    after: torch.Tensor = field(init=False)

    def of(self, call: RegionCall) -> Expected:
        self.state, self.left = torch.get_rng_state(), copy_arguments(self.args)
        self.outputs, self.after = call.run(self.left), torch.get_rng_state()
        torch.set_rng_state(self.state)
        self.args = copy_arguments(self.args)
        return self

    def ran(self, args: list[Any]) -> bool:
        return same_bits(args, self.left) and torch.equal(torch.get_rng_state(), self.after)

    def untouched(self, args: list[Any]) -> bool:
        return same_bits(args, self.args) and torch.equal(torch.get_rng_state(), self.state)


def thread_state() -> list[Any]:
    """What a capture changes on its thread, and in its process, for a while."""
    modes = dispatch_mode_depth(), dispatch_mode_flags(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return [*modes, list(capturing), gc.isenabled(), interrupted_by_hand()]


def interrupted_by_hand() -> bool:
    """Whether Ctrl-C still does what it does."""
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        return True
    return False


def attempts(call: RegionCall, lines: Lines) -> Iterator[str]:
    """Run the call that captures, and the one after it, with an error from ``lines``; yields what is wrong."""
    region, before, raised = due_region(call), thread_state(), False
    for seed in (1, 2):
        args = call.fresh(seed)
        expected = Expected(args).of(call)
        try:
            outputs = lines.run(region, list(args))
        except lines.error:
            raised = True
            if not (expected.untouched(args) or expected.ran(args)):
                yield "arguments or random state are neither as before nor as after one run"
        else:
            if not (same_bits(list(outputs), expected.outputs) and expected.ran(args)):
                yield "a call that was answered did not do what one run does"
        if thread_state() != before:
            yield f"left {thread_state()}, not {before}"
            while dispatch_mode_depth():
                torch._C._pop_torch_dispatch_stack(None)
            capturing.clear()
    if not raised and lines.error is KeyboardInterrupt and len(lines.met) > lines.target:
        yield "the interrupt did not reach the caller"
    yield from later(call, region)
    region.close()


def later(call: RegionCall, region: Region) -> Iterator[str]:
    """The calls after an interrupted one; yields what is wrong."""
    replays = region.record.replays
    for seed in range(LATER):
        args = call.fresh(seed)
        expected = Expected(args).of(call)
        outputs = region(list(args))
        if not (same_bits(list(outputs), expected.outputs) and expected.ran(args)):
            yield "a later call is wrong"
        if region.record.replays > replays:
            return
    yield f"not replayed later, with {region.record.captures} captures: {region.record.reason}"


def problems(call: RegionCall, error: type[BaseException], step: int) -> dict[str, list[str]]:
    """What is wrong after an ``error`` at every ``step``-th line, with those lines."""
    found: dict[str, list[str]] = {}
    torch.manual_seed(0)
    with torch.no_grad():
        numbers = numbers_of_lines(call)
        assert len(numbers) > 400
        for number in numbers[::step]:
            lines = Lines(number, error)
            for problem in attempts(call, lines):
                name, line = lines.met[min(number, len(lines.met) - 1)]
                found.setdefault(problem, []).append(f"{Path(name).name}:{line}")
    return found


SOME, EVERY = 24, 1


@pytest.mark.parametrize("step", [SOME, pytest.param(EVERY, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_at_any_line_leaves_nothing_behind(call: RegionCall, error: type[BaseException], step: int) -> None:
    assert problems(call, error, step) == {}


STORM = """
import faulthandler, random, signal
import torch
from tests.runtime.test_interrupts import *

faulthandler.dump_traceback_later(120, exit=True)
torch.set_grad_enabled(False)
call = call.__wrapped__()
armed, came, raised = [], [], []


def interrupt(number, frame):
    came.append(number)
    if armed:
        raise KeyboardInterrupt


signal.signal(signal.SIGALRM, interrupt)
for turn in range(ROUNDS):
    region, before = due_region(call), thread_state()
    for seed in (1, 2, 3):
        args = call.fresh(seed)
        expected = Expected(args).of(call)
        delay = random.Random(3 * turn + seed).uniform(1e-4, 1e-2) if seed == 1 else 1e-4
        try:
            signal.setitimer(signal.ITIMER_REAL, delay, 5e-4)
            armed.append(True)
            outputs = region(list(args))
            armed.clear()
            answered = True
        except KeyboardInterrupt:
            armed.clear()
            answered = False
            raised.append(seed)
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert expected.ran(args) or (not answered and expected.untouched(args)), (turn, seed, answered)
        assert not answered or same_bits(list(outputs), expected.outputs), (turn, seed)
        assert thread_state() == before, (turn, seed, thread_state())
    assert list(later(call, region)) == [], turn
    region.close()
assert raised.count(1) > ROUNDS // 4, (len(came), raised)
print("done")
"""


def test_a_storm_of_signals_leaves_nothing_behind() -> None:
    """A signal that comes while a call captures is raised when that call has been answered."""
    done = subprocess.run(
        [sys.executable, "-c", STORM.replace("ROUNDS", "10")], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stdout == "done\n", done.stderr[-3000:]


def test_a_signal_waits_for_the_end_of_a_capture(call: RegionCall) -> None:
    seen: list[str] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGINT)}
    signal.signal(signal.SIGUSR1, lambda *_: seen.append("handled"))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background, a shell has it ignored

    class Driver(HostDriver):
        def capture(self, fn: Any, args: Any) -> Any:
            for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGINT):
                signal.raise_signal(number)
            seen.append("captured")
            return super().capture(fn, args)

    region = Region(call.fn, Driver(), name="interrupted", options=RegionOptions(measure=False))
    with torch.no_grad():
        region(call.fresh(0))
        with pytest.raises(KeyboardInterrupt):
            region(call.fresh(1))
        assert seen == ["captured", "captured", "handled"]
        assert region.record.captures == 1
        region(call.fresh(2))
    assert region.record.replays == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    for number, handler in handlers.items():
        signal.signal(number, handler)
