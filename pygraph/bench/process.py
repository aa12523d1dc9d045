"""The coordinator's end of one process: start it, tell it what to do, wait for its answers, end it in any case.

What processes are started when lives in ``compile_phase`` and ``timing``. What is run is given as a command line, so
that nothing here needs a GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from pygraph.bench.protocol import Answer, Phase, Spec

__all__ = ["Command", "Home", "Process", "command_of"]

Command: TypeAlias = Callable[[Spec], Sequence[str]]
"""The command line of a side's process."""

CHOICES = "*.best_config"
"""Files in which Inductor keeps which configuration of a kernel was the fastest."""

_TOLD = 1500
"""Characters of what a process that died had printed."""
_PARTING = 10.0
"""Seconds that a process may take to end once it has closed its pipe."""


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

    def share_choices(self, program: str, side: str, others: Iterable[str]) -> None:
        """Give what ``side`` chose by timing kernels to the sides that compile the same ones."""
        source = self.of(program, side) / "inductor"
        for other in others:
            for path in source.rglob(CHOICES):
                copy = self.of(program, other) / "inductor" / path.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)

    def has_choices(self, program: str, side: str) -> bool:
        """Whether a side has chosen before, or needs not, being given what another one chose."""
        return any((self.of(program, side) / "inductor").rglob(CHOICES))

    def environ(self, program: str, side: str, phase: Phase) -> dict[str, str]:
        """The environment of a process: caches apart; and no trials on a GPU that others load meanwhile."""
        own = self.of(program, side)
        triton = own / "triton" if self.cold else own.parent / "triton"
        more = {} if phase == "time" else {"PYGRAPH_MEASURE": "0"}
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(own / "inductor"), "TRITON_CACHE_DIR": str(triton)}
        return {**os.environ, **caches, **more}


class Process:
    """A process, in a session of its own so that its helpers end with it."""

    def __init__(self, name: str, command: Sequence[str], environ: dict[str, str], log: Path) -> None:
        self.name = name
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
            found = self._answers.get(timeout=max(until - time.monotonic(), 0.0))
        except queue.Empty:
            found = Answer({}, "late", "it was not done in time")
        if found is None:
            found = Answer({}, "died", self._last_words())
        if found.failure is not None:
            self.end(2.0)
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

    def end(self, patience: float = 0.0) -> None:
        """End it and whatever it started; within ``patience`` seconds it may do so itself. Errors are no concern."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        self.kill()
        self._process.wait()

    def kill(self) -> None:
        """Kill it and whatever it started, without waiting until they are gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _listen(self) -> None:
        stream = self._process.stdout
        for line in stream if stream is not None else ():
            self._answers.put(_read(line))
        self._answers.put(None)

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs, with its pipe closed
            self._process.wait(_PARTING)
        self.end()
        code = self._process.wait()
        told = self._log.read_text(errors="replace").strip()[-_TOLD:]
        why = f"signal {-code}" if code < 0 else f"status {code}"
        return f"it ended with {why}" + (f": {told}" if told else "")


def _read(line: bytes) -> Answer:
    try:
        message = json.loads(line)
        return Answer(message["row"], message.get("failure"), message.get("error", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return Answer({}, "failed", f"it answered what cannot be read: {line[:200]!r}")
