"""What a diagnosis says, on a program whose launches and calls are written down by hand."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pygraph.errors import ReplayError
from pygraph.runtime.divergence import Finding, Suspect, diagnose
from pygraph.runtime.driver import Layout, Program, Slot
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.recording import AllocationKind, Output, OutputKind, Recording
from pygraph.runtime.stepping import Operand, Watcher
from tests.runtime.captures import Capture

N = 4
BYTES = 4 * N
Kernel = Callable[..., None]


def at(address: int, count: int = N) -> torch.Tensor:
    """Floats at an address."""
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)


def double(x: torch.Tensor, a: torch.Tensor) -> None:
    a.copy_(x * 2)


def increment(a: torch.Tensor) -> None:
    a.add_(1)


def triple(a: torch.Tensor, b: torch.Tensor) -> None:
    b.copy_(a * 3)


def total(b: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(b + x)


class Toy:
    """A driver for one region of four launches, of which the first two are one call:

        a = x * 2; a += 1        (the call "affine")
        b = a * 3                (the call "triple", which nobody observes if it is ``hidden``)
        out = b + x; x += 1      (the call "total", which returns ``out``)

    ``kernels`` are what the launches of a replay do. ``noise`` is added by the call "triple", which is said to be
    non-deterministic if it is ``unsteady``. The call "total" may be given ``more`` operands, which it does not use.
    """

    device = torch.device("cpu")

    def __init__(self, hidden: bool = False) -> None:
        self.kernels: list[Kernel] = [double, increment, self.noisy, self.last]
        self.hidden = hidden
        self.noise: Callable[[], torch.Tensor] = lambda: torch.zeros(N)
        self.unsteady = False
        self.more: list[Operand] = []
        self.draws: torch.Generator | None = None
        self.steps: list[int] = []

    @staticmethod
    def last(b: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        total(b, x, out)
        x.add_(1)

    def noisy(self, a: torch.Tensor, b: torch.Tensor) -> None:
        triple(a, b)
        b.add_(self.noise())

    def program(self) -> Program:
        capture = Capture()
        x, a, b, out = capture.input(BYTES), capture.pool(BYTES), capture.pool(BYTES), capture.pool(BYTES)
        words = [(x, a), (a,), (a, b), (b, x, out)]
        for name, each in zip(("double", "increment", "triple", "last"), words, strict=True):
            unsteady = self.unsteady and name == "triple"
            capture.launch(*each, name=name, call={"increment": "affine"}.get(name), nondeterministic=unsteady)
        outputs = (Output(OutputKind.FRESH, allocation=2, size=(N,), stride=(1,), dtype=torch.float32),)
        recording = replace(capture.recording(), outputs=outputs)
        owners = {x: (AllocationKind.INPUT, 0), **{p: (AllocationKind.POOL, i) for i, p in enumerate((a, b, out))}}
        slots = tuple(Slot(i, w, *owners[p], 0) for i, each in enumerate(words) for w, p in enumerate(each))
        return Program(recording, slots, Layout(128, {0: 0, 1: 64}, (2,)), (0, 1, 2, 3), {})

    def stepper(self, program: Program, fn: Any, args: Sequence[Any]) -> Toy:
        self.steps.append(-1)
        return self

    def run(self, launch: int, words: Mapping[int, int]) -> None:
        self.steps.append(launch)
        self.kernels[launch](*(at(words[word]) for word in sorted(words)))

    def trace(self, program: Program, fn: Any, args: list[Any], watcher: Watcher) -> Sequence[Any]:
        places = {launch.name: launch.words for launch in program.recording.launches}
        (x,) = args
        a, b = torch.full((N,), 7.0), torch.full((N,), 8.0)
        given = [Operand(*pair) for pair in zip(places["double"], (x, a), (False, True), strict=True)]
        watcher.before(0, 2, given)
        double(x, a)
        increment(a)
        watcher.after(0, 2, given, [], list)
        given = [Operand(*pair) for pair in zip(places["triple"], (a, b), (False, True), strict=True)]
        if not self.hidden:
            watcher.before(2, 3, given)
        self.noisy(a, b)
        if not self.hidden:
            watcher.after(2, 3, given, [], lambda: self.noisy(a, b) or [])
        given = [Operand(*pair) for pair in zip(places["last"], (b, x), (False, True), strict=False)]
        given += self.more
        watcher.before(3, 4, given)
        out = self.result(b, x)
        watcher.after(3, 4, given, [Operand(places["last"][2], out, True)], list)
        return [out]

    def result(self, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        out = b + x
        x.add_(1)
        return out

    def generator(self, program: Program) -> torch.Generator | None:
        return self.draws

    def exchange_state(
        self, generator: torch.Generator, to: torch.Tensor, expected: torch.Tensor | None = None
    ) -> torch.Tensor:
        before = generator.get_state()
        generator.set_state(to)
        return before


def found(toy: Toy, program: Program | None = None, **facts: Any) -> Finding:
    x = torch.arange(float(N))
    driver: Any = toy
    finding = diagnose(Suspect(list, driver, program or toy.program(), [x], **{"budget": 1 << 20, **facts}))
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert finding is not None
    return finding


def add(tensor: torch.Tensor, value: float) -> None:
    tensor[1] += value


@pytest.mark.parametrize("hidden", [False, True])
def test_a_right_program(hidden: bool) -> None:
    toy = Toy(hidden)
    assert found(toy).text.startswith("no launch differs when each is run by itself")
    assert toy.steps == [-1, 0, 1, 2, 3]


@pytest.mark.parametrize("launch", [0, 1])
def test_launches_of_one_call_are_named_together(launch: int) -> None:
    toy = Toy()
    right = toy.kernels[launch]
    toy.kernels[launch] = lambda *tensors: (right(*tensors), add(tensors[-1], 0.5))
    finding = found(toy)
    assert finding.text == (
        "the call of launches 0 to 1 of 4 (double) is the first that differs: what it writes to allocation 0 "
        "(float32[4]) has 1 of 4 elements with other bits, off by up to 0.5"
    )
    assert finding.launch is not None
    assert finding.launch.index == 0


def test_only_the_launch_that_is_wrong_by_itself_is_named() -> None:
    toy = Toy()
    toy.kernels[2] = lambda a, b: triple(a + 1, b)
    finding = found(toy)
    assert finding.launch is not None
    assert (finding.launch.name, toy.steps[-1]) == ("triple", 2)
    assert "launch 2 of 4 (triple) is the first that differs" in finding.text


def test_what_is_only_read_may_not_be_written() -> None:
    toy = Toy()
    toy.kernels[2] = lambda a, b: (triple(a, b), add(a, 1))
    assert "what it only reads, allocation 0 (float32[4]) has 1 of 4 elements" in found(toy).text


def test_a_launch_that_nobody_claims() -> None:
    toy = Toy(hidden=True)
    toy.kernels[2] = lambda a, b: triple(a + 1, b)
    finding = found(toy)
    assert finding.launch is not None
    assert finding.launch.name == "triple"
    assert "(triple) is the last that used allocation 1 (float32[4]), which then has 4 of 4 elements" in finding.text


def test_results_that_stay_unset_are_a_doubt_that_a_certainty_replaces() -> None:
    toy = Toy()
    toy.kernels[3] = lambda b, x, out: (x.add_(1), out[:2].copy_((b + x - 1)[:2]))
    finding = found(toy)
    assert finding.text.startswith("launch 3 of 4 (last) leaves unset what the uncaptured run may have set: ")
    assert "2 of 4 elements" in finding.text
    toy.kernels[2] = lambda a, b: triple(a + 1, b)
    assert "launch 2 of 4 (triple) is the first that differs" in found(toy).text


def test_writing_beside_an_allocation() -> None:
    toy = Toy()
    toy.kernels[3] = lambda b, x, out: (toy.last(b, x, out), at(out.data_ptr(), N + 1)[N:].fill_(1))
    assert found(toy).text == "launch 3 of 4 (last) writes outside of the memory that it is given"


def test_writing_into_what_a_later_launch_reads() -> None:
    toy = Toy()
    toy.kernels[1] = lambda a: (a.add_(1), at(a.data_ptr() + 64).fill_(3))  # where b will lie: overwritten before use
    assert found(toy).text.startswith("no launch differs")
    toy.kernels[1] = increment
    toy.kernels[2] = lambda a, b: (triple(a, b), at(b.data_ptr() - 64).fill_(3))
    assert "what it only reads, allocation 0" in found(toy).text


def test_a_launch_that_raises() -> None:
    toy = Toy()

    def fails(a: torch.Tensor) -> None:
        raise RuntimeError("cannot\nat all")

    toy.kernels[1] = fails
    assert (
        found(toy).text == "launch 1 of 4 (increment of affine) raises when it is run by itself: RuntimeError: cannot"
    )


# -- calls that are known to be non-deterministic ---------------------------------------------------------------------


def unsteady(scale: float) -> Toy:
    """A toy of which the third launch is off by up to ``scale`` each time, and the last one magnifies that."""
    toy, generator = Toy(), torch.Generator().manual_seed(3)
    toy.noise = lambda: scale * (torch.rand(N, generator=generator) * 2 - 1)
    toy.unsteady = True

    def last(b: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.frac(b * 1e6))
        x.add_(1)

    def result(b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(N)
        last(b, x, out)
        return out

    toy.kernels[3], toy.result = last, result
    return toy


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0])
def test_an_unsteady_call_is_held_to_further_runs_of_itself(scale: float) -> None:
    finding = found(unsteady(scale))
    assert finding.right, finding
    assert finding.text.startswith("no launch differs")


def test_what_no_launch_is_known_to_vary_in_is_held_to_its_bits() -> None:
    toy = unsteady(1e-6)
    toy.unsteady = False
    finding = found(toy)
    assert not finding.right
    assert "launch 2 of 4 (triple) is the first that differs" in finding.text


@pytest.mark.parametrize("launch", [0, 2, 3])
def test_a_wrong_launch_of_an_unsteady_program_is_named(launch: int) -> None:
    toy = unsteady(1e-3)
    right = toy.kernels[launch]
    toy.kernels[launch] = lambda *tensors: (right(*tensors), add(tensors[-1], 0.1))
    finding = found(toy)
    assert not finding.right
    assert finding.launch is not None
    assert finding.launch.index == launch
    assert "is the first that differs" in finding.text


def test_an_unsteady_call_is_run_again_on_what_it_was_given() -> None:
    toy = unsteady(1e-3)
    watched = toy.trace

    def noisy(a: torch.Tensor, b: torch.Tensor) -> None:
        b.copy_(a * 3 + toy.noise())
        a.add_(1)

    def trace(program: Program, fn: Any, args: list[Any], watcher: Watcher) -> Sequence[Any]:
        return watched(program, fn, args, Rewriting(watcher))

    toy.noisy = toy.kernels[2] = noisy

    toy.trace = trace
    assert found(toy).right


class Rewriting:
    """A watcher to whom all that calls are given may be written."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher

    def before(self, begin: int, end: int, given: Sequence[Operand]) -> None:
        self.watcher.before(begin, end, [replace(each, written=True) for each in given])

    def after(self, begin: int, end: int, given: Sequence[Operand], *rest: Any) -> None:
        self.watcher.after(begin, end, [replace(each, written=True) for each in given], *rest)


