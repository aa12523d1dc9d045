"""Operators that captures failed for, remembered for the next compilation of their program.

    a call:                the capture fails at %double ─ the call runs uncaptured ─ %double is written down
    the next compilation:  lift ─ %double is marked ─ legality: failed-capture ─ the program is cut at %double

Nothing is compiled inside of a user's call. A program is known by its operators and the lines that they come from,
whatever its sizes; a file for each program under the cache directory has its operators by name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pygraph import cache, compat
from pygraph.runtime.provenance import Refusal
from pygraph.settings import Settings
from pygraph.version import PACKAGE, package_digest

if TYPE_CHECKING:  # a restored program runs no passes
    from pygraph.inductor.decision import Decision
    from pygraph.inductor.emitted import ProgramRecord
    from pygraph.ir import Graph

__all__ = ["CaptureFailures", "program_rows"]

_log = logging.getLogger("pygraph")

_OF_THE_CODE = frozenset(
    {"capture-failed", "host-memcpy", "host-memory", "host-random", "host-read", "uncaptured-work"}
)
"""Reasons that lie in what an operator does, and not in what one call of it is given."""

_in_process: dict[str, dict[str, dict[str, str]]] = {}
"""What is remembered where nothing is kept on disk."""


class CaptureFailures:
    """What captures of the graphs of one program failed for: kind of graph ▸ operator by name ▸ what was met.

    ``rows`` tell the program from others (``program_rows``), ``devices`` the kinds that it computes on. Nothing is
    known under the option ``strict``, so that everything is tried.
    """

    def __init__(self, rows: Iterable[str], devices: Collection[str], settings: Settings) -> None:
        machine = torch.cuda.get_device_name() if "cuda" in devices else ""
        parts = (package_digest(PACKAGE), torch.__version__, machine, *sorted(devices), *rows)
        self._key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:40]
        self._path: Path | None = None
        if settings.cache_dir is not None:
            with contextlib.suppress(OSError):  # where there is no temporary folder either
                self._path = cache.usable(settings.cache_dir) / "failures" / f"{self._key}.json"
        self._known = {} if settings.strict else self._read()

    def digest(self) -> str:
        """A hash of what is known, for cache keys; nothing where nothing failed."""
        names = {kind: sorted(known) for kind, known in self._known.items()}
        return hashlib.sha256(json.dumps(names, sort_keys=True).encode()).hexdigest() if names else ""

    def mark(self, graph: Graph, kind: str) -> list[str]:
        """Note on the operators of ``graph`` what was met. Returns a note on those for the report."""
        from pygraph.passes.legality.rules import FAILED

        known = self._known.get(kind, {})
        marked = [node for node in graph.nodes if node.name in known]
        for node in marked:
            node.meta.set(FAILED, known[node.name])
        where = f" ({self._path})" if self._path is not None else ""
        return [f"left outside, since an earlier capture failed{where}: {node.op}" for node in marked]

    def add(self, kind: str, refusal: Refusal, decision: Decision, record: ProgramRecord) -> list[str]:
        """Remember the operators that ``refusal`` names, and all calls of one that fails wherever it is called: a model
        may have one in each layer.

        Of an operator that Inductor's passes made, it is those that it was made from. Returns what is new, by name.
        """
        from pygraph.passes.legality.operators import is_custom

        made = {one.name: one for run in record.runs for step in run for one in step.made}
        names = list(refusal.nodes)
        if refusal.launch is not None and (refusal.reason in _OF_THE_CODE or is_custom(refusal.launch)):
            names += [name for name, placed in decision.nodes.items() if placed.op == refusal.launch]
            names += [one.name for one in made.values() if one.op == refusal.launch]
        sources = [source for name in names for source in (made[name].sources if name in made else (name,))]
        known = self._known.setdefault(kind, {})
        new = [name for name in dict.fromkeys(sources) if name in decision.nodes and name not in known]
        known.update(dict.fromkeys(new, f"{refusal.reason}: {refusal.detail}" if refusal.detail else refusal.reason))
        if new:
            self._write()
        return new

    def _read(self) -> dict[str, dict[str, str]]:
        found = _in_process.get(self._key) if self._path is None else cache.read_json(self._path)
        known: dict[str, dict[str, str]] = {}
        for kind, rows in found.items() if isinstance(found, dict) else ():  # a file may hold anything
            pairs = rows.items() if isinstance(rows, dict) else ()
            known[kind] = {name: met for name, met in pairs if isinstance(met, str)}
        return known

    def _write(self) -> None:
        if self._path is None:
            _in_process[self._key] = self._known
            return
        try:
            cache.write_atomically(self._path, json.dumps(self._known, indent=1) + "\n")
        except (OSError, ValueError) as error:  # a ValueError where text cannot be encoded
            _log.warning("a failed capture is not remembered in %s: %s", self._path, error)


def program_rows(gm: torch.fx.GraphModule) -> list[str]:
    """What tells a graph of Dynamo's from others, besides sizes: its operators, the user's lines and modules, and what
    operators that do not come with torch say of themselves."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, torch.fx.GraphModule)]
    return [_row(node) for graph in graphs for node in graph.nodes if node.op != "placeholder"]


def _row(node: torch.fx.Node) -> str:
    modules = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return f"{node.name}{_operator(node.target)} {node.meta.get('stack_trace')} {modules}"


def _operator(target: Any) -> str:
    if isinstance(target, compat.OpOverloadPacket):
        return "".join(_operator(getattr(target, name)) for name in target.overloads())
    if not isinstance(target, compat.OpOverload) or target.namespace in ("aten", "prims"):
        return f" {target if isinstance(target, str) else getattr(target, '__name__', '')}"
    return f" {target._schema} {sorted(map(str, target.tags))}"
