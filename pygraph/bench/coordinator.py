"""Runs a benchmark: both phases, or one of them, with what was found written after every step.

What is run comes as programs, where as a launcher; nothing here knows workloads or scripts.
"""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pygraph import __version__
from pygraph.bench.compile_phase import CompileLog, compile_all
from pygraph.bench.plan import Launcher, Program, scripts_in
from pygraph.bench.protocol import gist
from pygraph.bench.results import Results
from pygraph.bench.sides import OURS, measures
from pygraph.bench.timing import Timed, Timing

__all__ = ["COMPILE_SHARE", "Options", "machine", "run"]

COMPILE_SHARE = 0.6
"""The part of the time that compiling ahead may take, where both phases run; what is not done compiles later."""

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """How a benchmark runs: for how many ``seconds`` in all, with ``jobs`` processes that compile at once, ``blocks``
    rounds, and which of its phases. With ``compile_time``, sides are compiled one by one, and that is timed."""

    seconds: float
    jobs: int
    blocks: int
    seed: int
    phase: str = "all"
    compile_time: bool = False

    def as_json(self) -> dict[str, Any]:
        """What readers of the results want to know."""
        return {
            "blocks": self.blocks,
            "seed": self.seed,
            "seconds": self.seconds,
            "compile_time": self.compile_time,
            "measure": measures(OURS),
        }


def run(
    programs: Sequence[Program],
    launcher: Launcher,
    options: Options,
    write: Callable[[Results], None],
    *,
    skipped: Mapping[str, str],
    tell: Tell,
    step: Tell,
) -> Results:
    """Run the phases asked for; ``write`` is called whenever there is more to be written, at first with nothing.

    ``tell`` gets a line for everything that is done, ``step`` what is being done. Raises what ``write`` raises.
    """
    start = time.monotonic()
    end = start + options.seconds
    about = machine(launcher.device)
    log = _compile_log(programs, launcher, about)
    settings = {**options.as_json(), "device": launcher.device, "tiny": launcher.tiny}
    results = Results(programs, log, about, settings, skipped)
    write(results)
    if options.phase != "time":
        until = end if options.phase == "compile" else start + COMPILE_SHARE * options.seconds
        step("compiling")
        compile_all(programs, launcher, log, 1 if options.compile_time else options.jobs, until, tell)
        tell(f"compiled in {time.monotonic() - start:.0f} s")
    if options.phase != "compile":
        _time(programs, launcher, options, end, results, write, tell, step, log)
    return results


def _compile_log(programs: Sequence[Program], launcher: Launcher, about: Mapping[str, Any]) -> CompileLog:
    """What is known from earlier runs on a machine like the one that ``about`` describes."""
    stamp = {
        **{key: about.get(key) for key in ("device", "gpu", "torch")},
        "tiny": launcher.tiny,
        "pygraph": __version__,
        "suite": launcher.suite,
        "scripts": scripts_in(programs),
    }
    return CompileLog(launcher.home.folder / "compiled.json", stamp)


def _time(
    programs: Sequence[Program],
    launcher: Launcher,
    options: Options,
    end: float,
    results: Results,
    write: Callable[[Results], None],
    tell: Tell,
    step: Tell,
    log: CompileLog,
) -> None:
    finished = iter(range(1, len(programs) + 1))

    def done(program: Program, timed: Timed) -> None:
        row = results.add(program, timed)
        write(results)
        tell(f"[{next(finished)}/{len(programs)}] {headline(program.name, row)}")

    timing = Timing(launcher, end, blocks=options.blocks, seed=options.seed, tell=step, ahead=log.compiled)
    timing.run(programs, results.to_time, done)


def headline(name: str, row: Mapping[str, Any]) -> str:
    """A workload in a line: PyGraph's gain over each side in wall time, and what failed."""
    parts = [f"{side} {ratio['wall_us']['ratio']:.2f}×" for side, ratio in row["ratios"].items() if "wall_us" in ratio]
    parts += [_trouble(side, found) for side, found in row["sides"].items() if found["status"] != "ok"]
    return f"{name}: {'; '.join(parts) or 'nothing was measured'}"


def _trouble(side: str, found: Mapping[str, Any]) -> str:
    if found["status"] == "wrong":
        return f"WRONG RESULTS of {side}: {found['error']}"
    return f"{side} {found['status']}: {gist(found['error'])[:160]}"


def machine(device: str) -> dict[str, Any]:
    """What the benchmark runs on: GPU, driver, versions, date."""
    import torch

    found = {
        "device": device,
        "cpu": platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
    if device == "cuda":
        found.update(gpu=torch.cuda.get_device_name(), driver=_driver())
    return found


def _driver() -> str | None:
    """The version of the GPU's driver, where nvidia-smi tells it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout.splitlines()[0].strip() if told.returncode == 0 and told.stdout.strip() else None
