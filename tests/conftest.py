"""Fixtures shared by all tests: nothing compiled, counted or reported leaks from one test into the next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def fresh() -> Iterator[None]:
    """Compile from scratch: Dynamo, reports and counters are empty before and after."""
    import torch

    import pygraph

    torch._dynamo.reset()
    pygraph.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    pygraph.reset()
