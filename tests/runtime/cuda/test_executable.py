"""The native region of a program: places of patched addresses, scratch words, bytes of memory, edges, and cleanup."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from pygraph.errors import CaptureError
from pygraph.program.order import Order
from pygraph.program.program import NonPointerWord, Program, Slot
from pygraph.program.recording import AllocationKind, Recording
from pygraph.program.steps import with_steps
from pygraph.runtime.cuda import executable
from pygraph.runtime.cuda.executable import Part, with_scratch
from pygraph.runtime.cuda.nodes import CopyNode, KernelNode, Node
from pygraph.runtime.description import Patch, describe_region
from pygraph.runtime.slots import SlotTable, discover
from tests.program.layouts import plan
from tests.runtime.captures import Capture

SIZE = 24 << 20


def copies(base: int, gap: int) -> Recording:
    """Four intermediates, each filled from the one before it, then all of them needed once more."""
    capture = Capture(base, gap)
    pool = [capture.pool(SIZE) for _ in range(4)]
    for to, source in [(1, 0), (2, 1), (3, 2), (0, 3), (1, 0), (2, 1)]:
        capture.launch(pool[to], pool[source] + 512)
    return capture.recording(alignment=512)


def test_every_patch_names_the_piece_that_its_intermediate_lies_in() -> None:
    first, second = copies(0x7F00_0000_0000, 4096), copies(0x6600_0000_0000, 8192)
    table = discover(first, second)
    assert isinstance(table, SlotTable)
    program = with_steps(Program(first, table.slots, plan(first, table.slots)))
    described = describe_region(program, (), lambda slot: [(slot.launch, slot.word, slot.offset)])
    (step,) = described.steps
    assert step.call is None
    assert [(block.nbytes, block.died) for block in step.blocks] == [(SIZE, 0)] * 4
    places = (block[2] for block in program.steps[0].blocks)
    for block, ((index, at),) in zip(step.blocks, (offsets.items() for offsets in places), strict=True):
        assert block.patches == tuple(Patch(s.launch, s.word, at + s.offset) for s in program.slots if s.index == index)
    assert {patch.delta for block in step.blocks for patch in block.patches if patch.place == 1} == {512}


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


# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory_is_counted_by_instances_nodes_and_parameters() -> None:
    node, nothing = kernel(), executable.device_bytes([], 1)
    one = executable.device_bytes([node], 1) - nothing
    assert one - (executable.device_bytes([CopyNode(1, 64)], 1) - nothing) == len(node.blob)
    assert executable.device_bytes([node, None, node], 3) == 3 * nothing + 2 * one


# -- the order of launches ---------------------------------------------------------------------------------------------


def test_edges_are_those_of_the_order_within_a_segment_and_kernels_on_its_longest_path_come_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[int, list[tuple[int, int]]]] = []
    monkeypatch.setattr(executable, "replace_edges", lambda graph, edges: told.append((graph, list(edges))))
    driver = Mock()
    driver.cuCtxGetStreamPriorityRange.return_value = (0, 0, -5)
    driver.cuGraphKernelNodeSetAttribute.return_value = (0,)
    order = Order.of([set(), {0}, set(), {1, 2}, {3}])
    nodes = [CopyNode(100, 64), *[kernel()] * 4]
    executable._reorder(driver, 7, nodes, {2: 102, 3: 103, 4: 104}, order)
    executable._reorder(driver, 8, nodes, {0: 200, 1: 201}, order)
    executable._reorder(driver, 9, nodes, {2: 102}, None)
    assert told == [(7, [(102, 103), (103, 104)]), (8, [(200, 201)])]
    assert driver.CUkernelNodeAttrValue.return_value.priority == -5
    assert sorted(each.args[0] for each in driver.CUgraphNode.mock_calls) == [103, 104, 201]


def test_edges_are_read_back_by_launch_and_those_that_do_not_wait_for_completion_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    complete, programmatic = bytes(8), bytes((1, 0, 1, 0, 0, 0, 0, 0))
    edges = {5: [(100, 101, complete), (101, 102, programmatic)], 6: [(203, 204, complete)]}
    monkeypatch.setattr(executable, "read_edges", edges.__getitem__)
    parts = [Part(0, 0, {0: 100, 1: 101, 2: 102}), Part(6, 1, {3: 203, 4: 204})]
    assert executable._edges(parts, 5) == [(0, 1), (3, 4)]


# -- the native region -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["node", "region"])
def test_segments_are_destroyed_if_their_region_cannot_be_made(broken: str) -> None:
    device, capture = Mock(), Mock(arguments=(None,))
    for function in (device.driver.cuGraphExecDestroy, device.driver.cuGraphDestroy):
        function.return_value = (0,)
    device.driver.CUgraphExec = device.driver.CUgraph = int
    (device.native.KernelNode if broken == "node" else device.native.CudaRegion).side_effect = MemoryError
    program = with_stranger(NonPointerWord(0, 2))
    parts = [Part(0, 0, {0: 100}), Part(6, 7, {1: 200})]
    with pytest.raises(MemoryError):
        executable._native_region(device, Mock(), with_steps(program), capture, [kernel()], parts)
    device.driver.cuGraphExecDestroy.assert_called_once_with(7)
    device.driver.cuGraphDestroy.assert_called_once_with(6)
