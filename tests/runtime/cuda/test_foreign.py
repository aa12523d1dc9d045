"""Addresses of memory that belongs to nobody are told with where they lie; numbers, constants and leftovers are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pygraph.runtime.cuda.addresses import with_unowned
from pygraph.runtime.recording import UnownedAddress, UnownedMemory
from tests.runtime.captures import Capture
from tests.runtime.cuda.fake import FakeDriver

LIVE = 0x7A00_0000_0000
EARLIER = 0x7100_0000_0000


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Knows memory from LIVE on, of which torch says that the first block is in use and the second free, and the
    stand-ins of an earlier capture."""
    made = FakeDriver()
    made.live |= {range(LIVE, LIVE + 4096), range(EARLIER, EARLIER + 4096)}
    blocks = [{"size": 1024, "state": "active_allocated"}, {"size": 1024, "state": "inactive"}]
    later = {"address": LIVE + (1 << 30), "total_size": 512, "blocks": [{"size": 512, "state": "inactive"}]}
    segment = {"address": LIVE, "total_size": 2048, "blocks": blocks}
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [later, segment])
    return made


def found(driver: Any, capture: Capture) -> tuple[UnownedAddress, ...]:
    """What is told of the only launch."""
    (launch,) = with_unowned(
        driver,
        capture.launches,
        capture.allocations,
        lambda word: word == 0x7000_0000_0000,
        lambda word: EARLIER <= word < EARLIER + 4096,
    )
    return launch.unowned


def test_what_has_an_owner_or_is_a_number_is_not_told(driver: FakeDriver) -> None:
    capture = Capture()
    x = capture.input(64)
    capture.constant(LIVE, 512)
    capture.launch(x, x + 64, LIVE + 8, 7, 1 << 60, 0x7000_0000_0000, 0x7B00_0000_0000)
    assert found(driver, capture) == ()


def test_memory_that_torch_holds_but_nobody_uses_is_a_leftover(driver: FakeDriver) -> None:
    capture = Capture()
    capture.launch(LIVE + 1500)
    assert found(driver, capture) == ()


@pytest.mark.parametrize(
    ("address", "memory"),
    [
        (LIVE, UnownedMemory.BLOCK),
        (LIVE + 600, UnownedMemory.WITHIN),
        (LIVE + 3000, UnownedMemory.OTHER),
        (EARLIER + 8, UnownedMemory.STAND_IN),
    ],
)
def test_memory_of_nobodys_is_told_with_where_it_lies(driver: FakeDriver, address: int, memory: UnownedMemory) -> None:
    capture = Capture()
    capture.launch(1, address, address, name="gemm")
    first, second = found(driver, capture)
    assert (first.word, second.word) == (1, 2)
    assert first.memory is second.memory is memory
    assert f"{address:#x}, in " in first.detail
