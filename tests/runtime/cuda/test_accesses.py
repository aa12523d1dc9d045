"""What operators and kernels say of their operands, as facts of the launches that they made."""

from __future__ import annotations

from pygraph.runtime.cuda.accesses import with_accesses
from pygraph.runtime.cuda.observation import Span
from pygraph.runtime.driver import Slot
from pygraph.runtime.effects import written_arguments
from pygraph.runtime.recording import AllocationKind, LaunchKind
from tests.runtime.captures import Capture

INPUT, POOL = AllocationKind.INPUT, AllocationKind.POOL


def test_an_argument_is_written_unless_its_call_says_that_it_is_only_read() -> None:
    capture = Capture()
    x, y, z = capture.input(64), capture.input(64), capture.input(64)
    out = capture.pool(64)
    capture.launch(x, y, out)
    capture.launch(z)
    span = Span(0, 1, "add", reads=(x, y + 8), writes=(y, out))
    launches = with_accesses(capture.launches, [span], capture.allocations, [])
    assert [launch.accesses for launch in launches] == [None, None]
    assert launches[0].read_only == {(INPUT, 0)}
    slots = [Slot(0, 0, INPUT, 0, 0), Slot(0, 1, INPUT, 1, 0), Slot(0, 2, POOL, 0, 0), Slot(1, 0, INPUT, 2, 0)]
    assert written_arguments(capture.recording(launches=launches), slots) == {1, 2}


def test_copies_and_fills_say_exactly_what_they_touch() -> None:
    capture = Capture()
    x, out = capture.input(64), capture.pool(64)
    capture.launch(out, x, name="memcpy", kind=LaunchKind.MEMCPY, signature=(48, 1, 1))
    capture.launch(out, name="memset", kind=LaunchKind.MEMSET, signature=(0, 4, 16))
    copy, fill = with_accesses(capture.launches, [], capture.allocations, [])
    assert copy.accesses is not None
    assert [(a.word, a.nbytes, a.reads, a.writes) for a in copy.accesses] == [
        (0, 48, False, True),
        (1, 48, True, False),
    ]
    assert fill.accesses is not None
    assert [(a.word, a.nbytes, a.reads, a.writes) for a in fill.accesses] == [(0, 64, False, True)]
    slots = [Slot(0, 0, POOL, 0, 0), Slot(0, 1, INPUT, 0, 0), Slot(1, 0, POOL, 0, 0)]
    assert written_arguments(capture.recording(launches=(copy, fill)), slots) == frozenset()


def test_launches_that_use_the_generators_memory_draw() -> None:
    capture = Capture()
    capture.launch(5, 0x7E00_0000_0000)
    capture.launch(5)
    launches = with_accesses(capture.launches, [], capture.allocations, [0x7E00_0000_0000, 0x7E00_0000_0200])
    assert [launch.random for launch in launches] == [True, False]
