"""Random programs with random eager calls among their launches, over random memory: each call does what the program
does, and calls each operator once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from pygraph.runtime.compare import observe
from pygraph.runtime.host import HostDriver
from pygraph.runtime.region import Region, RegionOptions, RegionRecord

N = 4
"""All values are N by N."""

runs: list[str] = []
"""The operators that were called."""

_library = torch.library.Library("pygraph_eager_property", "DEF")


def _define(schema: str, run: Any, fake: Any) -> None:
    name = schema.partition("(")[0]

    def counted(*args: Any) -> Any:
        runs.append(name)
        return run(*args)

    _library.define(schema)
    _library.impl(name, counted, "CPU")
    _library.impl(name, fake, "Meta")


def _raising(x: torch.Tensor) -> torch.Tensor:
    if len(runs) % 7 == 0:
        raise ValueError(f"call {len(runs)}")
    return x + 1


_define("fresh(Tensor x) -> Tensor", lambda x: x * 0.5 + len(runs), torch.empty_like)
_define("noise(Tensor x) -> Tensor", lambda x: x * 0.5 + torch.rand_like(x), torch.empty_like)
_define("turned(Tensor x) -> Tensor", lambda x: (x / 2).t().contiguous().t(), torch.empty_like)
_define("same(Tensor x) -> Tensor", lambda x: x, torch.empty_like)
_define("half_(Tensor(a!) x) -> Tensor(a!)", lambda x: x.mul_(0.5), lambda x: x)
_define("rows(Tensor(a) x) -> Tensor(a)", lambda x: x[:], lambda x: x[:])
_define("add_into(Tensor(a!) x, Tensor y) -> ()", lambda x, y: [x.add_(y, alpha=0.1)].clear(), lambda x, y: None)
_define("pair(Tensor x, Tensor y) -> Tensor[]", lambda x, y: [x - y, y.clone()], lambda x, y: [x.clone(), y.clone()])
_define("fill(Tensor(a!) out, Tensor x) -> ()", lambda out, x: [out.copy_(x * 0.5)].clear(), lambda out, x: None)
_define("raises(Tensor x) -> Tensor", _raising, torch.empty_like)
ops = torch.ops.pygraph_eager_property

CAPTURED = ("mm", "relu", "add_", "rand", "view", "cumsum")
EAGER = ("fresh", "noise", "turned", "same", "half_", "rows", "add_into", "pair", "fill", "raises")


@dataclass(frozen=True)
class Line:
    """One operator and the values that it is given, by number."""

    op: str
    a: int
    b: int


def apply(line: Line, values: list[torch.Tensor]) -> None:
    """Run one line, and keep what it makes."""
    a, b = values[line.a % len(values)], values[line.b % len(values)]
    match line.op:
        case "mm":
            values.append(torch.tanh(torch.mm(a, b)))
        case "relu":
            values.append(torch.relu(a))
        case "add_":
            a.add_(b, alpha=0.1)
        case "rand":
            values.append(a + torch.rand(N, N))
        case "view":
            values.append(a.t())
        case "cumsum":
            values.append(torch.tanh(torch.cumsum(a, 0)))
        case "fill":
            values.append(torch.empty(2, N, N)[line.b % 2])
            ops.fill(values[-1], a)
        case "add_into" | "pair":
            values.extend(getattr(ops, line.op)(a, b) or ())
        case name:
            values.append(getattr(ops, name)(a))


@dataclass(frozen=True)
class Program:
    """Lines over ``arguments`` tensors. The values ``returned`` count from the last one."""

    arguments: int
    lines: tuple[Line, ...]
    returned: tuple[int, ...]

    def __call__(self, args: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        values = list(args)
        args.clear()
        for line in self.lines:
            apply(line, values)
        return [values[-1 - at % len(values)] for at in self.returned]


lines = st.builds(Line, st.sampled_from([*CAPTURED, *EAGER]), st.integers(0, 12), st.integers(0, 12))
programs = st.builds(
    Program,
    st.integers(1, 3),
    st.lists(lines, min_size=2, max_size=10).map(tuple),
    st.lists(st.integers(0, 12), min_size=1, max_size=3).map(tuple),
)


def arguments(count: int, seed: int, shared: bool) -> list[torch.Tensor]:
    """Tensors of one memory that overlap, or each with its own."""
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randn(count * 4 * N * N, generator=generator)
    step = 4 if shared else 2 * N * N
    return [memory[i * step :][: N * N].view(N, N) for i in range(count)]


def run(fn: Any, args: list[torch.Tensor]) -> tuple[Any, str | None]:
    handed = list(args)
    try:
        outputs = fn(handed)
    except (RuntimeError, ValueError) as error:  # memory that overlaps in a way that an operator refuses
        return (handed, None), str(error)
    return (handed, observe(outputs, args)), None


def check(program: Program, shared: Sequence[bool], **options: Any) -> tuple[RegionRecord, int]:
    """A region around ``program`` does what the program does in so many calls, of which those in ``shared`` have
    arguments that overlap: results, arguments, random state, errors, and the operators that are called. Returns what
    became of it, and how many calls raised nothing."""

    def fn(args: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return program(args)

    denied = any(line.op == "same" for line in program.lines)  # whose result no captured operator takes for its operand
    region = Region(fn, HostDriver(), name="drawn", options=RegionOptions(**options))
    found: list[list[Any]] = []
    with torch.no_grad():
        for each in (program, region):
            runs.clear()
            torch.manual_seed(0)
            calls: list[Any] = []
            for call, overlap in enumerate(shared):
                args = arguments(program.arguments, call, overlap and not denied)
                done, error = run(each, args)
                calls.append((done, error, [arg.tolist() for arg in args], torch.get_rng_state().tolist(), list(runs)))
            found.append(calls)
    for expected, ours in zip(*found, strict=True):
        assert ours == expected
    return region.record, sum(error is None for _, error, *_ in found[0])


@settings(max_examples=60, derandomize=True)
@given(programs, st.lists(st.booleans(), min_size=5, max_size=8), st.booleans())
def test_any_program_with_eager_calls_equals_uncaptured_runs(
    program: Program, shared: list[bool], always: bool
) -> None:
    note(str(program))
    record, _ = check(program, shared, verify_every=int(always))
    refused = {"comparison-failed", "replay-raised", "comparison-raised", "capture-raised"} - _allowed(program)
    assert not refused.intersection(record.refusals), record


def _allowed(program: Program) -> set[str]:
    """Operators that return an operand, or other strides, although their schema or fake kernel denies that."""
    return {"comparison-failed"} if any(line.op in ("same", "turned") for line in program.lines) else set()


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "overlapping"])
@pytest.mark.parametrize("op", EAGER)
def test_each_kind_of_call_is_replayed(op: str, shared: bool) -> None:
    """On an intermediate, on a view of it, and on arguments, with draws in between."""
    on_intermediates = (Line("mm", 0, 1), Line("rand", 2, 0), Line(op, 3, 2), Line("view", 3, 0), Line(op, 4, 0))
    on_arguments = (Line(op, 0, 1), Line("rand", 3, 0), Line("mm", 5, 4))
    record, answered = check(Program(2, (*on_intermediates, *on_arguments), (0,)), [shared] * 6)
    assert record.replays == max(answered - 2, 0), record
    assert answered == (0 if (op, shared) == ("add_into", True) else 4 if op == "raises" else 6)
