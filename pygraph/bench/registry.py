"""Finding workloads by name, and what keeps one from running here. The workloads themselves are those of a suite.

A suite is a module with ``WORKLOADS``: a mapping from names, or a sequence, of workloads.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Mapping, Sequence

from pygraph.bench.workload import Workload

__all__ = ["SUITE", "chosen", "missing", "workloads"]

SUITE = "pygraph.bench.suite"


def workloads(suite: str = SUITE) -> dict[str, Workload]:
    """The workloads of ``suite`` by name. Raises ValueError where it is no suite, or two have one name."""
    try:
        found = importlib.import_module(suite or SUITE).WORKLOADS
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"'{suite}' is no suite: {error}") from error
    listed: Sequence[Workload] = tuple(found.values()) if isinstance(found, Mapping) else tuple(found)
    named = {workload.name: workload for workload in listed}
    if len(named) != len(listed):
        names = [workload.name for workload in listed]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"{suite}: two workloads are called {twice[0]}")
    return named


def chosen(names: Sequence[str], known: Mapping[str, Workload]) -> list[Workload]:
    """The workloads of these names, or all; a domain or kind stands for all that are of it. Raises ValueError."""
    found: dict[str, Workload] = {}
    for name in names or list(known):
        matches = [w for w in known.values() if name in (w.name, w.domain, w.kind)]
        if not matches:
            raise ValueError(f"no workload is called '{name}'{_nearest(name, known)}")
        found.update({workload.name: workload for workload in matches})
    return list(found.values())


def missing(workload: Workload) -> list[str]:
    """The packages that the workload needs and that are not installed."""
    return [name for name in workload.packages if importlib.util.find_spec(name) is None]


def _nearest(name: str, known: Mapping[str, Workload]) -> str:
    words = [*known, *dict.fromkeys(w.domain for w in known.values())]
    near = difflib.get_close_matches(name, words, n=1, cutoff=0.4)
    return f"; did you mean '{near[0]}'?" if near else f"; there are {', '.join(known)}"
