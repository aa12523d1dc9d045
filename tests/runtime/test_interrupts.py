"""What comes in between, at any place of the runtime: exceptions and signals, finalisers, other threads.

After an exception the arguments have seen no run or one, nothing of a capture is left on the thread, and the region is
captured by a later call. Finalisers call compiled functions whenever garbage is collected, on any thread: nothing waits
there for what may wait for it.
"""

from __future__ import annotations

import gc
import linecache
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
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

RUNTIME = str(Path(pygraph.runtime.__file__).parent)

WATCHED = (RUNTIME, _python_dispatch.__file__)
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


def compiled_call() -> RegionCall:
    with torch.no_grad():
        compiled = compile_regions(program, size_asserts=False)
        compiled.call(torch.randn(6, 6), torch.randn(6, 6))
    return compiled.regions[0]


call = pytest.fixture(compiled_call, scope="module", name="call")


def region_of(fn: Callable[[list[Any]], Sequence[Any]], driver: HostDriver | None = None) -> Region:
    return Region(fn, driver or HostDriver(), name="interrupted")


@dataclass
class Lines:
    """A trace function that notes the lines that run, or raises ``error`` at the one with number ``target``."""

    target: int = -1
    error: type[BaseException] = KeyboardInterrupt
    met: list[tuple[str, int]] = field(default_factory=list)
    reached: bool = False

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
        except self.error:
            self.reached = True
            raise
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
    region = region_of(call.fn)
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


class Expected:
    """What one uncaptured run does to copies of ``args``."""

    def __init__(self, call: RegionCall, args: list[Any]) -> None:
        self.args, self.left, self.state = copy_arguments(args), copy_arguments(args), torch.get_rng_state()
        self.outputs, self.after = call.run(self.left), torch.get_rng_state()
        torch.set_rng_state(self.state)

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


def attempts(call: RegionCall, run: Callable[[Region, list[Any]], Any], error: type[BaseException]) -> Iterator[str]:
    """The call that captures, the one after it, both by ``run``, which may raise ``error``, and those that come then;
    yields what is wrong."""
    region, before = due_region(call), thread_state()
    for seed in (1, 2):
        args = call.fresh(seed)
        expected = Expected(call, args)
        try:
            outputs = run(region, list(args))
        except error:
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
    replays = region.record.replays
    for seed in range(LATER):
        args = call.fresh(seed)
        expected = Expected(call, args)
        outputs = region(list(args))
        if not (same_bits(list(outputs), expected.outputs) and expected.ran(args)):
            yield "a later call is wrong"
        if region.record.replays > replays:
            break
    else:
        yield f"not replayed later, with {region.record.captures} captures: {region.record.reason}"
    region.close()


def problems(call: RegionCall, error: type[BaseException], step: int) -> dict[str, list[str]]:
    """What is wrong after an ``error`` at every ``step``-th line, with those lines."""
    found: dict[str, list[str]] = {}
    torch.manual_seed(0)
    with torch.no_grad():
        numbers = numbers_of_lines(call)
        assert len(numbers) > 400
        for number in numbers[::step]:
            lines = Lines(number, error)
            wrong = list(attempts(call, lines.run, error))
            if error is KeyboardInterrupt and len(lines.met) > number and not lines.reached:
                wrong.append("the interrupt did not reach the caller")
            for problem in wrong:
                name, line = lines.met[min(number, len(lines.met) - 1)]
                found.setdefault(problem, []).append(f"{Path(name).name}:{line}")
    return found


SOME, EVERY = 24, 1


