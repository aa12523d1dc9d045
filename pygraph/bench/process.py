"""The coordinator's end of a side's process: start it, send commands, wait for answers, end it in any case.

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
"""Name of the range of each profiled call in a trace, from its entry to the entry of the next call."""
_TOLD = 1500
"""Maximum number of characters shown of the output of a process that died."""
_PATIENCE, _KILLED = 2.0, 30.0
"""Seconds that a process may take to end once it has failed or closed its pipe, and once it was killed: freeing its
resources on a GPU takes a while."""


@dataclass(frozen=True)
class Spec:
    """The work of a process. ``runner`` (``module:function``) runs ``program`` with ``args`` as ``side`` on ``device``.

    ``result`` is the file for results to compare. ``check``: the process only computes results, and Inductor draws
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
    """The outcome of a command, or of a whole side: ``facts``, or a ``failure`` and the ``error`` in words.

    A failure is ``failed`` (it raised), ``inapplicable`` (the side cannot run this program: the exception had that as
    ``failure``), ``ended`` (a script came to its end), ``died``, ``late`` (no answer in time) or ``wrong`` (results of
    a side are too far from eager's). ``difference`` from eager's results is relative to their largest magnitude.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None
    error: str = ""
    difference: float | None = None


class Process:
    """A process in its own process session, so that its helpers end with it. Times are those of ``time.monotonic``."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self._log = log
        pipe = subprocess.PIPE
        with open(log, "wb") as err:  # unbuffered, so that select() sees each answer
            self._process = subprocess.Popen(
                command, env=environ, bufsize=0, stdin=pipe, stdout=pipe, stderr=err, start_new_session=True
            )
        self._commands, self._answers = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)

    def tell(self, does: str, **more: Any) -> None:
        """Send a command; the caller must then wait for the answer."""
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and answer() says how
            self._commands.write((json.dumps({"do": does, **more}) + "\n").encode())

    def answer(self, until: float) -> Outcome:
        """Wait for the next answer. If it is a failure, or does not come, the process is ended.

        The first answer needs no command: it comes once the process has imported its modules.
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
        """Move its threads to ``cores``; processes that it has started stay where they are."""
        for thread in Path(f"/proc/{self._process.pid}/task").glob("*"):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread.name), cores)

    def end(self, until: float) -> None:
        """End it and all processes that it started. It has a short time before ``until`` to end by itself."""
        with contextlib.suppress(OSError):
            self._commands.close()
        self._wait(_left(until, _PATIENCE))
        self.kill()
        self._wait(max(_left(until, _KILLED), 1.0))

    def kill(self) -> None:
        """Kill it and all processes that it started, without waiting for their end."""
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
    """Seconds until ``until``: at most ``most``, and 0 once it has passed."""
    return min(max(until - time.monotonic(), 0.0), most)


def gist(error: str) -> str:
    """The most informative line of ``error``: the first of an exception; the last of a traceback or process output."""
    lines = error.strip().splitlines() or [""]
    told = lines[0].startswith(("Traceback", "it ended with ", "it closed its pipe"))
    return lines[-1 if told else 0]
