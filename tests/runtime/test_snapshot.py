"""Copies of arguments: other addresses, the same values, strides, alignment and overlaps, between guards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.errors import CaptureError
from pygraph.runtime.tensors import blocks, extent, span, take


def copied(args: list[Any], sensitive: tuple[int, ...] = ()) -> list[Any]:
    return take(args, blocks(args, sensitive)).args


@st.composite
def views(draw: st.DrawFn) -> list[torch.Tensor]:
    """Strided views, overlapping or not, empty or not, of two storages."""
    storages = [torch.arange(64.0), torch.arange(64, dtype=torch.int16)]
    found = []
    for _ in range(draw(st.integers(1, 5))):
        base = draw(st.sampled_from(storages))
        size = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
        stride = tuple(draw(st.integers(0, 6)) for _ in size)
        found.append(torch.as_strided(base, size, stride, draw(st.integers(0, 40))))
    if draw(st.booleans()):
        found.append(found[0])
    return found


@settings(deadline=None, max_examples=200)
@given(views(), st.booleans())
def test_copies_are_alike_but_elsewhere(args: list[torch.Tensor], whole: bool) -> None:
    sensitive = tuple(range(len(args))) if whole else ()
    copies = copied(list(args), sensitive)
    for arg, copy in zip(args, copies, strict=True):
        assert torch.equal(arg, copy)
        assert (arg.size(), arg.stride(), arg.dtype) == (copy.size(), copy.stride(), copy.dtype)
        assert arg.data_ptr() % 64 == copy.data_ptr() % 64
        assert not extent(arg) or copy.untyped_storage().data_ptr() != arg.untyped_storage().data_ptr()
        assert not whole or not extent(arg) or arg.storage_offset() == copy.storage_offset()
    for i, a in enumerate(args):
        for j, b in enumerate(args):
            assert (a is b) == (copies[i] is copies[j])
            if _meet(a, b):
                assert a.data_ptr() - b.data_ptr() == copies[i].data_ptr() - copies[j].data_ptr()


def _meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    return max(a.data_ptr(), b.data_ptr()) < min(a.data_ptr() + extent(a), b.data_ptr() + extent(b))


def test_a_small_view_of_a_large_storage_is_a_small_copy() -> None:
    storage = torch.zeros(10_000)
    (block,) = blocks([storage[50:60]])
    assert block.nbytes == 40
    (whole,) = blocks([storage[50:60]], [0])
    assert whole.nbytes == 40_000


def test_only_chosen_blocks_are_copied() -> None:
    a, b = torch.zeros(4), torch.zeros(4)
    args = [a, 3, b, None, a[1:]]
    chosen = [block for block in blocks(args) if 0 in block.members]
    assert chosen[0].members == (0, 4)
    copies = take(args, chosen).args
    assert copies[1:4] == [3, b, None]
    assert copies[2] is b
    copies[0][2] = 5
    assert copies[4].tolist() == [0, 5, 0]
    assert a.tolist() == [0] * 4


def test_guards_tell_when_bytes_beside_a_copy_are_written() -> None:
    args = [torch.zeros(5)]
    for at in (-1, 5):
        snapshot = take(args, blocks(args))
        snapshot.args[0].fill_(1)
        assert snapshot.intact
        copy = snapshot.args[0]
        torch.as_strided(copy, (1,), (1,), copy.storage_offset() + at).fill_(1)
        assert not snapshot.intact


def test_parameters_and_inference_tensors_are_copied_plainly() -> None:
    with torch.inference_mode():
        inference = torch.ones(3)
    copies = copied([torch.nn.Parameter(torch.ones(3)), inference])
    assert all(type(copy) is torch.Tensor and not copy.requires_grad for copy in copies)
    assert all(copy.tolist() == [1, 1, 1] for copy in copies)


def test_an_element_across_its_own_alignment_is_refused() -> None:
    memory = bytearray(64)
    odd = torch.frombuffer(memory, dtype=torch.float32, count=4, offset=1)
    if odd.data_ptr() % 4 == 0:
        odd = torch.frombuffer(memory, dtype=torch.float32, count=4, offset=2)
    with pytest.raises(CaptureError, match="argument-misaligned"):
        copied([odd])


def test_storages_that_overlap_are_one_block() -> None:
    memory = bytearray(128)
    low = torch.frombuffer(memory, dtype=torch.uint8, count=100)
    high = torch.frombuffer(memory, dtype=torch.uint8, count=64, offset=64)
    (block,) = blocks([low, high])
    assert block.nbytes == 128
    copies = copied([low, high])
    copies[0][70] = 9
    assert copies[1][6] == 9
    assert span(low).sum() == 0
