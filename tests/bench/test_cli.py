"""``pygraph bench SCRIPT``: errors of the command line, and a script from end to end on a CPU, in real processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.commands import run

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ([__file__, "--sides", "pygraf"], "did you mean 'pygraph'"),
        ([__file__, "--device", "cpu", "--sides", "reduce-overhead"], "needs a GPU"),
        ([__file__, "--blocks", "0"], "--blocks"),
        (["no-such-script.py"], "no script no-such-script.py"),
        ([__file__, "--device", "cpu", "--out", f"{__file__}/folder"], "Not a directory"),
    ],
)
def test_what_makes_no_sense_is_refused(args: list[str], why: str) -> None:
    """Before anything runs."""
    result = run("bench", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert why in result.stderr


SCRIPT = """
import sys
import torch
from torch import nn

calls = int(sys.argv[2])
assert sys.argv[1] == "--calls" and __name__ == "__main__"
print("this is no answer")
model = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), mode="max-autotune")


@torch.compile(dynamic=False)
def loss_of(found):
    return found.square().mean()


optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(calls):
    optimizer.zero_grad()
    loss_of(model(torch.ones(4, 8))).backward()
    optimizer.step()
"""


@pytest.mark.sweep
def test_a_script_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles two callables, a module and a function, draws random numbers, and prints."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    common = ("--device", "cpu", "--sides", "pygraph", "--blocks", 7, "--calls", 4, "--out", tmp_path)
    result = run("bench", *common, script, "--", "--calls", "1000000")
    assert result.exit_code == 0, result.stderr
    row = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)["workloads"]["train"]
    assert {side: found["status"] for side, found in row["sides"].items()} == {"eager": "ok", "pygraph": "ok"}, row
    assert row["ratios"]["eager"]["wall_us"]["rounds"] == 7
    assert row["calls"] == 4
    ours = row["sides"]["pygraph"]
    assert 0 < ours["host_us"]["median"] <= ours["wall_us"]["median"]
    assert ours["coverage"]["share"] == 1.0
    assert ours["coverage"]["replays"] > 30
    assert ours["coverage"]["launches"] > 0
    assert "| train (script) | " in result.stdout
