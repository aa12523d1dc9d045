"""Several processes that capture at different calls: collectives run once a call on each, between two segments."""

from __future__ import annotations

import pytest

from tests.distributed.processes import launch
from tests.ranks import CALLS

SECONDS = 300
"""Until ranks that wait for one another are given up."""


def check(size: int, device: str, backend: str, reasons: list[list[str]], calls: list[int]) -> None:
    """Every call of every rank has the sum over all ranks, and all else is replayed: by program, the ``reasons`` that
    operators are not captured for, and the ``calls`` of a replay."""
    ranks = launch("tests.ranks", size, (device, backend), seconds=SECONDS)
    for number, rank in enumerate(ranks):
        for program, why, count in zip(rank, reasons, calls, strict=True):
            sums = [2.0 * sum(call + other + 1 for other in range(size)) for call in range(CALLS)]
            assert program["found"] == sums
            assert program["states"] == ["replay"], program
            assert program["replays"] == CALLS - 2 - number
            assert [reason for _, reason in program["left"]] == why, program
            assert program["calls"] == count


@pytest.mark.sweep
def test_ranks_that_capture_at_different_calls_agree() -> None:
    opaque, collective = "opaque-operator", "collective"
    check(2, "cpu", "gloo", [[opaque], [opaque], [collective] * 2, [collective] * 4], [1, 1, 2, 4])
