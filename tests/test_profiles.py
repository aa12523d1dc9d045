"""Ranges and artifacts of PyGraph in torch's profiles and traces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.small import CALLS, compiled, replays

SCRIPT = """
import torch
layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
model = torch.compile(layers, backend="pygraph", options={"inductor": {"fallback_by_default": True}})
with torch.no_grad():
    model(torch.ones(2, 4))
"""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class Net(nn.Module):
    """Two blocks, with a number that the host reads in between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        return self.layers[1](x) if x.sum().item() < 1e9 else x


@pytest.mark.usefixtures("fresh")
def test_each_replay_is_a_range_named_after_graph_region_and_module() -> None:
    ours, x = compiled(Net()), torch.randn(2, 8)
    with torch.no_grad():
        for _ in range(CALLS):
            ours(x)
        before = replays()
        with torch.profiler.profile() as profile:
            for _ in range(3):
                ours(x)
    ranges = [event for event in profile.events() if ".region0" in event.name]
    names = sorted({event.name.partition(".")[2] for event in ranges})
    assert names == ["region0 layers.0", "region0 layers.1"]
    assert len(ranges) == replays() - before == 6
    assert all(event.is_user_annotation for event in ranges)


def test_torch_trace_has_the_report_and_the_ir(tmp_path: Path) -> None:
    environ = {**os.environ, "TORCH_TRACE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", SCRIPT], env=environ, check=True, capture_output=True)
    (trace,) = tmp_path.glob("*.log")
    lines = trace.read_text(encoding="utf-8").splitlines()
    found: dict[str, str] = {}
    for number, line in enumerate(lines):
        head = line.partition("] ")[2]
        record = json.loads(head) if head.startswith("{") else {}
        name = record.get("artifact", {}).get("name", "")
        if name.startswith("pygraph_"):
            assert record["frame_id"] == 0, "tlparse sorts artifacts by the compilation"
            rest = (text for text in lines[number + 1 :])
            found[name] = "\n".join(text[1:] for text in _payload(rest))
    assert found["pygraph_report"].startswith("graph0_inference  Sequential, inference, cpu")
    assert found["pygraph_ir"].startswith("graph @main")
    assert "aten.relu.default" in found["pygraph_ir"]


def _payload(lines: object) -> list[str]:
    taken = []
    for text in lines:  # type: ignore[attr-defined]
        if not text.startswith("\t"):
            break
        taken.append(text)
    return taken
