"""What operators and kernels say of their operands, as facts of the launches that they made."""

from __future__ import annotations

import pytest

from pygraph.runtime.contract import Layout, Program, Slot
from pygraph.runtime.cuda.observe import Operand, Span, with_calls
from pygraph.runtime.recording import AllocationKind, Bytes, LaunchKind
from tests.runtime.captures import Capture

INPUT, POOL = AllocationKind.INPUT, AllocationKind.POOL


def given(*addresses: int, writes: bool = False) -> tuple[Operand, ...]:
    """Operands at ``addresses``, of eight bytes each."""
    return tuple(Operand(address, Bytes(0, 8), writes) for address in addresses)


def test_an_argument_is_written_unless_its_call_says_that_it_is_only_read() -> None:
    capture = Capture()
    x, y, z = capture.input(64), capture.input(64), capture.input(64)
    out = capture.pool(64)
    capture.launch(x, y, out)
    capture.launch(z)
    span = Span(0, 1, "add", given(x, y + 8) + given(y, out, writes=True))
    launches = with_calls(capture.launches, [span], capture.allocations, [])
    assert [launch.uses for launch in launches] == [None, None]
    assert launches[0].read_only == {(INPUT, 0)}
    slots = (Slot(0, 0, INPUT, 0, 0), Slot(0, 1, INPUT, 1, 0), Slot(0, 2, POOL, 0, 0), Slot(1, 0, INPUT, 2, 0))
    assert Program(capture.recording(launches=launches), slots, Layout(0, {}, ())).written == {1, 2}


def test_launches_that_use_the_generators_memory_draw() -> None:
    capture = Capture()
    capture.launch(5, 0x7E00_0000_0000)
    capture.launch(5)
    launches = with_calls(capture.launches, [], capture.allocations, [0x7E00_0000_0000, 0x7E00_0000_0200])
    assert [launch.random for launch in launches] == [True, False]


def reach_of(name: str, reads: tuple[int, ...]) -> frozenset[tuple[AllocationKind, int]] | None:
    """What the second of three launches can reach, when its call ``name`` reads ``reads``."""
    capture = Capture(0x7F00_0000_0000)
    capture.input(64)
    capture.constant(0x5500_0000_0000, 64)
    capture.launch(1)
    capture.input(0)
    capture.pool(64)
    capture.launch(2)
    capture.launch(3)
    capture.pool(64)
    spans = [Span(0, 1, "aten.relu.default", ()), Span(1, 2, name, given(*reads))]
    launches = with_calls(capture.launches, spans, capture.allocations, [])
    assert [launch.call for launch in launches] == ["aten.relu.default", name, None]
    assert launches[2].may_access is None
    return launches[1].may_access


X, WEIGHT, NOBODYS = 0x7F00_0000_0000, 0x5500_0000_0000, 0x7B00_0000_0000


def test_an_operator_of_aten_reaches_what_it_was_given_and_what_it_made() -> None:
    assert reach_of("aten.add.Tensor", (X + 8, WEIGHT, 0)) == {(INPUT, 0), (POOL, 0)}
    assert reach_of("aten.add.Tensor", (X + 64 + 4096,)) == {(INPUT, 1), (POOL, 0)}


@pytest.mark.parametrize("name", ["triton_poi_fused_0", "mylib.add.default", "aten_extra.add.default"])
def test_others_may_reach_anything(name: str) -> None:
    assert reach_of(name, (X,)) is None


def test_an_operator_that_was_given_memory_of_nobodys_may_reach_anything() -> None:
    assert reach_of("aten.add.Tensor", (X, NOBODYS)) is None


def test_copies_and_fills_use_every_word() -> None:
    capture = Capture()
    x = capture.input(64)
    capture.launch(x, x + 32, kind=LaunchKind.MEMCPY, signature=(8, 1, 1))
    capture.launch(x, kind=LaunchKind.MEMSET, signature=(0, 1, 8))
    spans = [Span(0, 2, "aten.copy_.default", given(x) + given(x, writes=True))]
    launches = with_calls(capture.launches, spans, capture.allocations, [])
    assert [launch.may_access for launch in launches] == [None, None]
    assert [launch.call for launch in launches] == ["aten.copy_.default"] * 2
