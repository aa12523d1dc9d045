"""Addresses of memory that belongs to nobody are told with where they lie; numbers, constants and leftovers are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda.bindings.driver import CUmemorytype, CUpointer_attribute

from pygraph.program.recording import UnownedAddress, UnownedMemory
from pygraph.runtime.cuda.addresses import with_unowned
from tests.runtime.captures import Capture

LIVE = 0x7A00_0000_0000
EARLIER = 0x7100_0000_0000


class Driver:
    """Knows 4096 bytes of device memory at LIVE, and as many at EARLIER."""

    CUpointer_attribute = CUpointer_attribute
    CUmemorytype = CUmemorytype

    def cuPointerGetAttribute(self, attribute: CUpointer_attribute, address: int) -> tuple[int, ...]:
        start = next((start for start in (LIVE, EARLIER) if start <= address < start + 4096), None)
        if start is None:
            return (1,)
        answers = {"MEMORY_TYPE": CUmemorytype.CU_MEMORYTYPE_DEVICE, "RANGE_START_ADDR": start, "RANGE_SIZE": 4096}
        return (0, answers[attribute.name.removeprefix("CU_POINTER_ATTRIBUTE_")])


@pytest.fixture(autouse=True)
def _torch_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the memory from LIVE on, torch says that the first block is in use and the second free; EARLIER is a stand-in
    of another capture."""
    blocks = [{"size": 1024, "state": "active_allocated"}, {"size": 1024, "state": "inactive"}]
    later = {"address": LIVE + (1 << 30), "total_size": 512, "blocks": [{"size": 512, "state": "inactive"}]}
    segment = {"address": LIVE, "total_size": 2048, "blocks": blocks}
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [later, segment])


def found(capture: Capture) -> tuple[UnownedAddress, ...]:
    """The unowned addresses of the only launch."""
    driver: Any = Driver()
    (launch,) = with_unowned(
        driver,
        capture.launches,
        capture.allocations,
        lambda word: word == 0x7000_0000_0000,
        lambda word: EARLIER <= word < EARLIER + 4096,
    )
    return launch.unowned


def test_what_has_an_owner_or_is_a_number_is_not_told() -> None:
    capture = Capture()
    x = capture.input(64)
    capture.constant(LIVE, 512)
    capture.launch(x, x + 64, LIVE + 8, 7, 1 << 60, 0x7000_0000_0000, 0x7B00_0000_0000)
    assert found(capture) == ()


def test_memory_that_torch_holds_but_nobody_uses_is_a_leftover() -> None:
    capture = Capture()
    capture.launch(LIVE + 1500)
    assert found(capture) == ()


@pytest.mark.parametrize(
    ("address", "memory"),
    [
        (LIVE, UnownedMemory.BLOCK),
        (LIVE + 600, UnownedMemory.WITHIN),
        (LIVE + 3000, UnownedMemory.OTHER),
        (EARLIER + 8, UnownedMemory.STAND_IN),
    ],
)
def test_memory_of_nobodys_is_told_with_where_it_lies(address: int, memory: UnownedMemory) -> None:
    capture = Capture()
    capture.launch(1, address, address, name="gemm")
    first, second = found(capture)
    assert (first.word, second.word) == (1, 2)
    assert first.memory is second.memory is memory
    assert f"{address:#x}, in " in first.detail
