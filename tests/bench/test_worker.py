"""A worker whose coordinator is gone ends, whatever it is doing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from pygraph.bench.process import Spec

COORDINATOR = """
import os, pathlib, sys, time
from pygraph.bench.process import Process
worker = Process([sys.executable, "-m", "pygraph.bench.worker", sys.argv[1]], os.environ, pathlib.Path("log"))
worker.answer(time.monotonic() + 600)
worker.tell("compile")
time.sleep(600)
"""

SCRIPT = """
import os, subprocess, sys, time
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open("pids.part", "w") as file:
    file.write(f"{os.getpid()} {helper.pid}")
os.rename("pids.part", "pids")
time.sleep(600)
"""


@pytest.mark.sweep
def test_it_ends_with_its_coordinator_and_takes_its_helpers_along(tmp_path: Path) -> None:
    script = tmp_path / "busy.py"
    script.write_text(SCRIPT)
    spec = Spec("pygraph.bench.script:run_script", str(script), (), "eager", "cpu", result="")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", COORDINATOR, json.dumps(asdict(spec))]
    coordinator = subprocess.Popen(command, cwd=tmp_path, env=environ)
    try:
        pids = [int(pid) for pid in _text(tmp_path / "pids", 120.0).split()]
        assert len(pids) == 2
        assert all(_runs(pid) for pid in pids)
    finally:
        coordinator.send_signal(signal.SIGKILL)
        coordinator.wait()
    end = time.monotonic() + 20.0
    while any(_runs(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(_runs(pid) for pid in pids), "the worker or its helper goes on without a coordinator"


def _text(path: Path, seconds: float) -> str:
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.1)
    return path.read_text()


def _runs(pid: int) -> bool:
    """True if the process exists and is no zombie, which nobody but its new parent can clear away."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
