"""What a native region is told: which memory each patched address comes from."""

from __future__ import annotations

from typing import Any

import pytest

from pygraph.errors import CaptureError
from pygraph.runtime.contract import NonPointerWord, Program, Slot
from pygraph.runtime.cuda.executable import Part, _Builder, with_scratch
from pygraph.runtime.cuda.nodes import CopyNode, KernelNode, Node
from pygraph.runtime.cuda.segments import Segments, cut
from pygraph.runtime.layout import plan
from pygraph.runtime.recording import AllocationKind, Recording
from pygraph.runtime.slots import SlotTable, discover
from tests.runtime.captures import Capture

MB = 1 << 20
SIZE = 24 * MB


class Region:
    """Notes what it is told; sources are numbered in order."""

    def __init__(self) -> None:
        self.segments: list[tuple[int, int]] = []
        self.memory: list[tuple[Any, ...]] = []
        self.patches: list[tuple[int, int, int, int]] = []

    def _source(self, *memory: Any) -> int:
        self.memory.append(memory)
        return len(self.memory) - 1

    def add_segment(self, graph: int, instance: int) -> None:
        self.segments.append((graph, instance))

    def add_piece(self, nbytes: int, segment: int) -> int:
        return self._source("piece", nbytes, segment)

    def add_block(self, nbytes: int, born: int, died: int) -> int:
        return self._source("block", nbytes, born, died)

    def add_copy(self, handle: int, segment: int) -> int:
        return handle

    def add_patch(self, node: int, place: int, source: int, delta: int) -> None:
        self.patches.append((node, place, source, delta))


def copies(base: int, gap: int) -> Recording:
    """Four intermediates, each filled from the one before it, then all of them needed once more."""
    capture = Capture(base, gap)
    pool = [capture.pool(SIZE) for _ in range(4)]
    for to, source in [(1, 0), (2, 1), (3, 2), (0, 3), (1, 0), (2, 1)]:
        capture.launch(pool[to], pool[source] + 512)
    return capture.recording(alignment=512)


def built() -> tuple[Program, Segments, Region]:
    first, second = copies(0x7F00_0000_0000, 4096), copies(0x6600_0000_0000, 8192)
    table = discover(first, second)
    assert isinstance(table, SlotTable)
    layout = plan(first, table.slots)
    program = Program(first, table.slots, layout)
    segments, region = cut(program), Region()
    nodes = [CopyNode(i, 64) for i in range(6)]
    _Builder(region, program, (), nodes, segments, [Part(0, 0, {i: i for i in range(6)})]).build()
    return program, segments, region


def test_a_workspace_is_handed_over_in_pieces() -> None:
    _, segments, region = built()
    assert len(segments.bounds) == 1
    assert region.segments == [(0, 0)]
    assert region.memory == [("piece", SIZE, 0)] * 4


def test_every_patch_names_the_piece_that_its_intermediate_lies_in() -> None:
    program, segments, region = built()
    (workspace,) = segments.workspaces
    place = {index: (number, at) for number, piece in enumerate(workspace) for index, at in piece.offsets.items()}
    assert sorted(place) == [0, 1, 2, 3]
    assert sorted({number for number, _ in place.values()}) == [0, 1, 2, 3]
    expected = [(s.launch, s.word, place[s.index][0], place[s.index][1] + s.offset) for s in program.slots]
    assert region.patches == expected
    assert {delta for _, word, _, delta in region.patches if word == 1} == {512}


# -- words that point at scratch memory ------------------------------------------------------------------------------

LIVE, SCRATCH = 0x7A00_0000_0610, 0x5100_0800_0000
PLACES = ((0, 4), (8, 8), (16, 8))


def with_stranger(word: NonPointerWord, *, slots: bool = True, nbytes: int = 64, scratch: int = SCRATCH) -> Program:
    """One kernel: a number, an operand, and an address of somebody's."""
    capture = Capture()
    x = capture.input(nbytes)
    capture.launch(7, x, LIVE)
    recording = capture.recording(scratch=scratch)
    found = (Slot(0, 1, AllocationKind.INPUT, 0, 0),) if slots else ()
    return Program(recording, found, plan(recording, found), (word,))


def kernel() -> KernelNode:
    blob = (7).to_bytes(8, "little") + bytes(8) + LIVE.to_bytes(8, "little") + b"rest"
    return KernelNode(100, blob, ((0, 4), (8, 16), (24, 4)), PLACES)


def test_only_that_word_changes_and_it_keeps_its_residue() -> None:
    (node,) = with_scratch(with_stranger(NonPointerWord(0, 2, scratch=True)), [kernel()])
    assert isinstance(node, KernelNode)
    before = kernel().blob
    assert (node.blob[:16], node.blob[24:]) == (before[:16], before[24:])
    word = int.from_bytes(node.blob[16:24], "little")
    assert word % 512 == LIVE % 512
    assert SCRATCH <= word < SCRATCH + 512
    assert (node.handle, node.layout, node.places) == (100, kernel().layout, PLACES)


def test_other_inert_words_stay_as_captured() -> None:
    assert with_scratch(with_stranger(NonPointerWord(0, 2)), [kernel()]) == [kernel()]


@pytest.mark.parametrize("changes", [{"slots": False}, {"nbytes": 0}])
def test_a_kernel_that_is_never_patched_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(CaptureError) as caught:
        with_scratch(with_stranger(NonPointerWord(0, 2, scratch=True), **changes), [kernel()])  # type: ignore[arg-type]
    assert (caught.value.reason, caught.value.launch) == ("foreign-address", 0)


@pytest.mark.parametrize(
    ("word", "node", "scratch"),
    [
        (NonPointerWord(0, 0, scratch=True), kernel(), SCRATCH),
        (NonPointerWord(0, 2, scratch=True), CopyNode(1, 64), SCRATCH),
        (NonPointerWord(0, 2, scratch=True), kernel(), 0),
    ],
)
def test_what_cannot_point_there_is_an_error(word: NonPointerWord, node: Node, scratch: int) -> None:
    with pytest.raises(CaptureError) as caught:
        with_scratch(with_stranger(word, scratch=scratch), [node])
    assert caught.value.reason == "invalid-program"
