"""Interruptions at any place of the runtime: exceptions and signals, finalisers, other threads.

After an exception the arguments have seen no run or one, nothing of a capture is left on the thread, and the region is
captured by a later call. Finalisers call compiled functions whenever garbage is collected, on any thread: such a call
waits for nothing that may wait for it.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import linecache
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeAlias

import pytest
import torch
from torch.utils import _python_dispatch

import pygraph.runtime
from pygraph.compat import dispatch_mode_depth, dispatch_mode_flags
from pygraph.runtime import life
from pygraph.runtime.critical import capturing
from pygraph.runtime.host import HostDriver
from pygraph.runtime.life import Lives
from pygraph.runtime.region import Region, RegionOptions
from tests.runtime.fake import BYTES, EvenDriver, FakeDriver, double
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
leaves cannot be helped. Signals wait meanwhile."""

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


Line: TypeAlias = tuple[str, int]
"""A file, and a line in it."""


@dataclass
class Lines:
    """A trace function that notes the lines that run, and raises ``error`` the first time that ``target`` does."""

    target: Line | None = None
    error: type[BaseException] = KeyboardInterrupt
    met: dict[Line, None] = field(default_factory=dict)
    reached: bool = False
    left_out: tuple[str, ...] = UNDOING

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        watched = code.co_filename.startswith(WATCHED) and code.co_name not in self.left_out
        return self._line if watched else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        line = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and line not in self.met and not _undoes(frame, self.left_out):
            self.met[line] = None
            if line == self.target:
                self.fail()
        return self._line

    def fail(self) -> None:
        raise self.error("injected")

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


def _undoes(frame: FrameType | None, functions: Sequence[str]) -> bool:
    if frame is not None and "self.random.undo()" in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
        return True  # the line does nothing else
    while frame is not None and frame.f_code.co_filename.startswith(WATCHED):
        if frame.f_code.co_name in functions:
            return True
        frame = frame.f_back
    return False


def due_region(call: RegionCall) -> Region:
    """A region whose next call captures."""
    region = region_of(call.fn)
    region(call.fresh(0))
    return region


def lines_met(call: RegionCall, kind: type[Lines]) -> list[Line]:
    """The lines that run while a region is captured, compared, and then replayed."""
    lines = kind()
    region = due_region(call)
    for seed in range(2):
        lines.run(region, call.fresh(seed))
    assert (region.record.captures, region.record.replays) == (1, 1)
    return list(lines.met)


class Expected:
    """Outputs of one uncaptured run on a copy of ``args``; arguments and random state before and after it."""

    def __init__(self, call: RegionCall, args: list[Any]) -> None:
        self.args, self.left, self.state = copy_arguments(args), copy_arguments(args), torch.get_rng_state()
        self.outputs, self.after = call.run(self.left), torch.get_rng_state()
        torch.set_rng_state(self.state)

    def ran(self, args: list[Any]) -> bool:
        return same_bits(args, self.left) and torch.equal(torch.get_rng_state(), self.after)

    def untouched(self, args: list[Any]) -> bool:
        return same_bits(args, self.args) and torch.equal(torch.get_rng_state(), self.state)