def test_integers_that_an_unsteady_call_does_not_repeat_are_a_doubt() -> None:
    toy = unsteady(1.0)
    runs: list[int] = []

    def noisy(a: torch.Tensor, b: torch.Tensor) -> None:
        runs.append(1)
        b.view(torch.int32).copy_(torch.arange(N) + len(runs))

    toy.noisy = noisy
    toy.kernels[2] = noisy
    watched = toy.trace

    def trace(program: Program, fn: Any, args: list[Any], watcher: Watcher) -> Sequence[Any]:
        return watched(program, fn, args, AsIntegers(watcher))

    toy.trace = trace
    finding = found(toy)
    assert not finding.right
    assert (
        "(triple) does not repeat itself: in another run, allocation 1 (int32[4]) holds other integers" in finding.text
    )


class AsIntegers(Rewriting):
    """A watcher that is told that what calls write are integers."""

    def before(self, begin: int, end: int, given: Sequence[Operand]) -> None:
        self.watcher.before(begin, end, [self.integers(each) for each in given])

    def after(self, begin: int, end: int, given: Sequence[Operand], *rest: Any) -> None:
        self.watcher.after(begin, end, [self.integers(each) for each in given], *rest)

    @staticmethod
    def integers(each: Operand) -> Operand:
        return replace(each, tensor=each.tensor.view(torch.int32)) if each.written else each


