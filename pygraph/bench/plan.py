"""What a benchmark runs, as its coordinator knows it: programs with their sides, and how they are to be run.

Building and calling them is done in processes of their own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pygraph.bench.process import Command, Home, Process, command_of
from pygraph.bench.protocol import Phase, Spec
from pygraph.bench.registry import SUITE
from pygraph.bench.sides import SIDES
from pygraph.bench.workload import Workload

__all__ = ["CALLS_COMPARED", "Launcher", "Program", "program_of_script", "program_of_workload", "scripts_in"]

CALLS_COMPARED = 7
"""Calls whose results are compared at least. By the fourth, each side has captured what is the same in each call."""
_TURNS_COMPARED = 4
"""How often sizes that take turns come before comparing ends: run, captured, and replayed on every side."""

_SCRIPT_CALLS = 10


@dataclass(frozen=True)
class Program:
    """A workload or a script with the ``sides`` that it is run on.

    The results of the first ``compared`` calls are compared. ``apart``: it draws random numbers, so that this is done
    in processes of their own, in which Inductor draws as eager does. ``finite``: it ends by itself, so that blocks
    have ``calls`` calls, no more.
    """

    name: str
    about: str
    kind: str
    domain: str
    sides: tuple[str, ...]
    calls: int
    tolerance: float
    why_tolerance: str
    apart: bool
    compared: int = CALLS_COMPARED
    finite: bool = False
    script: str = ""
    args: tuple[str, ...] = ()


def program_of_workload(workload: Workload, sides: Sequence[str], calls: int | None = None) -> Program:
    """A workload of a suite on those of ``sides`` that apply to it."""
    return Program(
        name=workload.name,
        about=workload.about,
        kind=workload.kind,
        domain=workload.domain,
        sides=tuple(side for side in sides if workload.whole_step or not SIDES[side].whole),
        calls=calls or workload.calls,
        tolerance=workload.tolerance,
        why_tolerance=workload.why_tolerance,
        apart=workload.random,
        compared=max(CALLS_COMPARED, _TURNS_COMPARED * workload.turns),
    )


def program_of_script(path: str, args: Sequence[str], sides: Sequence[str], calls: int | None = None) -> Program:
    """A user's script on ``sides``."""
    return Program(
        name=re.sub(r"[^\w.-]+", "-", Path(path).stem),
        about=" ".join([path, *args]),
        kind="script",
        domain="scripts",
        sides=tuple(side for side in sides if not SIDES[side].whole),
        calls=calls or _SCRIPT_CALLS,
        tolerance=1e-2,
        why_tolerance="the same for all scripts",
        apart=True,
        finite=True,
        script=path,
        args=tuple(args),
    )


def scripts_in(programs: Sequence[Program]) -> list[list[str]]:
    """Path, digest and arguments of each script: what was found of one does not hold for another of that name."""
    found = []
    for program in programs:
        if program.script:
            path = Path(program.script).resolve()
            found.append([str(path), hashlib.sha256(path.read_bytes()).hexdigest(), *program.args])
    return found


@dataclass(frozen=True)
class Launcher:
    """Starts the processes of a benchmark."""

    home: Home
    device: str
    tiny: bool = False
    suite: str = SUITE
    command: Command = field(default=command_of)

    def start(self, program: Program, side: str, phase: Phase, threads: int | None) -> Process:
        """A process that has not been told to go. ``threads`` bounds those that it compiles with."""
        result = self.home.result(program.name, side, phase)
        result.unlink(missing_ok=True)  # of an earlier benchmark with the same caches
        spec = Spec(
            program=program.script or program.name,
            side=side,
            phase=phase,
            device=self.device,
            result=str(result),
            choices=str(self.home.choices(program.name)),
            gpu_lock=str(self.home.gpu_lock),
            suite=self.suite,
            script=bool(program.script),
            args=program.args,
            tiny=self.tiny,
            fresh=self.home.cold and phase == "compile",
        )
        environ = self.home.environ(program.name, side, phase)
        if threads is not None:
            environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(threads)
        log = self.home.of(program.name, side) / f"{phase}.log"
        return Process(self.command(spec), environ, log)
