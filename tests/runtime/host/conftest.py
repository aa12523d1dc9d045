"""One driver for all: it has no state of its own besides the loaded native module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pygraph.runtime.host import HostDriver, build


@pytest.fixture(scope="session")
def driver() -> HostDriver:
    """The host driver."""
    return HostDriver()


@pytest.fixture
def native() -> Any:
    """Its native module."""
    return build.load()


@pytest.fixture(autouse=True)
def _reproducible() -> Iterator[None]:
    """Each test starts from the same generator state, and runs as compiled programs do: without gradients."""
    torch.manual_seed(0)
    with torch.no_grad():
        yield