def test_an_operand_that_no_launch_uses_is_no_evidence() -> None:
    toy = Toy()
    last = toy.kernels[3]
    toy.kernels[3] = lambda b, x, out: (
        last(b, x, out),
        at(b.data_ptr() - 64).fill_(3),
    )  # what no launch needs any more
    assert found(toy).right
    a = toy.program().recording.launches[0].words[1]
    toy.more = [Operand(a, torch.ones(N), False)]
    assert found(toy).right


def test_bits_and_not_values_are_compared() -> None:
    toy = Toy()
    toy.kernels[2] = lambda a, b: (triple(a, b), b[0].fill_(float("nan")))
    assert "1 of 4 elements with other bits" in found(toy).text
    assert "off by" not in found(toy).text


def test_an_output_that_is_said_to_lie_elsewhere() -> None:
    toy = Toy()
    program = toy.program()
    outputs = (replace(program.recording.outputs[0], offset=1, size=(N - 1,)),)
    toy.result = lambda b, x: (b + x, x.add_(1))[0]
    wrong = replace(program, recording=replace(program.recording, outputs=outputs))
    trace = toy.trace
    toy.trace = lambda *args: [trace(*args)[0][:-1]]
    assert found(toy, wrong).text.startswith("no call differs, but output 0 does afterwards: allocation 2 at byte 4")


