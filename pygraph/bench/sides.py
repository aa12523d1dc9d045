"""The sides of a benchmark: ways of compiling one program, PyGraph with a mechanism off among them.

What runs is a workload's or a script's business, how it is timed ``serving``'s.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pygraph.bench.workload import Step

__all__ = [
    "ABLATIONS",
    "BASELINES",
    "OURS",
    "REFERENCE",
    "SIDES",
    "Side",
    "cloning",
    "compile_as",
    "measures",
    "sides_for",
    "step_as",
]

REFERENCE = "eager"
"""The side whose results are right."""

OURS = "pygraph"
"""The side that every other one is compared with in time and memory."""

BASELINES = ("default", "reduce-overhead")
"""The sides that a user has without PyGraph by an argument of torch.compile."""


@dataclass(frozen=True)
class Side:
    """``about`` says what it is, for readers. ``arguments`` are those of torch.compile, None where it is not used.

    ``cuda``: it needs a GPU. ``caches``: it compiles, so that caches on disk are worth filling ahead. ``off`` is the
    mechanism that an ablation is without. ``whole``: for steps that can be captured as a whole.
    """

    name: str
    about: str
    arguments: Callable[[], Mapping[str, Any]] | None = None
    cuda: bool = False
    off: str = ""
    whole: bool = False

    @property
    def caches(self) -> bool:
        """Whether compiling ahead is worth while."""
        return self.arguments is not None

    @property
    def ours(self) -> bool:
        """Whether PyGraph compiles it."""
        return self.name == OURS or bool(self.off)


@dataclass(frozen=True)
class _Ours:
    """Arguments of torch.compile for PyGraph: ``options``, and passes that take the place of others (by name).

    What earlier processes decided is not used: each benchmark decides anew.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)

    def __call__(self) -> Mapping[str, Any]:
        from pygraph.backend import pygraph  # the function itself: the entry point may not be installed

        options: dict[str, Any] = {"cache_dir": None, **self.options}
        if self.instead:
            options["passes"] = self._pipeline()
        return {"backend": pygraph, "options": options}

    def _pipeline(self) -> Sequence[Any]:
        """The default pipeline with what is to be replaced replaced; a pass with nothing in its place is left out."""
        from pygraph.bench.ablation_passes import InProgramOrder, NothingPlaced
        from pygraph.passes.manager import DEFAULT_PIPELINE, resolve

        own = {each.name: each for each in (InProgramOrder(), NothingPlaced())}
        found: list[Any] = []
        for item in resolve(DEFAULT_PIPELINE):
            other = self.instead.get(item.name, None)
            if other is None:
                found.append(item)
            elif other:
                found.append(own.get(other, other))
        return found


_ALL = (
    Side(REFERENCE, "PyTorch without a compiler"),
    Side("default", "torch.compile as it comes", dict),
    Side("reduce-overhead", 'mode="reduce-overhead": CUDA Graph Trees', lambda: {"mode": "reduce-overhead"}, cuda=True),
    Side("make-graphed-callables", "the module under torch.cuda.make_graphed_callables", cuda=True),
    Side("whole-step", "the step captured by hand with torch.cuda.graph", cuda=True, whole=True),
    Side(OURS, "backend=pygraph", _Ours()),
)
_WITHOUT = (
    Side(
        "pygraph-uncaptured",
        "all of PyGraph, but nothing is captured",
        _Ours(instead={"partitioning": "partitioning{max-regions=0}"}),
        off="capture",
    ),
    Side(
        "pygraph-no-placement",
        "CPU values stay where they are, and cut the program",
        _Ours(instead={"placement": "nothing-placed"}),
        off="placement",
    ),
    Side(
        "pygraph-no-reordering",
        "regions are what is capturable in a row, in program order",
        _Ours(instead={"partitioning": "in-program-order"}),
        off="reordering",
    ),
    Side(
        "pygraph-no-model",
        "every region is captured, whatever the model says",
        _Ours(instead={"selection": ""}),
        off="the model's selection",
    ),
    Side(
        "pygraph-no-measuring",
        "what is captured is replayed, without being measured",
        _Ours({"measure": False}),
        off="measured selection",
    ),
)

SIDES: dict[str, Side] = {side.name: side for side in (*_ALL, *_WITHOUT)}
"""Every side by name, in the order in which they are shown."""

ABLATIONS: tuple[str, ...] = tuple(side.name for side in _WITHOUT)
"""The sides that are PyGraph with a mechanism off."""


def sides_for(names: Sequence[str], device: str, ablations: bool) -> tuple[str, ...]:
    """The sides asked for (all that are no ablation, if none is named) that ``device`` has, the reference among them.

    Raises ValueError for a name that is not known, or that needs another device.
    """
    for name in names:
        if name not in SIDES:
            near = difflib.get_close_matches(name, SIDES, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(SIDES)}"
            raise ValueError(f"no side is called '{name}'; {hint}")
        if SIDES[name].cuda and device != "cuda":
            raise ValueError(f"the side '{name}' needs a GPU")
    wanted = set(names or [side.name for side in _ALL]) | {REFERENCE}
    if ablations:
        wanted |= set(ABLATIONS)
        if not measures(OURS):
            wanted -= {"pygraph-no-measuring"} - set(names)
    return tuple(name for name, side in SIDES.items() if name in wanted and (device == "cuda" or not side.cuda))


def measures(name: str) -> bool:
    """Whether a side's regions try, in its real calls, what pays."""
    from pygraph.settings import Settings

    side = SIDES[name]
    if not side.ours or side.arguments is None:
        return False
    return Settings.make(side.arguments()["options"]).measure


def compile_as(name: str, target: Any, compile: Callable[..., Any] | None = None, **given: Any) -> Any:
    """``target`` compiled in a side's way. ``given`` are arguments of torch.compile that the program itself has.

    ``compile`` is torch.compile, where something else goes by its name.
    """
    import torch

    from pygraph.bench.graphed import GraphedModule

    side = SIDES[name]
    if name == "make-graphed-callables":
        return GraphedModule(target)
    if side.arguments is None:
        return target
    return (compile or torch.compile)(target, **{**given, **side.arguments()})


def cloning(target: Callable[..., Any]) -> Callable[..., Any]:
    """``target``, with every tensor cloned that it returns, in tuples and lists too."""

    def cloned(*args: Any, **more: Any) -> Any:
        return _cloned(target(*args, **more))

    return cloned


def _cloned(result: Any) -> Any:
    import torch

    if isinstance(result, torch.Tensor):
        return result.clone()
    return type(result)(map(_cloned, result)) if isinstance(result, (tuple, list)) else result


def step_as(name: str, step: Step) -> Step:
    """``step`` as a side runs it.

    ``reduce-overhead`` wants to be told where a step begins; that costs well below 1 µs, and is part of the mode.
    """
    if name == "whole-step":
        from pygraph.bench.graphed import WholeStep

        return WholeStep(step)
    if name != "reduce-overhead":
        return step
    import torch

    begin: Callable[[], None] = torch.compiler.cudagraph_mark_step_begin

    def marked() -> Any:
        begin()
        return step()

    return marked
