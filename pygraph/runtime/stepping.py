"""What a driver offers for finding the launch that differs: one launch at a time, and the uncaptured program observed.

The search itself is ``divergence``'s; a driver that offers neither is compared all the same, without naming a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from pygraph.runtime.driver import Program

__all__ = ["Operand", "Repeat", "Stepper", "Steps", "Watcher"]


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a call is given or returns, and the ``address`` that its first element had when captured."""

    address: int
    tensor: torch.Tensor
    written: bool


Repeat = Callable[[], Sequence[Operand]]
"""Runs a call once more, and returns the tensors that it makes then."""


class Watcher(Protocol):
    """Told of the calls of a traced run that added launches ``begin`` to ``end`` (excluded) when captured, in order."""

    def before(self, begin: int, end: int, given: Sequence[Operand]) -> None:
        """The call is about to run on ``given``."""

    def after(
        self, begin: int, end: int, given: Sequence[Operand], returned: Sequence[Operand], repeat: Repeat
    ) -> None:
        """It ran; ``returned`` are the tensors that it made. ``repeat`` runs it once more, on the same tensors, and
        returns what it makes then."""


class Stepper(Protocol):
    """A program whose launches are run one by one, with memory that the caller provides."""

    device: torch.device
    """Where that memory has to be."""

    def run(self, launch: int, words: Mapping[int, int]) -> None:
        """Run launch ``launch`` with the addresses ``words`` in its words of those numbers. Raises what it raises."""


@runtime_checkable
class Steps(Protocol):
    """A driver that can do this."""

    def stepper(self, program: Program, fn: Callable[[list[Any]], Sequence[Any]], args: Sequence[Any]) -> Stepper:
        """Make ``program``, which was captured from ``fn`` on arguments like ``args``, ready to be stepped through.

        Takes over the random state of now. Raises CaptureError when that cannot be.
        """

    def trace(
        self, program: Program, fn: Callable[[list[Any]], Sequence[Any]], args: list[Any], watcher: Watcher
    ) -> Sequence[Any]:
        """Run ``fn`` on ``args`` uncaptured and tell ``watcher`` of each call; returns what ``fn`` returned.

        Raises CaptureError when the calls are not those that ``program`` was captured from.
        """
