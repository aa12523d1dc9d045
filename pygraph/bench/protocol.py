"""What a benchmark's coordinator and its processes say to each other: a line of JSON per command, and one per answer.

Neither end's behaviour lives here: that of the process is in ``serving``, that of the coordinator in ``process``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import IO, Any, Literal, TypeAlias

__all__ = ["Answer", "Channel", "Failure", "Phase", "Spec", "gist"]

Phase: TypeAlias = Literal["compile", "check", "time"]
"""Filling caches; computing results with Inductor drawing random numbers as eager does; being timed."""

Failure: TypeAlias = Literal["failed", "inapplicable", "memory", "ended", "died", "late"]
"""It raised; it cannot run this program; out of memory; the script came to its end; it is gone; it took too long."""


@dataclass(frozen=True)
class Spec:
    """What a process is: which side of which program, where, and what for.

    ``program`` names a workload of ``suite`` (a module with WORKLOADS), or is the path of a script with ``args``.
    ``result`` is the file that it leaves what it computed in. ``choices`` is the file of what was decided by timing
    kernels, and ``gpu_lock`` the one to be locked meanwhile; ``fresh``: it decides anew.
    """

    program: str
    side: str
    phase: Phase
    device: str
    result: str
    choices: str
    gpu_lock: str
    suite: str = ""
    script: bool = False
    args: tuple[str, ...] = ()
    tiny: bool = False
    fresh: bool = False

    def text(self) -> str:
        """As JSON, for a command line."""
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str) -> Spec:
        """What ``text`` made of one."""
        spec = Spec(**json.loads(text))
        return replace(spec, args=tuple(spec.args))


@dataclass(frozen=True)
class Answer:
    """What came of a command: ``row`` with what was found, or ``failure`` and in ``error`` why, in words."""

    row: dict[str, Any]
    failure: Failure | None = None
    error: str = ""


class Channel:
    """The process's end: commands come in, each is answered once."""

    def __init__(self, commands: IO[str], answers: IO[str]) -> None:
        self._commands, self._answers = commands, answers

    def commands(self) -> Iterator[dict[str, Any]]:
        """Commands as they come, until the coordinator is gone."""
        while line := self._commands.readline():
            command: dict[str, Any] = json.loads(line)
            yield command

    def answer(self, row: dict[str, Any]) -> None:
        """Answer the last command."""
        self._write({"row": row})

    def fail(self, failure: Failure, error: str, row: dict[str, Any] | None = None) -> None:
        """Say that the last command could not be done; nothing more will be."""
        self._write({"row": row or {}, "failure": failure, "error": error})

    def _write(self, message: dict[str, Any]) -> None:
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()


def gist(error: str) -> str:
    """The line of ``error`` that says most: an exception's first, the last of a traceback or of what a process said."""
    lines = error.strip().splitlines()
    if not lines:
        return ""
    told = lines[0].startswith(("Traceback", "it ended with ", "it closed its pipe"))
    return lines[-1] if told else lines[0]
