"""What probes and validation ask of a device: programs to launch, their replay, and clocks for host and device.

The two targets are ``on_cpu`` and ``on_cuda``; capture and replay are the runtime's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pygraph.calibration.timing import Sampler
from pygraph.errors import CaptureError
from pygraph.runtime.discover import Captured, capture
from pygraph.runtime.driver import Driver, Executable

__all__ = ["CHAINS", "CHECKED_CHAINS", "CHECKED_WIDES", "WIDES", "Program", "Target", "captured"]

CHAINS, WIDES = (4, 16, 64), (16, 64, 256)
"""Launches of the programs that figures are fitted to."""
CHECKED_CHAINS, CHECKED_WIDES = (2, 8, 24, 100), (24, 100)
"""Launches of those that predictions are held against."""


@dataclass(frozen=True)
class Program:
    """A function with the convention of regions, and arguments at two sets of addresses. It makes ``launches``."""

    fn: Callable[[list[Any]], Sequence[Any]]
    args: list[Any]
    others: list[Any]
    launches: int


class Target(Protocol):
    """One device to measure."""

    @property
    def kind(self) -> str:
        """``cpu`` or ``cuda``."""
        ...

    @property
    def driver(self) -> Driver:
        """What captures and replays there."""
        ...

    @property
    def memory(self) -> int:
        """Bytes that tensors may take together."""
        ...

    def matrices(self) -> Sequence[tuple[str, torch.dtype, str]]:
        """Kinds of matrix products: name of the peak, element type, precision of float32. The general one first."""
        ...

    def chain(self, launches: int) -> Program:
        """Small kernels, each of which reads what the one before wrote."""
        ...

    def wide(self, launches: int) -> Program:
        """Small kernels, each of which reads an argument of its own."""
        ...

    def host(self, call: Callable[[], Any], launches: int) -> Sampler:
        """Host time of ``call``, whose work is waited for in between, but not counted where it goes on behind."""
        ...

    def device(self, operator: Callable[[], Any]) -> Sampler:
        """Device time of ``operator``, which takes and makes tensors of its own."""
        ...


def captured(target: Target, program: Program) -> Executable:
    """``program`` ready for replay, by the road that regions take. Raises CaptureError with the reason of a refusal."""
    for _ in range(2):
        program.fn(list(program.args))
    target.driver.synchronise(None)
    made = capture(program.fn, target.driver, list(program.args))
    if not isinstance(made, Captured):
        raise CaptureError(made.reason, made.detail)
    return made.executable
