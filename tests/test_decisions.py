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
from pygraph.runtime.region import Region

fast, calls = sys.argv[1], int(sys.argv[2])
ms = {"replays": 2.0, "uncaptured": 2.0, "replays" if fast == "replay" else "uncaptured": 1.0}


def clock():
    found = pygraph.counters()
    return sum(found.get(name, 0) * each * 1e-3 for name, each in ms.items())


def model(x, total):
    total.add_(1)
    return torch.tanh(x @ x).softmax(-1) + total


Region.__init__.__kwdefaults__["clock"] = clock
step = torch.compile(model, backend="pygraph", options={"strict": True})
total, right = torch.zeros(4, 4), True
with torch.no_grad():
    for call in range(calls):
        x = torch.full((4, 4), call * 0.01)
        got = step(x, total)
        right = right and torch.allclose(got, torch.tanh(x @ x).softmax(-1) + total)
right = right and bool((total == calls).all())
(report,) = pygraph.reports()
(region,) = report.regions
from pygraph.report.facts import to_json
from pygraph.report.text import render_text
print(json.dumps({
    "right": right,
    "state": region.state,
    "counters": pygraph.counters(),
    "captures": region.record.captures,
    "decisions": to_json([report])["graphs"][0]["regions"][0]["record"]["decisions"],
    "text": render_text([report], width=2000),
}))
"""


def run(cache: Path, fast: str, calls: int) -> dict[str, Any]:
    """One process, in virtual time: a call of the candidate that is not ``fast`` takes twice as long."""
    environ = {**os.environ, "PYGRAPH_CACHE_DIR": str(cache)}
    environ.pop("PYGRAPH_MEASURE", None)  # the backend measures unasked
    command = [sys.executable, "-c", SCRIPT, fast, str(calls)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["right"]
    return result


@pytest.mark.sweep
@pytest.mark.parametrize("fast", ["uncaptured", "replay"])
def test_a_second_process_begins_where_the_first_ended(tmp_path: Path, fast: str) -> None:
    """Also under the option ``strict``, which does not mind what is faster uncaptured."""
    first = run(tmp_path, fast, 120)
    (decision,) = first["decisions"]
    assert (decision["choice"], decision["path"], first["state"]) == (fast, None, fast)
    (file,) = (tmp_path / "decisions").iterdir()
    again = run(tmp_path, fast, 20)
    assert again["decisions"] == [{**decision, "path": str(file)}]
    assert again["state"] == fast
    assert again["counters"]["recalled"] == 1
    assert f"measured: {fast}; " in again["text"]
    assert f"(read from {file})" in again["text"]
    replays = 18 if fast == "replay" else 0
    assert (again["captures"], again["counters"].get("replays", 0)) == (int(replays > 0), replays)
