"""Words that point at scratch memory, in the parameters that kernels are patched with."""

from __future__ import annotations

import pytest

from pygraph.errors import CaptureError
from pygraph.runtime.cuda.executable import with_scratch
from pygraph.runtime.cuda.nodes import CopyNode, KernelNode, Node
from pygraph.runtime.driver import Inert, Program, Slot
from pygraph.runtime.layout import plan
from pygraph.runtime.recording import AllocationKind
from tests.runtime.captures import Capture

LIVE, SCRATCH = 0x7A00_0000_0610, 0x5100_0800_0000
PLACES = ((0, 4), (8, 8), (16, 8))


def program(inert: Inert, *, slots: bool = True, nbytes: int = 64, scratch: int = SCRATCH) -> Program:
    """One kernel: a number, an operand, and an address of somebody's."""
    capture = Capture()
    x = capture.input(nbytes)
    capture.launch(7, x, LIVE)
    recording = capture.recording(scratch=scratch)
    found = (Slot(0, 1, AllocationKind.INPUT, 0, 0),) if slots else ()
    return Program(recording, found, plan(recording, found), (0,), {}, (inert,))


def kernel() -> KernelNode:
    blob = (7).to_bytes(8, "little") + bytes(8) + LIVE.to_bytes(8, "little") + b"rest"
    return KernelNode(100, blob, ((0, 4), (8, 16), (24, 4)), PLACES)


def test_only_that_word_changes_and_it_keeps_its_residue() -> None:
    (node,) = with_scratch(program(Inert(0, 2, scratch=True)), [kernel()])
    assert isinstance(node, KernelNode)
    before = kernel().blob
    assert (node.blob[:16], node.blob[24:]) == (before[:16], before[24:])
    word = int.from_bytes(node.blob[16:24], "little")
    assert word % 512 == LIVE % 512
    assert SCRATCH <= word < SCRATCH + 512
    assert (node.handle, node.layout, node.places) == (100, kernel().layout, PLACES)


def test_other_inert_words_stay_as_captured() -> None:
    assert with_scratch(program(Inert(0, 2)), [kernel()]) == [kernel()]


@pytest.mark.parametrize("changes", [{"slots": False}, {"nbytes": 0}])
def test_a_kernel_that_is_never_patched_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(CaptureError) as caught:
        with_scratch(program(Inert(0, 2, scratch=True), **changes), [kernel()])  # type: ignore[arg-type]
    assert (caught.value.reason, caught.value.launch) == ("foreign-address", 0)


@pytest.mark.parametrize(
    ("inert", "node", "scratch"),
    [
        (Inert(0, 0, scratch=True), kernel(), SCRATCH),
        (Inert(0, 2, scratch=True), CopyNode(1, 64), SCRATCH),
        (Inert(0, 2, scratch=True), kernel(), 0),
    ],
)
def test_what_cannot_point_there_is_an_error(inert: Inert, node: Node, scratch: int) -> None:
    with pytest.raises(CaptureError) as caught:
        with_scratch(program(inert, scratch=scratch), [node])
    assert caught.value.reason == "invalid-program"
