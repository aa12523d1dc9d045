"""When the CUDA driver uses a pool for transient memory, and in which order it is given back."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from pygraph.runtime.cuda import driver as module
from pygraph.runtime.cuda.driver import CudaDriver


class Native:
    """A native half that notes what is asked of its pools; without pools where ``device`` is None."""

    def __init__(self, device: int | None = 0) -> None:
        self.device = device
        self.events: list[str] = []

    def TransientPool(self, device: int) -> Any:
        if self.device is None:
            raise RuntimeError("no such pools")
        assert device == self.device
        outer = self

        class Pool:
            def __getattr__(self, name: str) -> Any:
                return lambda: outer.events.append(name)

        return Pool()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A torch with one CUDA device, on which nothing captures; returns where workspaces are noted to be cleared."""
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(module, "clear_cublas_workspaces", lambda: found.append("cleared"))
    return found


def driver_with(native: Native) -> CudaDriver:
    made = CudaDriver.__new__(CudaDriver)
    made._native = native  # type: ignore[assignment]
    return made


def test_a_pool_is_entered_as_often_as_one_likes_and_closed_last(events: list[str]) -> None:
    native = Native()
    native.events = events
    with driver_with(native).scratch_pool([torch.ones(1), 3]) as transient:
        assert events == []
        for _ in range(2):
            with transient():
                events.append("used")
    assert events == ["enter", "used", "leave"] * 2 + ["cleared", "close"]


def test_an_error_leaves_and_closes_it_too(events: list[str]) -> None:
    native = Native()
    native.events = events
    with (
        pytest.raises(ZeroDivisionError),
        driver_with(native).scratch_pool([]) as transient,
        transient(),
    ):
        raise ZeroDivisionError
    assert events == ["enter", "leave", "cleared", "close"]


def test_trimming_clears_workspaces_and_empties_the_ordinary_pool(events: list[str]) -> None:
    native = Native()
    native.events = events
    driver_with(native).release_cached(None)
    driver_with(native).release_cached(torch.device("cuda"))
    driver_with(native).release_cached(torch.device("cuda:0"))
    assert events == ["cleared", "close"] * 3


def test_nothing_is_trimmed_while_the_caller_captures(events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    native = Native()
    native.events = events
    driver_with(native).release_cached(None)
    assert events == []


def test_without_pools_memory_is_ordinary_and_workspaces_are_cleared(events: list[str]) -> None:
    with driver_with(Native(None)).scratch_pool([]) as transient, transient():
        pass
    assert events == ["cleared"]


def test_while_the_callers_stream_is_captured_nothing_is_touched(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    native = Native()
    native.events = events
    with driver_with(native).scratch_pool([]) as transient, transient():
        pass
    assert events == []
