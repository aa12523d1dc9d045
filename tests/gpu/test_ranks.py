"""Collectives by NCCL, functional and inside of custom operators: called by each replay, on a stream of their own."""

from __future__ import annotations

import pytest
import torch

from tests.test_ranks import check


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_that_capture_at_different_calls_agree(size: int) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} devices")
    check(size, "cuda", "nccl", [[], ["collective"] * 2, ["collective"] * 4], [1, 2, 4])
