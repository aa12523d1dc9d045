"""Whether measured selection decides right, on programs whose candidates are timed apart as well.

    python benchmarks/selection.py [--device cpu] [--out FILE]

A program is a chain of pointwise kernels; no compiler is involved. In some, a delay follows each replay.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pygraph.backend import driver_for
from pygraph.runtime.measure import CALLS, MARGIN, ROUNDS, UNCAPTURED
from pygraph.runtime.native_build import waiting_for_builds
from pygraph.runtime.region import Region, RegionOptions

__all__ = ["CALLERS", "PROGRAMS", "Program", "decide"]

_MOST = 4 * ROUNDS * (CALLS + 1)
"""Calls within which every program is decided, unless its calls are disturbed."""
_BLOCKS, _BLOCK = 5, 64
"""Blocks that a candidate is timed apart in, and the calls of each."""


@dataclass(frozen=True)
class Program:
    """``size``: elements and launches on each kind of device. A replay is followed by a delay of ``slowed`` times an
    uncaptured call: of the ``host`` or of the ``device``."""

    size: dict[str, tuple[int, int]]
    slowed: float = 0.0
    where: str = "host"


_SMALL, _LARGE = {"cuda": (4096, 60), "cpu": (16, 40)}, {"cuda": (1 << 24, 4), "cpu": (1 << 14, 3)}
PROGRAMS = {
    "host-bound": Program(_SMALL),
    "device-bound": Program(_LARGE),
    "host-bound, slowed": Program(_SMALL, slowed=1.5),
    "device-bound, slowed": Program(_LARGE, slowed=1.0, where="device"),
}

CALLERS: dict[str, Callable[[str, int], None]] = {
    "steady": lambda device, call: None,
    "waits": lambda device, call: _wait(device),
    "waits each 16": lambda device, call: _wait(device) if call % 16 == 15 else None,
}
"""What happens after each call."""


def _chain(args: list[Any]) -> Sequence[Any]:
    x, launches = args
    args.clear()
    for _ in range(launches):
        x = x.sin()
    return (x,)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.current_stream().synchronize()


class _Slowed:
    """A driver whose replays are followed by a ``delay``."""

    def __init__(self, driver: Any, delay: Callable[[], None]) -> None:
        self._driver, self._delay = driver, delay

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def instantiate(self, program: Any) -> Any:
        """An executable of the driver's, slowed."""
        return _SlowedExecutable(self._driver.instantiate(program), self._delay)


class _SlowedExecutable:
    def __init__(self, executable: Any, delay: Callable[[], None]) -> None:
        self.close = executable.close
        self._replay, self._delay = executable.replay, delay

    def replay(self, args: list[Any]) -> Any:
        """A replay of the executable's, and the delay."""
        outputs = self._replay(args)
        if outputs is not None:
            self._delay()
        return outputs


def _delay(device: str, where: str, seconds: float) -> Callable[[], None]:
    if device == "cuda" and where == "device":
        cycles = int(seconds * _cycles_per_second())
        return lambda: torch.cuda._sleep(cycles)

    def spin() -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    return spin


def _cycles_per_second() -> float:
    cycles = 20_000_000
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    return cycles / (time.perf_counter() - start)


def _apart(call: Callable[[], Any], after: Callable[[str, int], None], device: str) -> float:
    """Seconds per call of a candidate that is all that runs: the median of blocks drained at both ends."""
    times = []
    for _ in range(_BLOCKS + 1):  # the first one warms up
        _wait(device)
        start = time.perf_counter()
        for number in range(_BLOCK):
            call()
            after(device, number)
        _wait(device)
        times.append((time.perf_counter() - start) / _BLOCK)
    return median(times[1:])


def decide(program: Program, caller: str, device: str) -> dict[str, Any]:
    """What measured selection decides, the times per call of the candidates apart, in µs, and whether it was ``right``:
    no slower than the other one by more than twice the margin. Raises RuntimeError where nothing is decided."""
    driver: Any = driver_for(device)
    elements, launches = program.size[device]
    x, after = torch.rand(elements, device=device), CALLERS[caller]
    alone = _apart(lambda: _chain([x, launches]), after, device)
    if program.slowed:
        driver = _Slowed(driver, _delay(device, program.where, program.slowed * alone))
    measured, forced = (Region(_chain, driver, name="chain", options=RegionOptions(measure=on)) for on in (True, False))
    try:
        for number in range(_MOST):
            measured([x, launches])
            after(device, number)
        if not measured.record.decisions:
            raise RuntimeError(f"nothing is decided: {measured.record.reason}")
        apart = {"replay": _apart(lambda: forced([x, launches]), after, device), "uncaptured": alone}
    finally:
        measured.close()
        forced.close()
    (decision,) = measured.record.decisions
    slower = apart[decision.choice] / min(apart.values())
    return {
        "choice": decision.choice,
        "calls": decision.calls,
        "measured_us": {"replay": decision.replay_us, "uncaptured": decision.other_us},
        "apart_us": {name: seconds * 1e6 for name, seconds in apart.items()},
        "right": slower <= 1 + 2 * MARGIN[UNCAPTURED],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each program and caller; ``--out`` gets them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    chosen = parser.parse_args(arguments)
    if driver_for(chosen.device) is None:
        parser.error(f"no driver captures on {chosen.device}")
    if chosen.device == "cpu":
        torch.set_num_threads(1)
    found = []
    with torch.no_grad():
        for name, program in PROGRAMS.items():
            for caller in CALLERS:
                row = decide(program, caller, chosen.device)
                found.append({"program": name, "caller": caller, **row})
                times = ", ".join(f"{candidate} {us:.1f} µs" for candidate, us in row["apart_us"].items())
                right = "right" if row["right"] else "WRONG"
                print(f"{name:<21} {caller:<14} {right}: {row['choice']} after {row['calls']} calls; apart: {times}")
    if chosen.out is not None:
        chosen.out.write_text(
            json.dumps({"torch": torch.__version__, "device": chosen.device, "rows": found}, indent=1)
        )


if __name__ == "__main__":
    with waiting_for_builds():
        main()
