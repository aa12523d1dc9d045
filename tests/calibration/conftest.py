"""No test's calibration is left to another one in the process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pygraph.calibration.store import stored_model


@pytest.fixture(scope="module", autouse=True)
def _one_thread_for_all() -> Iterator[None]:
    """Threads that wait for each other on busy cores would be what is measured."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _no_model_left() -> Iterator[None]:
    stored_model.cache_clear()
    yield
    torch.set_num_threads(1)
    stored_model.cache_clear()