def thread_state() -> list[Any]:
    """State of the thread, and of its process, that a capture changes for a while."""
    modes = dispatch_mode_depth(), dispatch_mode_flags(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return [*modes, list(capturing), gc.isenabled(), interrupted_by_hand()]


def interrupted_by_hand() -> bool:
    """True if SIGINT still raises KeyboardInterrupt."""
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


def problems(
    call: RegionCall,
    error: type[BaseException],
    step: int,
    kind: type[Lines] = Lines,
    among: Container[Line] | None = None,
) -> dict[str, list[str]]:
    """Problems after an ``error`` at every ``step``-th line (``among`` these), with those lines."""
    found: dict[str, list[str]] = {}
    torch.manual_seed(0)
    with torch.no_grad():
        met = lines_met(call, kind)
        assert len(met) > 400
        for line in [each for each in met[::step] if among is None or each in among]:
            lines = kind(line, error)
            wrong = list(attempts(call, lines.run, error))
            if error is KeyboardInterrupt and line in lines.met and not lines.reached:
                wrong.append("the interrupt did not reach the caller")
            for problem in wrong:
                found.setdefault(problem, []).append(f"{Path(line[0]).name}:{line[1]}")
    return found


SOME, EVERY = 48, 1


@pytest.mark.parametrize("step", [SOME, pytest.param(EVERY, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_at_any_line_leaves_nothing_behind(call: RegionCall, error: type[BaseException], step: int) -> None:
    assert problems(call, error, step) == {}


def test_an_error_at_any_line_as_a_life_begins_or_ends_leaves_nothing_behind(call: RegionCall) -> None:
    lines, first = inspect.getsourcelines(Lives.go_on)
    among = {(life.__file__, first + number) for number in range(len(lines))}
    assert problems(call, KeyboardInterrupt, EVERY, among=among) == {}


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


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """The signals that a handler was called for: SIGUSR1 and SIGUSR2, which it does no more with, and SIGINT."""
    seen: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        signal.default_int_handler(number, frame)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)}
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: seen.append(number))
    signal.signal(signal.SIGINT, interrupt)
    yield seen
    for number, handler in handlers.items():
        signal.signal(number, handler)


class Raising(HostDriver):
    """Raises the signals ``given`` as its next capture begins, and notes in ``reached`` how many it came past."""

    def __init__(self, *given: int) -> None:
        super().__init__()
        self.given = list(given)
        self.reached = 0

    def capture(self, fn: Any, args: Any, eager: Any = (), **options: Any) -> Any:
        while self.given:
            signal.raise_signal(self.given.pop(0))
            self.reached += 1
        return super().capture(fn, args, eager, **options)


def test_a_signal_waits_for_the_end_of_a_capture_and_is_handled_before_the_users_own_run(handled: list[int]) -> None:
    """The call is undone then: nothing of it has run."""
    x, total = torch.ones(3), torch.zeros(3)
    driver = Raising(signal.SIGINT)
    region = region_of(lambda args: [args[1].add_(args[0])], driver)
    with torch.no_grad():
        region([x, total])
        with pytest.raises(KeyboardInterrupt):
            region([x, total])
        assert (driver.reached, handled) == (1, [signal.SIGINT])
        assert total.tolist() == [1.0] * 3
        for _ in range(3):
            region([x, total])
    assert total.tolist() == [4.0] * 3
    assert (region.record.captures, region.record.replays) == (1, 1)


def test_a_second_signal_interrupts_a_capture_at_once(call: RegionCall, handled: list[int]) -> None:
    driver = Raising(signal.SIGUSR1, signal.SIGINT, signal.SIGUSR2)
    region = region_of(call.fn, driver)
    with torch.no_grad():
        region(call.fresh(0))
        args = call.fresh(1)
        expected = Expected(call, args)
        with pytest.raises(KeyboardInterrupt):
            region(list(args))
        assert expected.untouched(args)
        assert (driver.reached, handled) == (1, [signal.SIGUSR1, signal.SIGINT])
        for seed in range(3):
            region(call.fresh(seed))
    assert region.record.replays >= 1
    assert handled == [signal.SIGUSR1, signal.SIGINT, signal.SIGUSR2]


def test_each_signal_is_handled_once(call: RegionCall, handled: list[int]) -> None:
    given = [signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1]
    for number in range(len(given) + 1):
        region, handled[:] = region_of(call.fn, Raising(*given[:number])), ()
        with torch.no_grad():
            for seed in range(3):
                region(call.fresh(seed))
        assert handled == given[:number]
        assert (region.record.captures, region.record.replays) == (1, 1)


def test_handlers_of_an_event_loop_are_called_once(call: RegionCall) -> None:
    """A loop is woken by the signal itself, whatever handler Python code has set."""
    seen: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGUSR1, signal.SIGTERM):
            loop.add_signal_handler(number, seen.append, signal.Signals(number).name)
        region = region_of(call.fn, Raising(signal.SIGUSR1, signal.SIGTERM))
        with torch.no_grad():
            for seed in range(3):
                region(call.fresh(seed))
        assert region.record.replays == 1
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run(main())
    assert seen == ["SIGUSR1", "SIGTERM"]


@pytest.mark.parametrize("way", ["compared", "called first", "refused"])
def test_the_users_own_run_is_interrupted_at_once_where_it_captures(way: str, handled: list[int]) -> None:
    """Also where it comes before the replay, and where nothing was captured."""
    instantiated, runs, reached = list[int](), list[int](), list[int]()

    def fn(args: list[Any]) -> Any:
        if instantiated and not runs:
            runs.append(1)
            signal.raise_signal(signal.SIGINT)
            reached.append(1)
        values, _ = torch.sort(args[0])
        return [values * 2]

    class Driver(HostDriver):
        def instantiate(self, program: Any) -> Any:
            instantiated.append(1)
            if way == "refused":
                raise MemoryError
            return super().instantiate(program)

    x, eager = torch.tensor([2.0, 1.0]), ["aten.sort"] if way == "called first" else []
    region = Region(fn, Driver(), name="interrupted", eager=eager)
    with torch.no_grad():
        region([x])
        with pytest.raises(KeyboardInterrupt):
            region([x])
        assert (reached, handled) == ([], [signal.SIGINT])
        assert thread_state()[:-1] == [0, dispatch_mode_flags(), False, False, [], True]
        for _ in range(8):
            assert region([x])[0].tolist() == [2.0, 4.0]
    assert way == "refused" or region.record.replays > 0


