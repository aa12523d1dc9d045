"""The sides of a benchmark: ways of compiling one program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pygraph.passes.pipeline import nearest

REFERENCE = "eager"
"""The side whose results are right."""
OURS = "pygraph"
"""The side that every other one is compared with in time and memory."""
PROGRAM_ORDER = "program-order"
"""PyGraph whose replays keep the program's order of launches."""
MEASURED_COLLECTIVES = "measured-collectives"
"""PyGraph with collectives captured, once all ranks have measured that no slower."""
UNCAPTURED = "uncaptured"
"""PyGraph's program without any region: for profiles, and no side of a benchmark."""
BASELINES = ("default", "reduce-overhead")
"""The sides that a user has without PyGraph by an argument of torch.compile."""


@dataclass(frozen=True)
class Side:
    """``arguments`` returns those of torch.compile; None: it does not compile. ``cuda``: it needs a GPU. ``asked``: it
    is measured only where it is named."""

    name: str
    arguments: Callable[[], Mapping[str, Any]] | None = None
    cuda: bool = False
    asked: bool = False


def _ours(**options: Any) -> Mapping[str, Any]:
    """Decisions of earlier processes are not used: each benchmark decides anew."""
    from pygraph.backend import pygraph  # the function itself: the entry point may not be installed

    return {"backend": pygraph, "options": {"cache_dir": None, **options}}


def _uncaptured() -> Mapping[str, Any]:
    """As ours, and no region is planned."""
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
"""The sides that any program has, by name, in the order in which they are shown."""


def sides_for(names: Sequence[str], device: str, known: Mapping[str, Side] = SIDES) -> tuple[str, ...]:
    """The sides of ``known`` that are asked for (all but ``asked`` ones, if none is named) and that ``device`` has, the
    reference too.

    Raises ValueError for a name that is not known, or that needs another device.
    """
    for name in names:
        if name not in known:
            raise ValueError(f"no side is called '{name}'{nearest(name, known)}")
        if known[name].cuda and device != "cuda":
            raise ValueError(f"the side '{name}' needs a GPU")
    wanted = {*(names or (name for name, side in known.items() if not side.asked)), REFERENCE}
    return tuple(name for name, side in known.items() if name in wanted and (device == "cuda" or not side.cuda))


def compile_as(name: str, target: Any, compile: Callable[..., Any] | None = None, **given: Any) -> Any:
    """``target`` compiled in a side's way. ``given`` are arguments of torch.compile that the program itself has.

    ``compile`` is torch.compile, where something else goes by its name.
    """
    import torch

    arguments = _uncaptured if name == UNCAPTURED else SIDES[name].arguments
    return target if arguments is None else (compile or torch.compile)(target, **{**given, **arguments()})
