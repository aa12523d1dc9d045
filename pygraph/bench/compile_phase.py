"""The first phase: every side compiled in a process of its own, several at once, into caches on disk.

What came of it is kept beside the caches, so that the second phase may be another command. Results of programs that
draw random numbers are compared here.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pygraph.bench.plan import Launcher, Program
from pygraph.bench.process import Process
from pygraph.bench.protocol import Answer, Phase, gist
from pygraph.bench.sides import REFERENCE, SIDES
from pygraph.cache import read_json, write_atomically

__all__ = ["CompileLog", "compile_all"]

_FILLING_CALLS = 4
"""Calls that find everything there is to compile: a graph of other sizes, a region that is cut once more."""

_LONGEST = 900.0
"""Seconds after which a process that compiles is taken for hung."""

_PARTING = 5.0
"""Seconds that a process may take to end once it is done."""

Tell = Callable[[str], None]


class CompileLog:
    """What is known of each side once it has been compiled: rows by program, side and phase, in a JSON file.

    A row has ``compile_s``, or ``failure`` and ``error``; that of a check also its ``difference`` from the reference.
    ``stamp`` says what the rows hold for (device, versions); rows of another stamp are forgotten.
    """

    def __init__(self, path: Path, stamp: Mapping[str, Any]) -> None:
        self._path, self._stamp = path, dict(stamp)
        found = read_json(path)
        self._rows: dict[str, dict[str, Any]] = {}
        if isinstance(found, dict) and found.get("stamp") == self._stamp and isinstance(found.get("rows"), dict):
            self._rows = found["rows"]
        self._lock = threading.Lock()

    def row(self, program: str, side: str, phase: Phase) -> dict[str, Any] | None:
        """What is known, or None."""
        return self._rows.get(f"{program} {side} {phase}")

    def compiled(self, program: Program, side: str) -> bool:
        """Whether a side was compiled to the end, so that kernels had to be timed for it then and not now."""
        row = self.row(program.name, side, "compile")
        return row is not None and not row.get("failure")

    def put(self, program: str, side: str, phase: Phase, row: Mapping[str, Any]) -> None:
        """Add to what is known, on disk too."""
        with self._lock:
            self._rows[f"{program} {side} {phase}"] = dict(row)
            write_atomically(self._path, json.dumps({"stamp": self._stamp, "rows": self._rows}, indent=1) + "\n")


@dataclass(frozen=True)
class _Task:
    program: Program
    side: str
    phase: Phase


def compile_all(
    programs: Sequence[Program], launcher: Launcher, log: CompileLog, jobs: int, until: float, tell: Tell
) -> None:
    """Fill the caches of every side that has any, and check results where that has to be done apart.

    ``jobs`` processes at once, until the time ``until`` of ``time.monotonic``, when those under way are killed; what
    was not done by then is logged as late, and compiles when it is timed. What a process chose by timing kernels goes
    for all sides, whatever becomes of the process.
    """
    tasks = _tasks(programs)
    threads = max((os.cpu_count() or 1) // jobs, 1)
    finished = iter(range(1, len(tasks) + 1))
    lock, stopped, running = threading.Lock(), threading.Event(), set[Process]()

    def one(task: _Task) -> None:
        found = _run(task, launcher, until, threads, running)
        if stopped.is_set():  # it was killed, which says nothing of the side
            return
        with lock:
            log.put(task.program.name, task.side, task.phase, _row(found))
            if found.failure is None:
                _compare(task.program, launcher, log)
            tell(f"[{next(finished)}/{len(tasks)}] {_told(task, found)}")

    _map(one, tasks, jobs, stopped, running)


def _map(
    one: Callable[[_Task], None], tasks: Sequence[_Task], jobs: int, stopped: threading.Event, running: set[Process]
) -> None:
    """``one`` of each task, ``jobs`` at once. An interrupt kills what is ``running``, for which threads would wait."""
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for _ in pool.map(one, tasks):
                pass
        except BaseException:  # raised again: only the waiting is spared
            stopped.set()
            for process in list(running):
                process.kill()
            raise


def _tasks(programs: Sequence[Program]) -> list[_Task]:
    """The same side of every program before the next side: what Triton compiles for it serves the others."""
    tasks = []
    for side in SIDES:
        among = [program for program in programs if side in program.sides]
        tasks += [_Task(program, side, "check") for program in among if program.apart]
        tasks += [_Task(program, side, "compile") for program in among if SIDES[side].caches]
    return tasks


def _run(task: _Task, launcher: Launcher, until: float, threads: int, running: set[Process]) -> Answer:
    until = min(until, time.monotonic() + _LONGEST)
    if time.monotonic() >= until:
        return Answer({}, "late", "there was no time left for it")
    process = launcher.start(task.program, task.side, task.phase, threads)
    running.add(process)
    calls = task.program.compared if task.phase == "check" else _FILLING_CALLS
    try:
        return _commands(process.ask, process.ready(until), until, calls)
    finally:
        process.end(until, _PARTING)
        running.discard(process)


def _commands(ask: Callable[..., Answer], ready: Answer, until: float, calls: int) -> Answer:
    """The row of the first call, or what failed; a script that ends before the last call has done what it can."""
    first = ready if ready.failure else ask(until, "compile")
    if first.failure:
        return Answer({}) if first.failure == "ended" and first.row.get("calls") else first
    then = ask(until, "warm", calls=calls, seconds=0.0)
    if then.failure and then.failure != "ended":
        return then
    if not then.failure:
        ask(until, "finish")
    return first


def _row(found: Answer) -> dict[str, Any]:
    return {"failure": found.failure, "error": found.error} if found.failure else dict(found.row)


def _told(task: _Task, found: Answer) -> str:
    what = f"{task.program.name} {task.side}"
    if found.failure:
        return f"{what}: {gist(found.error) or found.failure}"
    if task.phase == "check":
        return f"{what}: results computed"
    return f"{what}: compiled in {found.row.get('compile_s', math.nan):.1f} s"


def _compare(program: Program, launcher: Launcher, log: CompileLog) -> None:
    """Compare what has been computed so far with what the reference computed."""
    from pygraph.bench.correctness import difference, load

    reference = log.row(program.name, REFERENCE, "check")
    if reference is None or reference.get("failure"):
        return
    expected = None
    for side in program.sides:
        row = log.row(program.name, side, "check")
        if row is None or row.get("failure") or "difference" in row:
            continue
        expected = expected or load(launcher.home.result(program.name, REFERENCE, "check"))
        path = launcher.home.result(program.name, side, "check")
        apart = difference(expected, load(path)) if path.exists() else math.inf
        log.put(program.name, side, "check", {**row, "difference": "infinite" if apart == math.inf else apart})