@pytest.mark.parametrize("step", [SOME, pytest.param(EVERY, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_at_any_line_leaves_nothing_behind(call: RegionCall, error: type[BaseException], step: int) -> None:
    assert problems(call, error, step) == {}


def in_a_process(function: Callable[[], None]) -> None:
    """Run a function of this module in a process of its own, where a deadlock fails."""
    code = f"import faulthandler, torch, {__name__} as tests\nfaulthandler.dump_traceback_later(200, exit=True)\n"
    code += f"torch.set_grad_enabled(False)\ntests.{function.__name__}()\nprint('done')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout == "done\n", done.stderr[-3000:]


def storm() -> None:
    """Signals at any time of two calls, of which the first captures."""
    call, rounds = compiled_call(), 10
    armed, captures = list[bool](), list[int]()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if armed:
            raise KeyboardInterrupt

    def run(region: Region, args: list[Any]) -> Any:
        before = region.record.captures
        signal.setitimer(signal.ITIMER_REAL, 1e-4 if before else random.uniform(1e-4, 1e-2), 5e-4)
        try:
            armed.append(True)
            outputs = region(args)
            armed.clear()
        except KeyboardInterrupt:
            armed.clear()
            captures.append(before)
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return outputs

    random.seed(0)
    signal.signal(signal.SIGALRM, interrupt)
    for _ in range(rounds):
        assert list(attempts(call, run, KeyboardInterrupt)) == []
    assert captures.count(0) > rounds // 4, captures


@pytest.mark.sweep
def test_a_storm_of_signals_leaves_nothing_behind() -> None:
    """A signal that comes while a call captures is raised when that call has been answered."""
    in_a_process(storm)


def test_a_signal_waits_for_the_end_of_a_capture(call: RegionCall) -> None:
    seen: list[str] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGINT)}
    signal.signal(signal.SIGUSR1, lambda *_: seen.append("handled"))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background, a shell has it ignored

    class Driver(HostDriver):
        def capture(self, fn: Any, args: Any, eager: Any = (), **options: Any) -> Any:
            for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGINT):
                signal.raise_signal(number)
            seen.append("captured")
            return super().capture(fn, args, eager, **options)

    region = region_of(call.fn, Driver())
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


# -- finalisers and other threads --------------------------------------------------------------------------------------


class Garbage:
    """A cycle whose finaliser calls ``call``."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call, self.self = call, self

    def __del__(self) -> None:
        self.call()


class Collection:
    """Collects garbage as the function with number ``target`` of those of the runtime that run is entered."""

    def __init__(self, target: int = -1) -> None:
        self.target, self.met = target, list[CodeType]()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(RUNTIME) or not gc.isenabled():
            return
        self.met.append(frame.f_code)
        if len(self.met) - 1 == self.target:
            sys.setprofile(None)
            gc.collect()
            sys.setprofile(self)


def answers(collection: Collection) -> list[bool]:
    """Whether finalisers were answered right: by the region that is called, by one that is due, and one that replays.
    The calls meanwhile miss, capture, compare, replay and evict."""
    driver, options, found = HostDriver(), RegionOptions(max_captures=2), list[bool]()

    def ask(region: Region, size: int) -> bool:
        x = torch.arange(size) * 1.0
        return torch.equal(region([x.clone()])[0], torch.cumsum(x, 0) * 2)

    def region(due: Sequence[int] = ()) -> Region:
        made = Region(lambda args: [torch.cumsum(args[0], 0) * 2], driver, name="finalised", options=options)
        made._variants._max_tracked = 2
        assert all(ask(made, size) for size in due)
        return made

    def calls(made: Region, *sizes: int) -> None:
        assert all(ask(made, size) for size in sizes)
        made.close()
        assert ask(made, 3)

    made, due, replaying = region(), region((4,)), region((4, 4))
    for each, size in ((made, 9), (due, 4), (replaying, 4)):
        Garbage(lambda each=each, size=size: found.append(ask(each, size)))  # type: ignore[misc]
    sys.setprofile(collection)
    try:
        calls(made, 5, 5, 5, 6, 6, 7, 7, 5, 8)
    finally:
        sys.setprofile(None)
    for each in (due, replaying):
        calls(each, 4, 4, 4)
    return found


def everywhere() -> None:
    """Garbage is collected as each function of the runtime is entered for the first time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(1 << 30)
    entered = Collection()
    answers(entered)
    first = {code: number for number, code in reversed(list(enumerate(entered.met)))}
    assert len(first) > 100, len(first)
    for code, number in first.items():
        assert answers(Collection(number)) == [True] * 3, code.co_name


@pytest.mark.sweep
def test_a_finaliser_may_call_regions_within_any_function_of_the_runtime() -> None:
    in_a_process(everywhere)


def test_a_capture_of_another_thread_is_not_waited_for() -> None:
    """What the capturing thread runs may wait for the other one, as a finaliser does that takes a lock."""
    answered: list[torch.Tensor] = []
    x = torch.ones(4)
    other = region_of(lambda args: (args[0] + 1,))
    other([x])

    def fn(args: list[Any]) -> Any:
        if dispatch_mode_depth():
            thread = threading.Thread(target=lambda: answered.extend(other([x])), daemon=True)
            thread.start()
            thread.join(60)
            assert not thread.is_alive(), "the other thread waits for this capture"
        return (args[0] * 2,)

    region = region_of(fn)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(region([x])[0], x * 2)
        assert region.record.captures == 1, region.record
        assert len(answered) >= 2
        assert all(torch.equal(each, x + 1) for each in answered)
        assert other.record.captures == 0
        for _ in range(2):
            other([x])
    assert (other.record.captures, other.record.replays) == (1, 1)
