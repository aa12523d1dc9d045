"""The tools of compute-sanitizer over replays: they find nothing in right ones, and memcheck finds a write that leaves
its memory.

The last shows that the others mean something: that the checker looks at kernels which a graph launches.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKER = shutil.which("compute-sanitizer")
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
COMMAND = ["--show-backtrace", "no", "--error-exitcode", "9"]
ROOT = Path(__file__).parents[2]

OVERRUN = """
import torch
from dataclasses import replace
from pygraph.runtime.cuda import CudaDriver, executable

right, executable.verify = CudaDriver.instantiate, id  # which refuses it

def instantiate(driver, program):
    slots = (replace(s, offset=s.offset + (1 << 40)) if s.kind.value == "pool" else s for s in program.slots)
    return right(driver, replace(program, slots=tuple(slots)))

CudaDriver.instantiate = instantiate
from tests.gpu.replays import captured
x = torch.ones(1 << 20, device="cuda")
made = captured(CudaDriver(), lambda args: [args[0].sin()], [x])
print("replaying", flush=True)
made.executable.replay([x])
torch.cuda.synchronize()
"""
"""The output's memory lies far behind the end of its allocation."""

MODELS = """
import torch
import pygraph
from torch import nn

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(3, 8, size, padding=size // 2) for size in (1, 3, 5, 7))
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        parts = [torch.relu(branch(x)) for branch in self.branches]
        return self.head(torch.cat(parts, 1).mean((2, 3)))

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        parts = [each(x).view(2, 8, 4, 8).transpose(1, 2) for each in (self.query, self.key, self.value)]
        found = nn.functional.scaled_dot_product_attention(*parts)
        return self.out(found.transpose(1, 2).reshape(x.shape))

torch.manual_seed(0)
torch.backends.cudnn.allow_tf32 = False
options = {"order": "dependences", "ledger": False, "cache_dir": None,
           "passes": "legality,placement,partitioning,indirection"}
with torch.device("cuda"):
    models = [Branches(), Attention()]
    inputs = [torch.randn(2, 3, 16, 16), torch.randn(2, 8, 32)]
    trained, x, y = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)), torch.randn(8, 16), torch.randn(8, 4)
optimizer = torch.optim.AdamW(trained.parameters())

def step(x, y):
    loss = nn.functional.mse_loss(trained(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()

with torch.no_grad():
    for module, given in zip(models, inputs):
        compiled = torch.compile(module, backend="pygraph", options=options)
        for call in range(4):
            found = compiled(given + call)
        assert torch.allclose(found, module(given + 3), atol=1e-4)
whole = pygraph.train_step(step, options=options)
losses = [float(whole(x, y)) for call in range(6)]
assert losses[-1] < losses[0]
records = [region.record for report in pygraph.reports() for region in report.regions]
assert all(record.replays >= 2 for record in records), records
assert all(record.timeline for record in records), "no launches run side by side"
print("replayed", len(records), flush=True)
"""
"""Three small models, each replayed with launches side by side."""


def checked(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python process under a tool."""
    if CHECKER is None:
        pytest.skip("compute-sanitizer is not installed")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    more = ["--report-api-errors", "no"] if tool == "memcheck" else []
    command = [CHECKER, "--tool", tool, *more, *COMMAND, sys.executable, *arguments]
    environment = {**os.environ, "PYTHONPATH": path, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_nothing_is_found_in_right_replays() -> None:
    done = checked("memcheck", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/test_replay.py")
    assert "ERROR SUMMARY: 0 errors" in done.stdout, done.stdout[-3000:]
    assert " passed" in done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize("tool", TOOLS)
def test_nothing_is_found_in_models_whose_launches_run_side_by_side(tool: str) -> None:
    done = checked(tool, "-c", MODELS)
    assert "replayed 3" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    clean = "0 hazards" if tool == "racecheck" else "ERROR SUMMARY: 0 errors"
    assert clean in done.stdout, done.stdout[-3000:]
    assert done.returncode == 0


def test_a_replay_that_writes_beside_its_memory_is_found() -> None:
    done = checked("memcheck", "-c", OVERRUN)
    assert "replaying" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Invalid __global__ write" in done.stdout, done.stdout[-3000:]
    assert done.returncode == 9
