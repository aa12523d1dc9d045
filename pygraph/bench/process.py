"""The coordinator's end of one process: start it, tell it what to do, wait for its answers, end it in any case.

What processes are started when lives in ``compile_phase`` and ``timing``. What is run is given as a command line, so
that nothing here needs a GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from pygraph.bench.protocol import Answer, Phase, Spec

__all__ = ["Command", "Home", "Process", "command_of"]

Command: TypeAlias = Callable[[Spec], Sequence[str]]
"""The command line of a side's process."""

_TOLD = 1500
"""Characters of what a process that died had printed."""
_PARTING = 10.0
"""Seconds that a process may take to end once it has closed its pipe."""
_FAILED = 2.0
"""Seconds that it may take to end once it has answered that it failed."""
_KILLED = 30.0
"""Seconds that are waited for one that was killed, since what it has on a GPU takes a while to be taken down."""
_GONE = 1.0
"""Seconds that are waited for it when there is no time left: it is nobody's business any more."""


def command_of(spec: Spec) -> list[str]:
    """The command line of a side's process, as it is but for tests."""
    return [sys.executable, "-m", "pygraph.bench.worker", spec.text()]


class Home:
    """Where a program's sides keep their caches, logs and results, under one folder.

    Each side has a cache of its own for what Inductor compiles. Triton's, which goes by content, is shared by the
    sides of a program, unless each is to compile from nothing (``cold``).
    """

    def __init__(self, folder: Path, *, cold: bool = False) -> None:
        self.folder, self.cold = folder, cold

    def of(self, program: str, side: str) -> Path:
        """The folder of one side, made if need be."""
        path = self.folder / program / side
        path.mkdir(parents=True, exist_ok=True)
        return path

    def result(self, program: str, side: str, phase: Phase) -> Path:
        """The file for what a side computed."""
        return self.of(program, side) / f"{phase}.pt"

    def choices(self, program: str) -> Path:
        """The file of what was decided by timing kernels, for all sides of a program."""
        return (self.folder / program / "choices.json").absolute()

    @property
    def gpu_lock(self) -> Path:
        """The file that is locked by whoever times kernels."""
        return (self.folder / "gpu.lock").absolute()

    def environ(self, program: str, side: str, phase: Phase) -> dict[str, str]:
        """The environment of a process: caches apart; and nothing measured on a GPU that others load meanwhile."""
        own = self.of(program, side)
        triton = own / "triton" if self.cold else own.parent / "triton"
        more = {} if phase == "time" else {"PYGRAPH_MEASURE": "0"}
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(own / "compiled"), "TRITON_CACHE_DIR": str(triton)}
        return {**os.environ, **caches, **more}


class Process:
    """A process, in a session of its own so that its helpers end with it."""

    def __init__(self, command: Sequence[str], environ: dict[str, str], log: Path) -> None:
        self._log = log
        self._first: Answer | None = None
        self._answers: queue.Queue[Answer | None] = queue.Queue()
        with open(log, "wb") as err:
            self._process = subprocess.Popen(
                list(command),
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                start_new_session=True,
            )
        threading.Thread(target=self._listen, daemon=True).start()

    def tell(self, does: str, **more: Any) -> None:
        """Give it a command; its answer is to be waited for."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and answer() says how
            self._process.stdin.write((json.dumps({"do": does, **more}) + "\n").encode())
            self._process.stdin.flush()

    def answer(self, until: float) -> Answer:
        """Its next answer, waited for until a time of ``time.monotonic``. One that fails ends the process."""
        try:
            found = self._answers.get(timeout=_left(until, threading.TIMEOUT_MAX))
        except queue.Empty:
            found = Answer({}, "late", "it was not done in time")
        if found is None:
            found = Answer({}, "died", self._last_words(until))
        if found.failure == "late":
            self.kill()  # one of several, perhaps, and the time is up: nobody waits for it here
        elif found.failure is not None:
            self.end(until, _FAILED)
        return found

    def ready(self, until: float) -> Answer:
        """Its first answer, which says that it has imported what it needs; the same one when asked again."""
        if self._first is None:
            self._first = self.answer(until)
        return self._first

    def ask(self, until: float, does: str, **more: Any) -> Answer:
        """``tell`` and ``answer``."""
        self.tell(does, **more)
        return self.answer(until)

    def end(self, until: float, patience: float = 0.0) -> None:
        """End it and whatever it started; within ``patience`` seconds it may do so itself. Errors are no concern.

        After ``until``, a time of ``time.monotonic``, it is killed without patience, and hardly waited for.
        """
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._wait(_left(until, patience))
        self.kill()
        self._wait(max(_left(until, _KILLED), _GONE))

    def _wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def kill(self) -> None:
        """Kill it and whatever it started, without waiting until they are gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _listen(self) -> None:
        stream = self._process.stdout
        for line in stream if stream is not None else ():
            self._answers.put(_read(line))
        self._answers.put(None)

    def _last_words(self, until: float) -> str:
        self.end(until, _PARTING)  # it may hang, with its pipe closed
        code = self._process.poll()
        told = self._log.read_text(errors="replace").strip()[-_TOLD:]
        why = "closed its pipe" if code is None else f"ended with {f'signal {-code}' if code < 0 else f'status {code}'}"
        return f"it {why}" + (f": {told}" if told else "")


def _left(until: float, most: float) -> float:
    """The seconds until then, ``most`` at most, and none once it has passed."""
    return min(max(until - time.monotonic(), 0.0), most)


def _read(line: bytes) -> Answer:
    try:
        message = json.loads(line)
        return Answer(message["row"], message.get("failure"), message.get("error", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return Answer({}, "failed", f"it answered what cannot be read: {line[:200]!r}")
