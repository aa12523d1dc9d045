"""The coordinator's end of a side's process: start it, tell it what to do, wait for its answers, end it in any case.

A command is a line of JSON on the process's stdin, an answer a line on its stdout::

    → {"do": "block", "calls": 40, "lead": 3}
    ← {"facts": {"wall_us": 128.7, "host_us": 31.0}, "failure": null, "error": ""}
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

CALL = "pygraph call"
"""The mark of each profiled call in a trace, from its entry to the next one's."""
_TOLD = 1500
"""Characters of what a process that died had printed."""
_PATIENCE, _KILLED = 2.0, 30.0
"""Seconds that a process may take to end by itself once it has failed or closed its pipe, and once it was killed: what
it has on a GPU takes a while to be taken down."""


@dataclass(frozen=True)
class Spec:
    """The work of a process. ``runner`` (``module:function``) runs ``program`` with ``args`` as ``side`` on ``device``.

    ``result`` is the file for results that are compared. ``check``: the process only computes them, and Inductor draws
    random numbers as eager does.
    """

    runner: str
    program: str
    args: Sequence[str]
    side: str
    device: str
    result: str
    check: bool = False


@dataclass
class Outcome:
    """The outcome of a command, or of a whole side: ``facts`` that were found, or ``failure`` and, in words, ``error``.

    A failure is ``failed`` (it raised), ``inapplicable`` (the side cannot run this program: the exception had that as
    ``failure``), ``ended`` (a script came to its end), ``died``, ``late`` (no answer in time) or ``wrong`` (a side:
    its results are too far from eager's). ``difference`` is that from eager's, relative to their largest magnitude.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None
    error: str = ""
    difference: float | None = None


class Process:
    """A process in a session of its own, so that its helpers end with it. Times are those of ``time.monotonic``."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self._log = log
        pipe = subprocess.PIPE
        with open(log, "wb") as err:  # unbuffered, so that the pipe is ready whenever an answer is there
            self._process = subprocess.Popen(
                command, env=environ, bufsize=0, stdin=pipe, stdout=pipe, stderr=err, start_new_session=True
            )
        self._commands, self._answers = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)

    def tell(self, does: str, **more: Any) -> None:
        """Give it a command; its answer is to be waited for."""
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and answer() says how
            self._commands.write((json.dumps({"do": does, **more}) + "\n").encode())

    def answer(self, until: float) -> Outcome:
        """Its next answer. One that fails, or does not come, ends the process.

        The first one comes untold, once it has imported what it needs.
        """
        if not select.select([self._answers], [], [], _left(until, 1e6))[0]:
            self.kill()
            found = Outcome(failure="late", error="it was not done in time")
        elif (line := self._answers.readline()).endswith(b"\n"):
            found = Outcome(**json.loads(line))
        else:
            self._wait(_left(until, _PATIENCE))  # it may hang with its pipe closed
            found = Outcome(failure="died", error=self._last_words())
        if found.failure is not None:
            self.end(until)
        return found

    def move(self, cores: Collection[int]) -> None:
        """Have its threads run on ``cores``; what it has started stays where it is."""
        for thread in Path(f"/proc/{self._process.pid}/task").glob("*"):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread.name), cores)

    def end(self, until: float) -> None:
        """End it and whatever it started; for a moment, and before ``until``, it may do so itself."""
        with contextlib.suppress(OSError):
            self._commands.close()
        self._wait(_left(until, _PATIENCE))
        self.kill()
        self._wait(max(_left(until, _KILLED), 1.0))

    def kill(self) -> None:
        """Kill it and whatever it started, without waiting until they are gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def _last_words(self) -> str:
        code = self._process.poll()
        told = self._log.read_text(errors="replace").strip()[-_TOLD:]
        why = "closed its pipe" if code is None else f"ended with {f'signal {-code}' if code < 0 else f'status {code}'}"
        return f"it {why}" + (f": {told}" if told else "")


def _left(until: float, most: float) -> float:
    """The seconds until then, ``most`` at most, and none once it has passed."""
    return min(max(until - time.monotonic(), 0.0), most)


def gist(error: str) -> str:
    """The line of ``error`` that says most: an exception's first; the last of a traceback or of a process's output."""
    lines = error.strip().splitlines() or [""]
    told = lines[0].startswith(("Traceback", "it ended with ", "it closed its pipe"))
    return lines[-1 if told else 0]