def test_no_room() -> None:
    assert found(Toy(), budget=1000).text.startswith("which launch differs was not looked for: ")


def test_a_diagnosis_that_fails_says_so() -> None:
    toy = Toy()

    def trace(*args: Any) -> Sequence[Any]:
        raise ValueError("no")

    toy.trace = trace
    assert found(toy).text == "which launch differs could not be found out: ValueError: no"


def test_a_random_state_that_cannot_be_brought_back_is_an_error() -> None:
    toy, states = Toy(), list[torch.Tensor]()
    exchange = toy.exchange_state

    def fail(*args: Any) -> torch.Tensor:
        states.append(args[1])
        if torch.equal(args[1], before):
            raise MemoryError
        return exchange(*args)

    toy.draws = torch.Generator().manual_seed(7)
    before = toy.draws.get_state()
    toy.exchange_state = fail
    with pytest.raises(ReplayError, match="the random state could not be brought back: MemoryError"):
        found(toy)
    assert len(states) > 1


def test_numbers_are_drawn_apart() -> None:
    toy = Toy()
    toy.draws = torch.Generator().manual_seed(7)
    before, seen = toy.draws.get_state(), list[torch.Tensor]()
    toy.result = lambda b, x: (seen.append(toy.draws.get_state()), b + x, x.add_(1))[1]
    found(toy)
    assert torch.equal(toy.draws.get_state(), before)
    assert not any(torch.equal(state, before) for state in seen)


def test_a_program_that_is_not_known_is_not_searched() -> None:
    driver: Any = Toy()
    assert diagnose(Suspect(list, driver, None, [], 1)) is None


def test_a_refusal_says_what_was_found() -> None:
    recording: Recording = Toy().program().recording
    launch = replace(recording.launches[2], loc="model.py:3", nodes=("mul",))
    refusal = Refusal("comparison-failed", "replayed: output 0 has other values")
    named = Finding("launch 2 differs", launch).added_to(refusal)
    assert str(named) == (
        "comparison-failed: replayed: output 0 has other values; launch 2 differs [triple at model.py:3]"
    )
    assert named.nodes == ("mul",)
    assert Finding("nothing").added_to(refusal).launch is None
