"""Any order of launches that keeps the dependences recorded from reads and writes computes the same, bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.runtime.driver import Program
from pygraph.runtime.host import HostDriver
from pygraph.runtime.layout import plan
from pygraph.runtime.ordering import dependences
from pygraph.runtime.outcome import difference, observe
from pygraph.runtime.recording import Recording
from pygraph.runtime.slots import SlotTable, discover
from tests.runtime.orders import keeps
from tests.runtime.programs import PROGRAMS, region_calls
from tests.runtime.regions import RegionCall, copy_arguments


@functools.cache
def _recorded(program: str, index: int) -> tuple[HostDriver, Recording, SlotTable]:
    driver = HostDriver()
    call = region_calls(program)[index][0]
    first, second = driver.capture(call.fn, call.args), driver.capture(call.fn, call.args)
    table = discover(first, second)
    assert isinstance(table, SlotTable)
    return driver, first, table


def _draw_order(data: st.DataObject, count: int, edges: list[tuple[int, int]]) -> tuple[int, ...]:
    waiting = {i: sum(later == i for _, later in edges) for i in range(count)}
    order: list[int] = []
    while waiting:
        ready = [i for i, left in waiting.items() if not left]
        order.append(data.draw(st.sampled_from(ready)))
        del waiting[order[-1]]
        for earlier, later in edges:
            if earlier == order[-1]:
                waiting[later] -= 1
    return tuple(order)


def _assert_equal(call: RegionCall, driver: HostDriver, program: Program, seed: int) -> None:
    executable = driver.instantiate(program)
    theirs = call.fresh(seed)
    ours: list[Any] = copy_arguments(theirs)
    tensors = [i for i, arg in enumerate(theirs) if isinstance(arg, torch.Tensor)]
    state = torch.get_rng_state()
    expected = observe(call.run(theirs), theirs, tensors, torch.get_rng_state())
    torch.set_rng_state(state)
    outputs = executable.replay(ours)
    assert outputs is not None
    assert difference(expected, observe(outputs, ours, tensors, torch.get_rng_state())) is None
    executable.close()


@pytest.mark.parametrize("name", PROGRAMS)
@settings(deadline=None, max_examples=30, derandomize=True)
@given(data=st.data())
def test_any_order_that_keeps_the_dependences_computes_the_same(name: str, data: st.DataObject) -> None:
    for index, calls in enumerate(region_calls(name)):
        driver, recording, table = _recorded(name, index)
        layout = plan(recording, table.slots, reuse=data.draw(st.booleans(), label="reuse"))
        edges = dependences(recording, table.slots, layout, inputs_may_overlap=data.draw(st.booleans()))
        order = _draw_order(data, len(recording.launches), edges)
        assert keeps(order, edges)
        alignment = {i: 16 for i, arg in enumerate(calls[0].args) if isinstance(arg, torch.Tensor)}
        program = Program(recording, table.slots, layout, order, alignment)
        _assert_equal(calls[0], driver, program, data.draw(st.integers(0, 5)))


def test_independent_launches_are_found() -> None:
    _, recording, table = _recorded("branches", 0)
    own = plan(recording, table.slots, reuse=False)
    edges = dependences(recording, table.slots, own, inputs_may_overlap=False)
    backwards = _last_first(len(recording.launches), edges)
    assert keeps(backwards, edges)
    assert list(backwards) != sorted(backwards)
    packed = plan(recording, table.slots)
    assert packed.nbytes < own.nbytes
    assert set(edges) <= _closure(dependences(recording, table.slots, packed, inputs_may_overlap=False))


def _last_first(count: int, edges: list[tuple[int, int]]) -> list[int]:
    """The order that takes the last ready launch each time."""
    order: list[int] = []
    while len(order) < count:
        left = [i for i in range(count) if i not in order]
        order.append(max(i for i in left if all(a in order for a, b in edges if b == i)))
    return order


def _closure(edges: list[tuple[int, int]]) -> set[tuple[int, int]]:
    reached = set(edges)
    while True:
        more = {(a, d) for a, b in reached for c, d in edges if b == c} - reached
        if not more:
            return reached
        reached |= more
