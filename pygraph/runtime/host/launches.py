"""What a recording holds on to besides plain data, so that it can be replayed: the payload of a host Recording.

Made by the recorder, read by the driver. Everything that can be compared is in the Recording itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pygraph.runtime.host.arena import Arena
from pygraph.runtime.host.kernels import Kernel

__all__ = ["HostCapture", "OperatorLaunch"]


@dataclass(frozen=True, slots=True)
class OperatorLaunch:
    """An operator: ``call`` is the native object with its arguments.

    ``moves`` tells for each tensor argument whether its memory is patched. ``results`` holds, for each tensor that
    the operator returns, the memory it is copied to (None for one that is an argument); empty when there is none.
    """

    call: Any
    moves: tuple[bool, ...]
    results: tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class HostCapture:
    """``launches`` match those of the recording; ``arguments`` are the stand-ins, or the Python values themselves.

    ``written`` are the arguments that any launch writes; ``exclusive`` the pairs of a written argument and another
    that one operator is given, which must not overlap at replay, as they did not when recorded. ``same`` maps the
    position of an output to that of an earlier one which is the same object. ``constants`` keeps alive what the
    launches point into.
    """

    arena: Arena
    launches: tuple[Kernel | OperatorLaunch, ...]
    arguments: tuple[Any, ...]
    written: frozenset[int]
    exclusive: frozenset[tuple[int, int]]
    same: dict[int, int]
    constants: tuple[torch.Tensor, ...]

    @property
    def libraries(self) -> tuple[object, ...]:
        """The loaded libraries that the launches' code lies in."""
        return tuple(launch.library for launch in self.launches if isinstance(launch, Kernel))
