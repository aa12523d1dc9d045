"""Collectives by NCCL, functional and inside of custom operators: called by each replay, on a stream of their own."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.distributed import votes
from tests.distributed.checks import CHECKS
from tests.distributed.processes import launch
from tests.test_ranks import check

VOTES = tuple(name for name, run in CHECKS.items() if run.__module__ == votes.__name__)


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_that_capture_at_different_calls_agree(size: int) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} devices")
    check(size, "cuda", "nccl", [[], ["collective"] * 2, ["collective"] * 4], [1, 2, 4])


@functools.cache
def voted() -> list[dict[str, str | None]]:
    """The error of each check, by rank."""
    said = launch("tests.distributed", 2, [",".join(VOTES), "cuda"], seconds=400)
    return [{line["name"]: line["error"] for line in rank} for rank in said]


@pytest.mark.parametrize("name", VOTES)
def test_ranks_that_vote_on_capturing_collectives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 devices")
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    assert [rank[name] for rank in voted()] == [None, None]
