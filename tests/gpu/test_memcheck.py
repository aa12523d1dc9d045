"""The CUDA memory checker over replays: it finds nothing in right ones, and finds a write that leaves its memory.

The second shows that the first means something: that the checker looks at kernels which a graph launches.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKER = shutil.which("compute-sanitizer")
COMMAND = ["--tool", "memcheck", "--report-api-errors", "no", "--show-backtrace", "no", "--error-exitcode", "9"]
ROOT = Path(__file__).parents[2]

OVERRUN = """
import torch
from dataclasses import replace
from pygraph.runtime.cuda import CudaDriver

right = CudaDriver.instantiate

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


def checked(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python process under the checker."""
    if CHECKER is None:
        pytest.skip("compute-sanitizer is not installed")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [CHECKER, *COMMAND, sys.executable, *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_nothing_is_found_in_right_replays() -> None:
    done = checked("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/test_replay.py")
    assert "ERROR SUMMARY: 0 errors" in done.stdout, done.stdout[-3000:]
    assert " passed" in done.stdout
    assert done.returncode == 0


def test_a_replay_that_writes_beside_its_memory_is_found() -> None:
    done = checked("-c", OVERRUN)
    assert "replaying" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Invalid __global__ write" in done.stdout, done.stdout[-3000:]
    assert done.returncode == 9
