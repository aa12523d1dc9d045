"""Several processes that capture at different calls: collectives inside of custom operators run once a call on each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def check(ranks: list[list[dict[str, Any]]], reason: str) -> None:
    """Every call of every rank has the sum over all ranks, and what is around the operator is replayed, at the latest
    when a program is compiled for the second time."""
    for rank in ranks:
        for number, program in enumerate(rank):
            sums = [2.0 * sum(call + other + 1 for other in range(len(ranks))) for call in range(CALLS)]
            assert program["found"] == sums
            if number % 2 == 0:
                continue
            assert set(program["states"]) == {"replay"}, program
            assert program["replays"] > 0
            assert [why for _, why in program["left"]] == [reason], program


def test_ranks_that_capture_at_different_calls_agree(tmp_path: Path) -> None:
    ranks = run_ranks(2, tmp_path, "cpu", "gloo")
    assert [len(rank) for rank in ranks] == [4, 4]
    check(ranks, "opaque-operator")
