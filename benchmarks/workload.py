"""Workloads: programs that make a step, given how to compile.

Workloads say what runs, and what must be equal about it. How it is compiled is in ``sides``, how it is timed elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

__all__ = ["Build", "Compile", "Step", "Training", "Workload"]

Step: TypeAlias = Callable[[], Any]
"""One step. Returns the tensor, or the list or tuple of tensors, that has to be equal on all sides."""


@dataclass(frozen=True)
class Training:
    """A step that trains. ``step`` is all that the user runs: what ``pygraph.train_step`` and a capture by hand take.

    ``watched`` has to be equal after each step too. Calling a ``Training`` returns both; timed calls are those of
    ``step`` alone.
    """

    step: Step
    watched: Sequence[torch.Tensor]

    def __call__(self) -> list[Any]:
        return [self.step(), *self.watched]


Compile: TypeAlias = Callable[[Any], Any]
"""Compiles a module or a function for a side. Returns a callable with its signature: itself, on sides that take the
whole step. A function without arguments is an update, which ``make_graphed_callables`` has no use for."""

Build: TypeAlias = Callable[[Compile, str], Step]
"""Makes models and inputs on a device (``cuda`` or ``cpu``), compiles what a user would compile, and returns the step.

Seeded, so that every process builds the same. Everything but ``compile`` is equal on all sides.
"""


@dataclass(frozen=True)
class Workload:
    """A workload of the suite.

    ``name`` is kebab-case, with the batch size at the end where there are several; ``kind`` is ``inference``,
    ``training`` or ``decode``; ``domain`` is what a reader groups by (language, vision, …). ``about`` says in a
    sentence what it is and why it is here. ``calls`` is the length of a timed block. ``tolerance`` bounds how far
    results may be from eager's, relative to their largest magnitude, and ``why_tolerance`` says where that comes from.
    ``turns``: so many sizes of inputs take turns; results are then compared until each has come four times.
    ``random`` for steps that draw random numbers: results are then compared with Inductor drawing as eager does.
    ``whole_step`` where the whole step can be captured as it is, with ``torch.cuda.graph``. ``feeds_back`` where what
    was compiled gets results of an earlier step: ``reduce-overhead`` overwrites those, so that its users clone them,
    and so does that side. ``tiny`` builds the same program so small that a CPU runs it in a second or two. ``packages``
    are those to be installed besides torch, and ``imports`` modules that take long to import.
    """

    name: str
    kind: str
    domain: str
    about: str
    build: Build
    tiny: Build
    calls: int = 30
    tolerance: float = 1e-2
    why_tolerance: str = "half-precision sums in another order"
    turns: int = 1
    random: bool = False
    whole_step: bool = False
    feeds_back: bool = False
    packages: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
