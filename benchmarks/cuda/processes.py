"""Runs the processes of a benchmark: many that only compile at once, then those that are timed, one after the other.

While one process is timed, the next has imported what it needs and waits: it has not touched the GPU. What is run is
given by a command, so that nothing here needs a GPU.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Outcome", "Processes", "Side", "command_of"]


class Side(NamedTuple):
    """One way of compiling one workload."""

    workload: str
    mode: str

    def __str__(self) -> str:
        return f"{self.workload} {self.mode}"


@dataclass(frozen=True)
class Outcome:
    """What a process printed, or what went wrong. ``late`` when it did not end, or was not started, in time."""

    row: dict[str, Any] | None
    error: str = ""
    late: bool = False


Command = Callable[[Side, str, Path], Sequence[str]]


def command_of(side: Side, phase: str, result: Path) -> list[str]:
    """The command line of a side's process."""
    return [sys.executable, "-m", "benchmarks.cuda.side", side.workload, side.mode, phase, str(result)]


class Processes:
    """Starts processes with caches under ``folder`` and ends those that outlast ``end`` (of ``time.monotonic``).

    Each side has a cache of its own for what Inductor compiles. Triton's, which goes by content, is shared by the
    sides of a workload, unless they are to compile from nothing (``cold``).
    """

    def __init__(self, folder: Path, end: float, *, cold: bool = False, command: Command = command_of) -> None:
        self.folder, self.end, self.cold = folder, end, cold
        self._command = command

    def result(self, side: Side) -> Path:
        """Where a timed side leaves what it computed."""
        return self._folder(side) / "result.pt"

    def compile_all(self, sides: Sequence[Side], jobs: int, until: float) -> dict[Side, Outcome]:
        """Fill every side's caches, ``jobs`` at once, until the time ``until``: in the order given."""

        def one(side: Side) -> Outcome:
            started = self.start(side, "compile", threads=max((os.cpu_count() or 1) // jobs, 1))
            return started.finish(until)

        with ThreadPoolExecutor(jobs) as pool:
            outcomes = list(pool.map(one, sides))
        for choice in self.folder.rglob("*.best_config"):  # made by timing kernels while others ran: made again
            choice.unlink()
        return dict(zip(sides, outcomes, strict=True))

    def time_each(self, sides: Sequence[Side], done: Callable[[Side, Outcome], None]) -> None:
        """Time the sides one after the other; ``done`` is told of each."""
        waiting: Running | None = None
        try:
            for place, side in enumerate(sides):
                running = waiting or self.start(side, "time")
                waiting = None
                running.go()
                if place + 1 < len(sides) and time.monotonic() < self.end:
                    waiting = self.start(sides[place + 1], "time")
                done(side, running.finish(self.end))
        finally:
            if waiting is not None:
                waiting.kill()

    def start(self, side: Side, phase: str, *, threads: int | None = None) -> Running:
        """A process that has not been told to go. ``threads`` bounds those that it compiles with."""
        if time.monotonic() >= self.end:
            return Running(None, self._folder(side) / phase)
        environ = {**os.environ, **self._caches(side)}
        if threads is not None:
            environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(threads)
        self._folder(side).mkdir(parents=True, exist_ok=True)
        if phase == "time":
            self.result(side).unlink(missing_ok=True)  # of an earlier benchmark with the same caches
        log = self._folder(side) / phase
        with open(f"{log}.out", "wb") as out, open(f"{log}.err", "wb") as err:
            process = subprocess.Popen(
                list(self._command(side, phase, self.result(side))),
                env=environ,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        return Running(process, log)

    def _folder(self, side: Side) -> Path:
        return self.folder / side.workload / side.mode

    def _caches(self, side: Side) -> Mapping[str, str]:
        own = self._folder(side)
        triton = own / "triton" if self.cold else own.parent / "triton"
        return {"TORCHINDUCTOR_CACHE_DIR": str(own / "inductor"), "TRITON_CACHE_DIR": str(triton)}


class Running:
    """A process, in a session of its own so that its helpers end with it; None where there was no time to start it."""

    def __init__(self, process: subprocess.Popen[bytes] | None, log: Path) -> None:
        self._process, self._log = process, log

    def go(self) -> None:
        """Let it begin."""
        if self._process is None or self._process.stdin is None or self._process.stdin.closed:
            return
        try:
            self._process.stdin.write(b"go\n")
            self._process.stdin.close()
        except BrokenPipeError:
            return  # it has ended already, and finish() says how

    def finish(self, end: float) -> Outcome:
        """Its outcome, at the latest at ``end``."""
        if self._process is None:
            return Outcome(None, "there was no time left for it", late=True)
        self.go()
        try:
            code = self._process.wait(max(end - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            self.kill()
            return Outcome(None, "it was not done in time", late=True)
        if code != 0:
            return Outcome(None, Path(f"{self._log}.err").read_text(errors="replace")[-800:] or f"exit status {code}")
        return _outcome(Path(f"{self._log}.out").read_text(errors="replace"))

    def kill(self) -> None:
        """End it and whatever it started."""
        if self._process is None or self._process.poll() is not None:
            return
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _outcome(printed: str) -> Outcome:
    lines = printed.splitlines()
    try:
        row = json.loads(lines[-1]) if lines else None
    except ValueError:
        row = None
    return Outcome(row) if isinstance(row, dict) else Outcome(None, f"no row was printed: {printed[-400:]!r}")
