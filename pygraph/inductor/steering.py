"""Answers Inductor's scheduler while it compiles: where to cut, in which order, and notes what it made of it.

The hooks into the scheduler are in ``pygraph.compat``; they ask the steering that is active on their thread, if any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pygraph.frontend.names import op_name
from pygraph.inductor import scheduler
from pygraph.inductor.decision import BARRIER, RNG, Decision
from pygraph.inductor.lineage import Lineage, following
from pygraph.inductor.record import Made, ProgramRecord, RecordedMaps, Step
from pygraph.ir import CONSTANT
from pygraph.passes.partitioning import NO_LAUNCH
from pygraph.passes.region_order import count_runs, fewest_runs

__all__ = ["Steering"]

UNKNOWN = "unknown-node"

Judge = Callable[[Any], Mapping[str, str | None]]
"""Given the FX graph that Inductor lowers, the reason of each node by name (None: capturable)."""


class Steering:
    """One compilation under a decision. ``judge`` is asked about nodes that Inductor's own passes made."""

    def __init__(self, decision: Decision, judge: Judge) -> None:
        self.decision = decision
        self._judge = judge
        self._judged: dict[Any, Mapping[str, str | None]] = {}
        self._reasons: dict[str, str | None] = {}
        self._lineage = Lineage()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Steer every main graph that Inductor schedules on this thread meanwhile."""
        scheduler.install_scheduler_hooks()
        with scheduler.scheduler_listener(self), following() as self._lineage:
            yield

    # -- asked by the scheduler ------------------------------------------------------------------------------------

    def should_partition(self, snode: Any) -> str | None:
        """The reason why a scheduled node has to stay outside of every region, or None."""
        for part in scheduler.scheduled_parts(snode):
            name = part.get_name()
            if name not in self._reasons:
                self._reasons[name] = self._reason(part)
            if self._reasons[name] is not None:
                return self._reasons[name]
        return None

    def reorder(self, snodes: list[Any]) -> list[Any]:
        """An order with fewer regions, when there is one that Inductor's own memory estimate does not forbid."""
        inside = [self.should_partition(snode) is None for snode in snodes]
        order = fewest_runs(inside, self._predecessors(snodes))
        if count_runs([inside[i] for i in order]) >= count_runs(inside):
            return snodes
        chosen = [snodes[i] for i in order]
        return chosen if scheduler.memory_allows(snodes, chosen) else snodes

    def record(self, partitions: Sequence[Sequence[Any]], outside: Sequence[bool], maps: list[Any]) -> RecordedMaps:
        """Inductor's partition maps, with what each partition holds."""
        runs = tuple(tuple(self._step(snode) for snode in run) for run in partitions)
        return RecordedMaps(maps, ProgramRecord(runs, tuple(not skip for skip in outside)))

    # -- order -----------------------------------------------------------------------------------------------------

    def _predecessors(self, snodes: list[Any]) -> list[list[int]]:
        """Those that the scheduler knows, and those of effects, which it leaves to the order that it starts from."""
        before = scheduler.scheduler_predecessors(snodes)
        last: dict[str, int] = {}
        since: list[int] = []
        for i, snode in enumerate(snodes):
            chains = self._chains(snode)
            before[i] += [last[chain] for chain in (*chains, BARRIER) if chain in last]
            if BARRIER in chains:
                before[i] += since
                since.clear()
            since.append(i)
            last.update(dict.fromkeys(chains, i))
        return before

    def _chains(self, snode: Any) -> list[str]:
        """The orders besides data that a scheduled node is part of."""
        found: dict[str, None] = {}
        for part in scheduler.scheduled_parts(snode):
            for origin in scheduler.origins(part):
                placed = self.decision.nodes.get(origin.name)
                found.update(dict.fromkeys((RNG,) * scheduler.draws(origin) if placed is None else placed.chains))
        return list(found)

    # -- reasons ---------------------------------------------------------------------------------------------------

    def _reason(self, part: Any) -> str | None:
        structural = scheduler.uncapturable_structure(part, self.decision.device)
        if structural is not None:
            return structural
        for origin in scheduler.origins(part):
            reason = self._origin_reason(origin)
            if reason is not None:
                return reason
        return None

    def _origin_reason(self, origin: Any) -> str | None:
        if origin.op in ("placeholder", "get_attr", "output"):
            return None
        if self._is_made(origin):
            return self._made_reason(origin)
        placed = self.decision.nodes.get(origin.name)
        if placed is not None:
            return placed.reason
        return self._origin_reason(origin.args[0]) if scheduler.is_tuple_getitem(origin) else UNKNOWN

    def _made_reason(self, origin: Any) -> str | None:
        """A node that Inductor made is outside for any reason that what it was made from is outside for, or its own."""
        sources = self._sources(origin)
        reasons = [self.decision.nodes[name].reason for name in sources] or [UNKNOWN]
        inherited = next((reason for reason in reasons if reason not in (None, NO_LAUNCH)), None)
        if inherited is not None or scheduler.is_lowering(origin):
            return inherited
        if origin.graph not in self._judged:
            self._judged[origin.graph] = self._judge(origin.graph)
        return self._judged[origin.graph].get(origin.name, UNKNOWN)

    def _is_made(self, origin: Any) -> bool:
        return self._lineage.sources(origin) is not None

    def _sources(self, origin: Any) -> tuple[str, ...]:
        """The nodes of the decision that a node was made from; constants launch nothing and decide nothing."""
        found = map(scheduler.indexed, self._lineage.sources(origin) or ())
        known = [(node.name, self.decision.nodes.get(node.name)) for node in found]
        return tuple(dict.fromkeys(name for name, placed in known if placed is not None and placed.op != CONSTANT))

    def _step(self, snode: Any) -> Step:
        parts = scheduler.scheduled_parts(snode)
        nodes = {o.name: o for part in parts for o in scheduler.origins(part)}
        made = [node for node in nodes.values() if node.op == "call_function" and self._is_made(node)]
        return Step(
            buffers=tuple(snode.get_buffer_names()),
            origins=tuple(nodes),
            launches=any(scheduler.launches(part) for part in parts),
            reason=self.should_partition(snode),
            made=tuple(Made(n.name, op_name(n.target), self._sources(n), self._made_reason(n)) for n in made),
        )
