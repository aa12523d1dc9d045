"""Several processes that capture at different calls: collectives run once a call on each, between two segments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import CALLS

TIMEOUT = 300
"""Seconds until ranks that wait for one another are given up."""


def run_ranks(size: int, tmp_path: Path, device: str, backend: str) -> list[list[dict[str, Any]]]:
    """What each rank printed, by rank."""
    arguments = [str(size), str(tmp_path / "store"), device, backend]
    environment = {**os.environ, "PYGRAPH_MEASURE": "0", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ranks", str(rank), *arguments],
            cwd=Path(__file__).parents[1],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [rank.communicate(timeout=TIMEOUT) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, said, strict=True):
        assert rank.returncode == 0, errors
    return [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in said]


def check(ranks: list[list[dict[str, Any]]], reasons: list[list[str]], calls: list[int]) -> None:
    """Every call of every rank has the sum over all ranks, and all else is replayed: by program, the ``reasons`` that
    operators are not captured for, and the ``calls`` of a replay."""
    for number, rank in enumerate(ranks):
        for program, why, count in zip(rank, reasons, calls, strict=True):
            sums = [2.0 * sum(call + other + 1 for other in range(len(ranks))) for call in range(CALLS)]
            assert program["found"] == sums
            assert program["states"] == ["replay"], program
            assert program["replays"] == CALLS - 2 - number
            assert [reason for _, reason in program["left"]] == why, program
            assert program["calls"] == count


@pytest.mark.sweep
def test_ranks_that_capture_at_different_calls_agree(tmp_path: Path) -> None:
    ranks = run_ranks(2, tmp_path, "cpu", "gloo")
    opaque, collective = "opaque-operator", "collective"
    check(ranks, [[opaque], [opaque], [collective] * 2, [collective] * 4], [1, 1, 2, 4])
