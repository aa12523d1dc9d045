"""Random regions on arguments that overlap at random: a replay does what the region does, or says that it will not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.runtime.contract import Executable
from pygraph.runtime.host import HostDriver
from tests.runtime.host.replays import make_executable
from tests.runtime.regions import RegionCall, same_bits

ARGUMENTS = 3
ELEMENTS = 12
STORAGE = 40

OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add": torch.add,
    "add_": lambda a, b: a.add_(b),
    "out": lambda a, b: torch.mul(a, b, out=torch.empty(3, 4)),
    "transpose": lambda a, b: a.reshape(4, 3).t().contiguous(),
    "sort": lambda a, b: torch.sort(a.contiguous(), 1).values,
    "random": lambda a, b: torch.rand(3, 4) + a,
    "zero": lambda a, b: torch.zeros_like(a),
    "index": lambda a, b: a.index_put_((torch.zeros(1, dtype=torch.int64),), b[:1] * 2),
    "cat": lambda a, b: torch.cat([a, b])[1:4],
}
"""Each gives another value to go on with."""

Step = tuple[str, int, int]
"""An operation, and the numbers of its operands among the values made so far."""

step = st.tuples(st.sampled_from(list(OPERATIONS)), st.integers(0, 9), st.integers(0, 9))
steps = st.lists(step, min_size=1, max_size=8)
offsets = st.lists(st.integers(0, STORAGE - ELEMENTS), min_size=ARGUMENTS, max_size=ARGUMENTS)


def region_of(program: list[Step]) -> Any:
    """A region that runs ``program`` and returns all that it made, and its arguments."""

    def region(args: list[Any]) -> tuple[Any, ...]:
        values = list(args)
        for name, i, j in program:
            values.append(OPERATIONS[name](values[i % len(values)], values[j % len(values)]))
        return tuple(values)

    return region


def overlapping(places: list[int], storage: torch.Tensor) -> list[torch.Tensor]:
    return [storage[place : place + ELEMENTS].view(3, 4) for place in places]


def overlap(places: list[int]) -> bool:
    return any(abs(a - b) < ELEMENTS for a, b in itertools.combinations(places, 2))


@settings(deadline=None, max_examples=60)
@given(program=steps, first=offsets, second=offsets)
def test_replay_or_refusal(driver: HostDriver, program: list[Step], first: list[int], second: list[int]) -> None:
    call = RegionCall(region_of(program), [torch.randn(3, 4) for _ in range(ARGUMENTS)])
    executable, _ = make_executable(driver, call, alignment=1)
    for seed, places in enumerate((first, second, [0, ELEMENTS, 2 * ELEMENTS])):
        check(driver, call, executable, places, seed)
    executable.close()


def check(driver: HostDriver, call: RegionCall, executable: Executable, places: list[int], seed: int) -> None:
    original = torch.randn(STORAGE, generator=torch.Generator().manual_seed(seed))
    theirs, ours = original.clone(), original.clone()
    start = torch.get_rng_state()
    try:
        expected = call.run(overlapping(places, theirs))
    except RuntimeError:
        assert executable.replay(overlapping(places, ours)) is None
        return
    after = torch.get_rng_state()
    torch.set_rng_state(start)
    outputs = executable.replay(overlapping(places, ours))
    if outputs is None:
        assert overlap(places)
        assert torch.equal(ours, original)
        return
    assert same_bits(outputs, expected)
    assert torch.equal(ours, theirs)
    assert torch.equal(torch.get_rng_state(), after)
