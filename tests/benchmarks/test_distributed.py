"""Programs of several processes, side by side, in small: rows are right, and shown as soon as they are there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.processes import ENVIRONMENT

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "distributed.py"


@pytest.mark.sweep
@pytest.mark.timeout(240)
def test_a_workload_of_two_processes() -> None:
    command = [
        sys.executable,
        str(SCRIPT),
        "--processes",
        "2",
        "--tiny",
        "--workloads",
        "experts",
        "--sides",
        "pygraph",
    ]
    environment = {**os.environ, **ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        shown = os.read(process.stdout.fileno(), 1 << 16)
        rows = [json.loads(line) for line in (shown + process.stdout.read()).splitlines()]
    assert process.returncode == 0
    assert len(shown.splitlines()) == 1, "the first row was not shown before the second one was there"
    assert [(row["side"], row["right"]) for row in rows] == [("eager", True), ("pygraph", True)]
    second = rows[1]
    assert second["replays"] > 0
    assert len(second["captured"]) == 2, "of each rank"
    for captured in second["captured"]:
        assert captured["given_up"] == []
        assert [region["state"] for region in captured["regions"]] == ["replay"]