def test_a_comparison_that_hangs_can_be_interrupted(handled: list[int]) -> None:
    """By the second signal, wherever it comes."""
    driver = FakeDriver()

    def hang(args: list[Any]) -> Any:
        while True:
            signal.raise_signal(signal.SIGINT)

    region, x = region_of(double, driver), torch.ones(2)
    region([x])
    driver.kernel = hang
    with pytest.raises(KeyboardInterrupt):
        region([x])
    assert handled == [signal.SIGINT] * 2
    driver.kernel = None
    for _ in range(3):
        assert region([x])[0].tolist() == [2.0, 2.0]
    assert region.record.replays == 1


@dataclass
class TwoSignals(Lines):
    """Raises two signals at a line, also at those of functions that bring back what was before, but for those at which
    Python handles none: between a call in a ``try`` and the next one in its ``finally``."""

    left_out: tuple[str, ...] = ("capturing_turn",)

    def fail(self) -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("step", [SOME, pytest.param(EVERY, marks=pytest.mark.sweep)])
def test_two_signals_at_any_line_leave_nothing_behind(call: RegionCall, step: int, handled: list[int]) -> None:
    assert problems(call, KeyboardInterrupt, step, TwoSignals) == {}


# -- processes ---------------------------------------------------------------------------------------------------------


def in_a_child(work: Callable[[], bool]) -> bool:
    """The result of ``work`` in a process that is forked now; False if it raises there."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_in_a_process_that_another_thread_forks_no_signal_waits(call: RegionCall, handled: list[int]) -> None:
    """The capture that has signals wait never ends there."""
    found: list[bool] = []

    def handles() -> bool:
        for _ in range(2):
            signal.raise_signal(signal.SIGUSR1)
        return handled == [signal.SIGUSR1] * 2

    class Driver(HostDriver):
        def capture(self, *args: Any, **options: Any) -> Any:
            thread = threading.Thread(target=lambda: found.append(in_a_child(handles)))
            thread.start()
            thread.join()
            return super().capture(*args, **options)

    region = region_of(call.fn, Driver())
    with torch.no_grad():
        for seed in range(3):
            region(call.fresh(seed))
    assert found == [True, True]
    assert region.record.replays == 1


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("when", ["captured", "replayed"])
def test_a_process_forked_while_another_thread_is_in_a_region_captures_and_replays(when: str) -> None:
    """The thread is not part of the new process, and what it was about never ends there."""
    inside, leave = threading.Event(), threading.Event()

    def wait(x: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert leave.wait(60)
        return x + 1

    with torch.library._scoped_library("pygraphforks", "DEF") as library:
        library.define("wait(Tensor x) -> Tensor")
        library.impl("wait", wait, "CPU")
        library.impl("wait", torch.empty_like, "Meta")

        def fn(args: list[Any]) -> Any:
            return [torch.ops.pygraphforks.wait(args[0] * 2)]

        region, other = Region(fn, HostDriver(), name="forked", eager=["pygraphforks.wait"]), region_of(double)
        x = torch.ones(4)

        def replays(made: Region) -> bool:
            before = made.record.replays
            right = all(made([x + n])[0].tolist() == [3 + 2 * n - (made is other)] * 4 for n in range(4))
            return right and made.record.replays > before

        def work() -> None:
            with torch.no_grad():
                region([x + 7])

        with torch.no_grad():
            for _ in range(3 if when == "replayed" else 1):
                region([x])
            thread = threading.Thread(target=work)
            thread.start()
            assert inside.wait(60)
            try:
                assert in_a_child(lambda: replays(region) and replays(other))
            finally:
                leave.set()
                thread.join()
            assert replays(region)


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
    """For each finaliser, True if its call is answered right: by the region that is called, by one that is due, or by
    one that replays. The calls meanwhile miss, capture, compare, replay and evict."""
    driver, options, found = EvenDriver(), RegionOptions(memory_limit=2 * BYTES), list[bool]()

    def ask(region: Region, size: int) -> bool:
        x = torch.arange(size) * 1.0
        return torch.equal(region([x.clone()])[0], torch.cumsum(x, 0) * 2)

    def region(due: Sequence[int] = ()) -> Region:
        made = Region(lambda args: [torch.cumsum(args[0], 0) * 2], driver, name="finalised", options=options)
        made._lives.table._max_tracked = 2
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
    """Code of the capturing thread may wait for the other one, as a finaliser does that takes a lock."""
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
