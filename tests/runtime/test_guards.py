"""Replays stay inside their memory: run where every allocation stands between pages that fault when touched."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests import forked

HERE = Path(__file__).resolve().parent
COMPILER = os.environ.get("CXX", "c++")

needs_compiler = pytest.mark.skipif(shutil.which(COMPILER.split()[0]) is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guarding allocator, compiled."""
    path = tmp_path_factory.mktemp("guard") / "guard.so"
    root = Path(torch.__file__).resolve().parent
    abi = int(torch.compiled_with_cxx11_abi())
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-isystem{root / 'include'}"]
    files = [str(HERE / "guard_allocator.cpp"), "-o", str(path)]
    subprocess.run([*COMPILER.split(), *flags, *files, f"-L{root / 'lib'}", "-lc10"], check=True)
    return path


def guarded(library: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process of its own; ``guard`` is the allocator, to be installed when wanted."""
    return forked.run(f"import ctypes, torch\nguard = ctypes.CDLL({str(library)!r})\n{code}")


PROGRAM_RUNS = """
from pygraph.runtime.host import HostDriver
from pygraph.runtime.region import Region
from tests.runtime.programs import PROGRAMS, region_calls
compiled = [calls for name in PROGRAMS for calls in region_calls(name)]
guard.guard_install()
before = guard.guard_allocated()
replays = 0
for calls in compiled:
    region = Region(calls[0].fn, HostDriver(), name="guarded")
    kept = []
    for round in range(5):
        for call in calls:
            kept.append(list(region(call.fresh(round))))
    record = region.record
    assert record.state == "replay" and not record.refusals, record
    replays += record.replays
    del kept, region
print(replays, guard.guard_allocated() - before, guard.guard_damaged())
"""


@pytest.mark.sweep
@needs_compiler
def test_no_replay_writes_beside_its_arguments_outputs_or_workspace(library: Path) -> None:
    done = guarded(library, PROGRAM_RUNS)
    assert done.returncode == 0, done.stderr[-3000:]
    replays, allocated, damaged = map(int, done.stdout.split()[-3:])
    assert replays > 50
    assert allocated > 5 * replays
    assert damaged == 0


@needs_compiler
def test_the_guards_notice(library: Path) -> None:
    """A write beside an allocation, and one behind the page's end, which faults."""
    code = """
guard.guard_install()
for at in (-1, 10, 16):
    x = torch.zeros(10)
    ctypes.c_float.from_address(x.data_ptr() + 4 * at).value = 1.0
    del x
    print(guard.guard_damaged(), flush=True)
"""
    done = guarded(library, code)
    assert done.stdout.split() == ["1", "2"]
    assert done.returncode < 0
