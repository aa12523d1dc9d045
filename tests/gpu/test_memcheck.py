"""The CUDA memory checker over replays: it finds nothing in the guard tests, and finds a write that leaves its memory.

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
FOUND = 9
ROOT = Path(__file__).parents[2]

OVERRUN = """
import torch
from cuda.bindings import driver
from pygraph.runtime.cuda import CudaDriver
from tests.gpu.replays import captured

MB = 1 << 20
made = CudaDriver()
x = torch.ones(2 * MB, device="cuda")
region = lambda args: [args[0].sin()]
program = captured(made, region, [x]).program
stepper = made.stepper(program, region, [x])
end = int(driver.cuMemAlloc(512 * MB)[1]) + 512 * MB
places = {"input": x.data_ptr(), "pool": end - x.nbytes // 2}
print("replaying", flush=True)
for launch in program.order:
    words = {s.word: places[s.kind.value] + s.offset for s in program.slots if s.launch == launch}
    stepper.run(launch, words)
torch.cuda.synchronize()
"""
"""Half of the output's memory lies behind the end of an allocation."""


def checked(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python process under the checker."""
    if CHECKER is None:
        pytest.skip("compute-sanitizer is not installed")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [CHECKER, *COMMAND, sys.executable, *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_nothing_is_found_in_the_guard_tests() -> None:
    done = checked("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/test_guards.py")
    assert "ERROR SUMMARY: 0 errors" in done.stdout, done.stdout[-3000:]
    assert " passed" in done.stdout
    assert done.returncode == 0


def test_a_replay_that_writes_beside_its_memory_is_found() -> None:
    done = checked("-c", OVERRUN)
    assert "replaying" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Invalid __global__ write" in done.stdout, done.stdout[-3000:]
    assert done.returncode == FOUND
