"""PyGraph: a compiler pass framework that deploys CUDA Graphs in PyTorch programs.

Most programs need only ``torch.compile(model, backend="pygraph")``. The names below capture other code, prepare sizes
and report results. They are loaded at first use, so tools that only read IR do not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pygraph.version import __version__

if TYPE_CHECKING:
    from pygraph.api import Explanation, counters, explain, region_counters, reports, reset
    from pygraph.graphs import graph, loop
    from pygraph.passes.base import Pass, PassContext, PassResult
    from pygraph.passes.pipeline import register
    from pygraph.preparation import Prepared, SizeMemory, prepare
    from pygraph.runtime.events import Event, on_event
    from pygraph.runtime.live import release, retry
    from pygraph.session import Session
    from pygraph.training.step import train_step

__all__ = [
    "Event",
    "Explanation",
    "Pass",
    "PassContext",
    "PassResult",
    "Prepared",
    "Session",
    "SizeMemory",
    "__version__",
    "counters",
    "explain",
    "graph",
    "loop",
    "on_event",
    "prepare",
    "region_counters",
    "register",
    "release",
    "reports",
    "reset",
    "retry",
    "train_step",
]

_HOMES = {
    **dict.fromkeys(("Explanation", "counters", "explain", "region_counters", "reports", "reset"), "pygraph.api"),
    **dict.fromkeys(("graph", "loop"), "pygraph.graphs"),
    **dict.fromkeys(("Pass", "PassContext", "PassResult"), "pygraph.passes.base"),
    **dict.fromkeys(("Prepared", "SizeMemory", "prepare"), "pygraph.preparation"),
    "register": "pygraph.passes.pipeline",
    **dict.fromkeys(("Event", "on_event"), "pygraph.runtime.events"),
    **dict.fromkeys(("release", "retry"), "pygraph.runtime.live"),
    "Session": "pygraph.session",
    "train_step": "pygraph.training.step",
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pygraph' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
