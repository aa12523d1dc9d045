"""Random regions on arguments that overlap at random: a replay does what the region does, or says that it will not."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.runtime.host import HostDriver
from tests.runtime.host.replays import make_executable
from tests.runtime.regions import RegionCall, same_bits

ARGUMENTS = 3
ELEMENTS = 12
STORAGE = 40

Step = tuple[str, int, int]

steps = st.lists(
    st.tuples(st.sampled_from(["add", "add_", "out", "view", "sort", "random", "zero", "index", "cat"]), *[st.integers(0, 9)] * 2),
    min_size=1,
    max_size=8,
)
offsets = st.lists(st.integers(0, STORAGE - ELEMENTS), min_size=ARGUMENTS, max_size=ARGUMENTS)


def apply(step: Step, values: list[torch.Tensor]) -> None:
    """One step on the values made so far; what it makes is appended."""
    name, i, j = step
    a, b = values[i % len(values)], values[j % len(values)]
    if name == "add":
        values.append(a + b)
    elif name == "add_":
        a.add_(b)
    elif name == "out":
        values.append(torch.mul(a, b, out=torch.empty(3, 4)))
    elif name == "view":
        values.append(a.view(4, 3).t())
    elif name == "sort":
        values.extend(torch.sort(a.contiguous(), 1).values.unsqueeze(0).unbind(0))
    elif name == "random":
        values.append(torch.rand(3, 4) + a)
    elif name == "zero":
        values.append(torch.zeros_like(a))
    elif name == "index":
        a.index_put_((torch.zeros(1, dtype=torch.int64),), b[:1] * 2)
    else:
        values.append(torch.cat([a, b])[1:4])


def region_of(program: list[Step]) -> Any:
    """A region that runs ``program`` and returns all that it made, and its arguments."""

    def region(args: list[Any]) -> tuple[Any, ...]:
        values = list(args)
        for step in program:
            apply(step, values)
        return tuple(v.contiguous() if v.stride() != (4, 1) else v for v in values)

    return region


def overlapping(places: list[int], storage: torch.Tensor) -> list[torch.Tensor]:
    return [storage[place : place + ELEMENTS].view(3, 4) for place in places]


@settings(deadline=None, max_examples=60)
@given(program=steps, first=offsets, second=offsets)
def test_replay_or_refusal(driver: HostDriver, program: list[Step], first: list[int], second: list[int]) -> None:
    region = region_of(program)
    if any(step[0] == "view" for step in program):
        program = [step for step in program if step[0] != "view"] or [("add", 0, 1)]
        region = region_of(program)
    call = RegionCall(region, [torch.randn(3, 4) for _ in range(ARGUMENTS)])
    executable, _ = make_executable(driver, call, alignment=1)
    for seed, places in enumerate((first, second)):
        check(driver, call, executable, places, seed)
    executable.close()


def check(driver: HostDriver, call: RegionCall, executable: Any, places: list[int], seed: int) -> None:
    original = torch.randn(STORAGE, generator=torch.Generator().manual_seed(seed))
    theirs, ours = original.clone(), original.clone()
    start = driver.snapshot_rng()
    expected = call.run(overlapping(places, theirs))
    after = driver.snapshot_rng()
    driver.restore_rng(start)
    outputs = executable.replay(overlapping(places, ours))
    assert outputs is not None
    assert same_bits(outputs, expected)
    assert torch.equal(ours, theirs)
    assert torch.equal(driver.snapshot_rng(), after)
