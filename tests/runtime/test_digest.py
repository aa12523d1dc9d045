"""Fingerprints by bits, and extents."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.runtime.tensors import bits, digest, extent, same_bytes, span, words_digest

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_counts(dtype: torch.dtype) -> None:
    tensor = torch.zeros(5, dtype=torch.float32).to(dtype)
    before = digest(tensor)
    raw = span(tensor)
    for byte in range(raw.numel()):
        raw[byte] ^= 1
        assert digest(tensor) != before
        raw[byte] ^= 1
    assert digest(tensor) == before


def test_strides_do_not_count_but_order_does() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    assert digest(tensor) == digest(tensor.t().contiguous().t())
    assert digest(tensor) != digest(tensor.t())
    assert digest(tensor[:, ::2]) == digest(tensor[:, ::2].clone())
    assert digest(torch.zeros(1).expand(7)) == digest(torch.zeros(7))


def test_nan_equals_itself_and_zeros_have_signs() -> None:
    assert digest(torch.tensor([math.nan])) == digest(torch.tensor([math.nan]))
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(torch.empty(0)) == digest(torch.empty(0, 3)) == b""


@settings(deadline=None, max_examples=100)
@given(st.binary(min_size=1, max_size=100), st.integers(0, 99), st.integers(1, 255), st.integers(0, 7))
def test_the_digest_on_the_device_sees_every_byte(data: bytes, at: int, change: int, lead: int) -> None:
    tensor = torch.frombuffer(bytearray(bytes(lead) + data), dtype=torch.uint8)[lead:]
    other = tensor.clone()
    assert words_digest(tensor) == words_digest(other)
    other[at % len(data)] ^= change
    assert words_digest(tensor) != words_digest(other)


def test_the_digest_on_the_device_sees_order_and_goes_past_one_chunk() -> None:
    words = torch.arange((1 << 20) + 5)
    swapped = words.clone()
    swapped[3], swapped[1 << 20] = words[1 << 20].clone(), words[3].clone()
    assert words_digest(span(words)) == words_digest(span(words.clone()))
    assert words_digest(span(words)) != words_digest(span(swapped))


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 40), st.integers(0, 20), st.integers(0, 20), st.integers(0, 39))
def test_same_bytes(length: int, lead: int, other_lead: int, at: int) -> None:
    data = torch.randint(0, 256, (length,), dtype=torch.uint8)
    left = torch.cat((torch.zeros(lead, dtype=torch.uint8), data))[lead:]
    right = torch.cat((torch.zeros(other_lead, dtype=torch.uint8), data))[other_lead:]
    assert same_bytes(left, right)
    if length:
        right[at % length] ^= 128
        assert not same_bytes(left, right)


def test_extent_and_span() -> None:
    data = torch.arange(16, dtype=torch.int16)
    view = data[3:12:4]
    assert extent(view) == 18
    assert span(view).tolist() == span(data).tolist()[6:24]
    assert span(view, whole=True).numel() == 32
    assert extent(data[:0]) == span(data[:0]).numel() == span(data[:0], whole=True).numel() == 0
    assert extent(torch.tensor(1.0)) == 4
    span(view)[0] = 7
    assert view[0] == 7


def test_bits_of_scalars() -> None:
    assert bits(math.nan) == bits(math.nan)
    assert bits(0.0) != bits(-0.0)
    assert bits(1) != bits(True)
    assert bits(1) != bits(1.0)
    assert bits(None) == bits(None)
