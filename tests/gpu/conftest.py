"""Tests that need a CUDA device. Without one, each is skipped and says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything here, and skip it where torch sees no CUDA device."""
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def _built(_caches: Path) -> None:
    """Until the native half is there, nothing is captured, and no test is to wait for that."""
    if torch.cuda.is_available():
        from pygraph.runtime.cuda import build

        build.load()


@pytest.fixture(scope="session")
def driver() -> object:
    """The CUDA driver."""
    from pygraph.runtime.cuda import CudaDriver

    return CudaDriver()


@pytest.fixture(autouse=True)
def _reproducible() -> Iterator[None]:
    """Each test starts from the same generator state, and runs as compiled programs do: without gradients. It leaves
    a generator that goes on, and torch as it was: a capture that fails may break either."""
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    drawn = [torch.rand(8, device="cuda").tolist() for _ in range(3)]
    assert len({tuple(each) for each in drawn}) == 3, f"the generator repeats itself: {drawn}"
    assert not torch.cuda.is_current_stream_capturing()
