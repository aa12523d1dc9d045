"""Addresses of memory that belongs to nobody are refused; numbers, constants and leftovers are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pygraph.errors import CaptureError
from pygraph.runtime.cuda.foreign import refuse_foreign
from tests.runtime.captures import Capture
from tests.runtime.cuda.fake import FakeDriver

LIVE = 0x7A00_0000_0000


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Knows memory from LIVE on, of which torch says that the first block is in use and the second free."""
    made = FakeDriver()
    made.live.add(range(LIVE, LIVE + 4096))
    blocks = [{"size": 1024, "state": "active_allocated"}, {"size": 1024, "state": "inactive"}]
    segment = {"address": LIVE, "total_size": 2048, "blocks": blocks}
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [segment])
    return made


def check(driver: Any, capture: Capture) -> None:
    refuse_foreign(driver, capture.launches, capture.allocations, lambda word: word == 0x7000_0000_0000)


def test_what_has_an_owner_or_is_a_number_passes(driver: FakeDriver) -> None:
    capture = Capture()
    x = capture.input(64)
    capture.constant(LIVE, 512)
    capture.launch(x, x + 64, LIVE + 8, 7, 1 << 60, 0x7000_0000_0000, 0x7B00_0000_0000)
    check(driver, capture)


def test_memory_that_torch_holds_but_nobody_uses_is_a_leftover(driver: FakeDriver) -> None:
    capture = Capture()
    capture.launch(LIVE + 1500)
    check(driver, capture)


@pytest.mark.parametrize("address", [LIVE + 600, LIVE + 3000])
def test_memory_of_nobodys_is_refused(driver: FakeDriver, address: int) -> None:
    capture = Capture()
    capture.launch(1, address, name="gemm")
    with pytest.raises(CaptureError, match="gemm: word 1 points into device memory of nobody's") as caught:
        check(driver, capture)
    assert caught.value.reason == "foreign-address"
