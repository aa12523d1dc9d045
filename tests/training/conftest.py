"""Fixtures for training steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.training.steps import foreach_in_place


@pytest.fixture(autouse=True)
def _as_on_a_gpu() -> Iterator[None]:
    """Optimizers write weights in place."""
    with foreach_in_place():
        yield


@pytest.fixture
def one_thread(fresh: None) -> Iterator[None]:
    """Counters are empty, torch draws the same numbers, and no thread waits for a core of another program."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
