"""Workloads: programs that make a step, given a function that compiles.

Workloads define the code to run, and the values that must be equal. ``sides`` compiles it; ``pygraph.bench`` times it.
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
    """A step that trains. ``step`` is the user's whole step, for ``pygraph.train_step`` and for captures by hand.

    ``watched`` must also be equal after each step. A call of a ``Training`` returns both; timed calls are only those
    of ``step``.
    """

    step: Step
    watched: Sequence[torch.Tensor]

    def __call__(self) -> list[Any]:
        return [self.step(), *self.watched]


Compile: TypeAlias = Callable[[Any], Any]
"""Compiles a module or a function for a side. Returns a callable with its signature: itself, on sides that take the
whole step. A function without arguments is an update, which ``make_graphed_callables`` cannot capture."""

Build: TypeAlias = Callable[[Compile, str], Step]
"""Makes models and inputs on a device (``cuda`` or ``cpu``), compiles what a user would compile, and returns the step.

Seeded, so that every process builds the same. Everything but ``compile`` is equal on all sides.
"""


@dataclass(frozen=True)
class Workload:
    """A workload of the suite.

    ``name`` is kebab-case, with the batch size at the end if there are several; ``kind`` is ``inference``,
    ``training`` or ``decode``; ``domain`` groups workloads (language, vision, …). ``about`` describes it in one
    sentence, with the reason for its choice. ``calls`` is the length of a timed block. ``tolerance`` bounds the
    difference of results from eager's, relative to their largest magnitude; ``why_tolerance`` is its source.
    ``turns``: number of input sizes that alternate; results are then compared until each has come four times.
    ``random``: the step draws random numbers; results are then compared with Inductor drawing as eager does.
    ``whole_step``: ``torch.cuda.graph`` can capture the whole step unchanged. ``feeds_back``: compiled code gets
    results of an earlier step: ``reduce-overhead`` overwrites these, so that its users clone them, and so does that
    side. ``tiny`` builds the program so small that a CPU runs it in a second or two. ``packages`` are needed in
    addition to torch, and ``imports`` are modules that take long to import.
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
