"""Code in processes of their own, forked from one that has imported torch and nothing else: that import takes seconds.

Such a process has no state of PyGraph's, of Dynamo's or of Inductor's. All have the hash seed of the one that they are
forked from, and torch has read the environment already: tests of either start an interpreter instead.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]

_ENVIRON = dict(os.environ)
"""As torch reads it at its import: no test has changed it yet."""

_SERVER = """
import json, os, sys, tempfile
import torch, torch._inductor.compile_fx

torch._inductor.cpu_vec_isa.valid_vec_isa_list()  # starts processes, once

for line in sys.stdin:
    asked = json.loads(line)
    if isinstance(asked, int):
        ended, status = os.waitpid(asked, os.WNOHANG)
        print(os.waitstatus_to_exitcode(status) if ended else "runs", flush=True)
        continue
    child = os.fork()
    if child == 0:
        break
    print(child, flush=True)
else:
    os._exit(0)

code, arguments, environ, out, err = asked
sys.stdin = open(os.devnull)
for number, path in enumerate((os.devnull, out, err)):
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    os.dup2(file, number)
    os.close(file)
os.environ.clear()
os.environ.update(environ)
tempfile.tempdir = None  # is chosen by the environment
sys.argv[1:] = arguments
exec(code)
"""


class Forked:
    """A process, as ``subprocess.Popen`` has them: ``returncode`` is None until it was found to have ended."""

    def __init__(self, code: str, arguments: list[str], env: Mapping[str, str], out: Path, err: Path) -> None:
        self.pid = int(_ask([code, arguments, dict(env), str(out), str(err)]))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            told = _ask(self.pid)
            self.returncode = None if told == "runs" else int(told)
        return self.returncode

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def start(
    code: str, *arguments: object, env: Mapping[str, str] | None = None, out: Path, err: Path
) -> Forked | subprocess.Popen[bytes]:
    """Run ``code`` with ``arguments`` in ``sys.argv``, in the environment ``env`` or this process's. It writes to the
    files ``out`` and ``err``. Beside a CUDA device it has an interpreter of its own: CUDA does not survive a fork."""
    given, env = [*map(str, arguments)], os.environ if env is None else env
    if not torch.cuda.is_available():
        return Forked(code, given, env, out, err)
    with out.open("wb") as stdout, err.open("wb") as stderr:
        return subprocess.Popen([sys.executable, "-c", code, *given], cwd=ROOT, env=env, stdout=stdout, stderr=stderr)


def ended(process: Forked | subprocess.Popen[bytes], seconds: float) -> int:
    """The status of the process, once it has ended; it is killed after ``seconds``."""
    end = time.monotonic() + seconds
    try:
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
    finally:
        process.kill()
        status = process.wait()
    return status


def run(
    code: str, *arguments: object, env: Mapping[str, str] | None = None, seconds: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` to its end, as ``start`` does; it is killed after ``seconds``."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        status = ended(start(code, *arguments, env=env, out=out, err=err), seconds)
        return subprocess.CompletedProcess([code], status, out.read_text(), err.read_text())


def module(name: str) -> str:
    """Code that runs a module, as ``python -m`` does."""
    return f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"


@functools.cache
def _server() -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", _SERVER]
    process = subprocess.Popen(command, cwd=ROOT, env=_ENVIRON, stdin=pipe, stdout=pipe, text=True)
    atexit.register(process.communicate)  # at the end of its input, it ends
    return process


def _ask(request: Any) -> str:
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    print(json.dumps(request), file=server.stdin, flush=True)
    answer = server.stdout.readline()
    assert answer, "the process that others are forked from has ended"
    return answer.strip()
