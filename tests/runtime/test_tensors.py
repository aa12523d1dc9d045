"""Arguments: fingerprints by bits, and copies at other addresses."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.errors import CaptureError
from pygraph.runtime.tensors import blocks, digest, digests, extent, same_bytes, span, take, words_digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_every_bit_counts(dtype: torch.dtype) -> None:
    tensor = torch.zeros(5, dtype=torch.float32).to(dtype)
    before = digest(tensor)
    for byte in span(tensor):
        byte ^= 1
        assert digest(tensor) != before
        byte ^= 1
    assert digest(tensor) == before


@settings(max_examples=100)
@given(st.binary(min_size=1, max_size=100), st.integers(0, 99), st.integers(1, 255), st.integers(0, 7))
def test_the_digest_on_the_device_sees_every_byte(data: bytes, at: int, change: int, lead: int) -> None:
    tensor = torch.frombuffer(bytearray(bytes(lead) + data), dtype=torch.uint8)[lead:]
    other = tensor.clone()
    assert torch.equal(words_digest(tensor), words_digest(other))
    other[at % len(data)] ^= change
    assert not torch.equal(words_digest(tensor), words_digest(other))


def test_the_digest_on_the_device_sees_order_and_goes_past_one_chunk() -> None:
    words = torch.arange((1 << 22) + 5)
    swapped = words.clone()
    swapped[3], swapped[1 << 22] = words[1 << 22].clone(), words[3].clone()
    assert torch.equal(words_digest(span(words)), words_digest(span(words.clone())))
    assert not torch.equal(words_digest(span(words)), words_digest(span(swapped)))


def test_digests_of_many_tensors_are_those_of_each() -> None:
    many = [torch.arange(5), torch.zeros(0), torch.arange(6.0).view(2, 3).t(), torch.zeros(3, dtype=torch.bool)]
    assert digests(many) == [digest(each) for each in many]
    assert len({*digests(many)}) == len(many)


def test_same_bytes_of_many_pairs_finds_one_that_differs() -> None:
    pairs = [(torch.arange(4), torch.arange(4)), (torch.zeros(3), torch.zeros(3)), (torch.ones(2), torch.ones(2))]
    assert same_bytes(pairs)
    pairs[1][1][2] = -0.0
    assert not same_bytes(pairs)


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


@settings(max_examples=200)
@given(views(), st.sampled_from(["apart", "together", "whole"]))
def test_copies_are_alike_but_elsewhere(args: list[torch.Tensor], how: str) -> None:
    whole = how == "whole"
    found = blocks(args, tuple(range(len(args))) if whole else ())
    snapshot = take(list(args), found, found if how == "together" else ())
    copies = snapshot.args
    assert len({copies[block.members[0]].untyped_storage().data_ptr() for block in found}) == (
        min(1, len(found)) if how == "together" else len(found)
    )
    assert snapshot.intact
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


@pytest.mark.parametrize("shared", [False, True])
def test_a_write_within_a_cache_line_of_a_copy_shows(shared: bool) -> None:
    args = [torch.zeros(3), torch.ones(5, dtype=torch.int16), torch.zeros(33, dtype=torch.uint8)[1:]]
    found = blocks(args)
    snapshot = take(args, found, found if shared else ())
    for copy in snapshot.args:
        begin, end = copy.data_ptr(), copy.data_ptr() + copy.nbytes
        for address in (begin - 64, begin - 1, end, end + 63):
            byte = ctypes.c_ubyte.from_address(address)
            before, byte.value = byte.value, 0
            assert not snapshot.intact
            byte.value = before
    for copy in snapshot.args:
        copy.fill_(7)
    assert snapshot.intact


def _meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    return max(a.data_ptr(), b.data_ptr()) < min(a.data_ptr() + extent(a), b.data_ptr() + extent(b))


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


@settings(max_examples=100)
@given(st.integers(0, 40), st.sampled_from([0, 3, 8]), st.sampled_from([0, 5, 16]), st.integers(0, 39))
def test_same_bytes(length: int, lead: int, other_lead: int, at: int) -> None:
    data = torch.randint(0, 256, (length,), dtype=torch.uint8)
    left = torch.cat((torch.zeros(lead, dtype=torch.uint8), data))[lead:]
    right = torch.cat((torch.zeros(other_lead, dtype=torch.uint8), data))[other_lead:]
    assert same_bytes([(left, right)])
    if length:
        right[at % length] ^= 128
        assert not same_bytes([(left, right)])
