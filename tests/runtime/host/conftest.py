"""One driver for all: it has no state of its own besides the loaded native module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pygraph.runtime.host import HostDriver


@pytest.fixture(scope="session")
def driver() -> HostDriver:
    """The host driver."""
    return HostDriver()


@pytest.fixture(autouse=True)
def _reproducible() -> Iterator[None]:
    """Each test starts from the same generator state, and runs as compiled programs do: without gradients."""
    torch.manual_seed(0)
    with torch.no_grad():
        yield
