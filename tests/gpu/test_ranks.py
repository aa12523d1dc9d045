"""Collectives by NCCL, functional and inside of custom operators: called by each replay, on a stream of their own."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import steps, votes
from tests.distributed.checks import CHECKS, HOST_ONLY, passes
from tests.distributed.test_distributed import episodes
from tests.test_ranks import check

VOTES = tuple(name for name, run in CHECKS.items() if run.__module__ == votes.__name__ and name not in HOST_ONLY)
ORDER = ("each_rank_has_an_order_of_its_own", "calls_in_a_row_keep_their_bits")
STEPS = tuple(name for name, run in CHECKS.items() if run.__module__ == steps.__name__)


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_that_capture_at_different_calls_agree(size: int) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} devices")
    check(size, "cuda", "nccl", [[], ["collective"] * 2, ["collective"] * 4], [1, 2, 4])


@pytest.mark.parametrize("name", [*VOTES, *ORDER])
def test_ranks_that_decide_otherwise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 devices")
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    passes(2, (*VOTES, *ORDER), name, "cuda", 400)


def test_random_programs_in_random_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 devices")
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    episodes(2, 100, 400, "cuda")


@pytest.mark.parametrize("name", STEPS)
def test_ranks_that_train(name: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 devices")
    passes(2, STEPS, name, "cuda", 400)
