"""The sides of a benchmark: ways of compiling one program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pygraph.passes.pipeline import nearest

REFERENCE = "eager"
"""The side whose results are the reference."""
OURS = "pygraph"
"""The side with which all others are compared in time and memory."""
PROGRAM_ORDER = "program-order"
"""PyGraph with replays in program order."""
MEASURED_COLLECTIVES = "measured-collectives"
"""PyGraph with captured collectives, once all ranks have measured that this is no slower."""
UNCAPTURED = "uncaptured"
"""PyGraph's program without regions: for profiles, not a side of a benchmark."""
BASELINES = ("default", "reduce-overhead")
"""Sides that torch.compile offers without PyGraph."""


@dataclass(frozen=True)
class Side:
    """A way of compiling. ``arguments`` returns the arguments of torch.compile; None: do not compile. ``cuda``: it
    needs a GPU. ``asked``: it is measured only if the user names it."""

    name: str
    arguments: Callable[[], Mapping[str, Any]] | None = None
    cuda: bool = False
    asked: bool = False


def _ours(**options: Any) -> Mapping[str, Any]:
    """PyGraph's arguments. Each benchmark decides anew, without the decisions of earlier processes."""
    from pygraph.backend import pygraph  # the function itself: the entry point may not be installed

    return {"backend": pygraph, "options": {"cache_dir": None, **options}}


def _uncaptured() -> Mapping[str, Any]:
    """PyGraph's arguments, with a pipeline that plans no region."""
    from pygraph.passes.partitioning import Partitioning
    from pygraph.passes.pipeline import parse_pipeline
    from pygraph.settings import Settings

    passes = parse_pipeline(Settings.make({}).pipeline)
    none = [replace(each, max_regions=0) if isinstance(each, Partitioning) else each for each in passes]
    return _ours(passes=none)


SIDES: dict[str, Side] = {
    side.name: side
    for side in (
        Side(REFERENCE),
        Side("default", dict),
        Side("reduce-overhead", lambda: {"mode": "reduce-overhead"}, True),
        Side(PROGRAM_ORDER, partial(_ours, order="program"), True, asked=True),
        Side(MEASURED_COLLECTIVES, partial(_ours, collectives="measured"), True, asked=True),
        Side(OURS, _ours),
    )
}
"""The sides of any program, by name, in the order of display."""


def sides_for(names: Sequence[str], device: str, known: Mapping[str, Side] = SIDES) -> tuple[str, ...]:
    """The requested sides of ``known`` (default: all except ``asked`` ones) that run on ``device``, and the reference.

    Raises ValueError for a name that is unknown, or that needs another device.
    """
    for name in names:
        if name not in known:
            raise ValueError(f"no side is called '{name}'{nearest(name, known)}")
        if known[name].cuda and device != "cuda":
            raise ValueError(f"the side '{name}' needs a GPU")
    wanted = {*(names or (name for name, side in known.items() if not side.asked)), REFERENCE}
    return tuple(name for name, side in known.items() if name in wanted and (device == "cuda" or not side.cuda))


def compile_as(name: str, target: Any, compile: Callable[..., Any] | None = None, **given: Any) -> Any:
    """``target`` compiled as the side ``name`` does. ``given`` are the program's own arguments of torch.compile.

    ``compile`` is the original torch.compile, if its name is patched.
    """
    import torch

    arguments = _uncaptured if name == UNCAPTURED else SIDES[name].arguments
    return target if arguments is None else (compile or torch.compile)(target, **{**given, **arguments()})
