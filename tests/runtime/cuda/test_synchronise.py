"""How the CUDA driver waits for what was submitted, on a torch without a device."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pygraph.runtime.cuda import CudaDriver


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("device", [None, torch.device("cuda", 1)])
def test_it_waits_for_the_callers_stream_unless_that_is_being_captured(
    monkeypatch: pytest.MonkeyPatch, device: torch.device | None, capturing: bool
) -> None:
    done: list[Any] = []

    def current_stream(asked: torch.device | None) -> Any:
        assert asked == device
        return SimpleNamespace(device="the stream's", synchronize=lambda: done.append("waited"))

    @contextlib.contextmanager
    def within(entered: Any) -> Any:
        done.append(entered)
        yield
        done.append("left")

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "device", within)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    driver = object.__new__(CudaDriver)
    assert driver.synchronise(device) is not capturing
    assert done == ["the stream's", "left"] + ["waited"] * (not capturing)
