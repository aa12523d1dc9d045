"""Decisions of measured selection across real processes, through ``torch.compile``, on the host driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, sys
import torch
import pygraph
from pygraph.runtime import measuring

fast, calls = sys.argv[1], int(sys.argv[2])
ms = {"replays": 2.0, "uncaptured": 2.0, "replays" if fast == "patched" else "uncaptured": 1.0}


def clock():
    found = pygraph.counters()
    return sum(found.get(name, 0) * each * 1e-3 for name, each in ms.items())


def model(x, total):
    total.add_(1)
    return torch.tanh(x @ x).softmax(-1) + total


measuring.perf_counter = clock
step = torch.compile(model, backend="pygraph")
total, right = torch.zeros(4, 4), True
with torch.no_grad():
    for call in range(calls):
        x = torch.full((4, 4), call * 0.01)
        got = step(x, total)
        right = right and torch.allclose(got, torch.tanh(x @ x).softmax(-1) + total)
right = right and bool((total == calls).all())
(report,) = pygraph.reports()
(region,) = report.regions
from pygraph.report.as_json import to_json
from pygraph.report.text import render_text
print(json.dumps({
    "right": right,
    "state": region.state,
    "counters": pygraph.counters(),
    "captures": region.record.captures,
    "trials": to_json([report])["graphs"][0]["regions"][0]["record"]["trials"],
    "text": render_text([report], width=2000),
}))
"""


def run(cache: Path, fast: str, calls: int) -> dict[str, Any]:
    """One process, in virtual time: a call of the candidate that is not ``fast`` takes twice as long."""
    environ = {**os.environ, "PYGRAPH_CACHE_DIR": str(cache)}
    environ.pop("PYGRAPH_MEASURE", None)  # trials are what the backend does unasked
    command = [sys.executable, "-c", SCRIPT, fast, str(calls)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["right"]
    return {**result, "stderr": done.stderr}


@pytest.mark.parametrize(("fast", "state"), [("patched", "replay"), ("uncaptured", "uncaptured")])
def test_a_second_process_begins_where_the_first_ended(tmp_path: Path, fast: str, state: str) -> None:
    first = run(tmp_path, fast, 600)
    (trial,) = first["trials"]
    assert (trial["decision"], trial["reason"], trial["stored"]) == (fast, "faster", None)
    (file,) = (tmp_path / "decisions").iterdir()
    again = run(tmp_path, fast, 20)
    (found,) = again["trials"]
    assert (found["decision"], found["calls"], found["lost_us"]) == (fast, 0, 0.0)
    assert found["stored"]["path"] == str(file)
    assert 0 <= found["stored"]["age_s"] < 3600
    assert found["samples"] == trial["samples"]
    assert again["state"] == state
    assert again["counters"]["recalled"] == 1
    assert "as an earlier trial decided " in again["text"]
    replays = 18 if fast == "patched" else 0
    assert (again["captures"], again["counters"].get("replays", 0)) == (int(replays > 0), replays)
    if fast == "uncaptured":
        file.write_bytes(file.read_bytes()[:100])
        damaged = run(tmp_path, fast, 20)
        assert damaged["stderr"].count(str(file)) == 1
        assert (damaged["captures"], damaged["trials"]) == (1, [])
