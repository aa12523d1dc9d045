"""Steers Inductor's lowering and scheduler: where to cut the program, in which order; and records the result.

    can_fuse(a, b)  ─┬─ hooks active on this thread: _fuse(hooks, can_fuse, scheduler, a, b)
                     └─ none:                         can_fuse(scheduler, a, b), as ever

``REPLACEMENTS`` lists the replaced methods of Inductor, their replacements, and the purpose of each.

If a user's pass drew the regions, the partitions are exactly these. Otherwise only nodes outside of regions cut the
program, and Inductor fuses and orders across the bounds of regions, which partitioning chose among independent nodes.
Answers differ from Inductor's own only while hooks are active on the thread, and only for main graphs.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby
from typing import Any, NamedTuple

import networkx as nx
import torch

from pygraph import compat
from pygraph.frontend.effects import DRAWS, tags_of
from pygraph.frontend.lift import lift
from pygraph.frontend.names import op_name
from pygraph.inductor.decision import BARRIER, RNG, Decision, Placed
from pygraph.inductor.emitted import PatternNode, ProgramRecord, RecordedMaps, Step
from pygraph.inductor.lineage import Lineage, following
from pygraph.inductor.rewrites import SENT_EARLY
from pygraph.ir import CAPTURABLE, CONSTANT, EAGER, REASON, base_name
from pygraph.passes.base import PassContext
from pygraph.passes.legality import Legality
from pygraph.passes.region_order import Kind, Time, fewest_runs, runs, settle
from pygraph.program.recording import DRAWS_IF_CALLED, WAIT
from pygraph.runtime.control import MODULE

UNKNOWN = "unknown-node"

SEVERAL_STREAMS = "a program that uses several streams is cut where Inductor has it, and not at the bounds of regions"

MEMORY_BUDGET = 1.1
"""Factor by which a new order may raise Inductor's estimate of peak memory; Inductor itself uses this bound."""


class Verdict(NamedTuple):
    """``reason``: why a node has to stay outside of every region, if so. ``eager``: why a region calls the node between
    two segments, if it cannot capture it."""

    reason: str | None = None
    eager: str | None = None


def _joined(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict on several nodes that run as one."""
    found = list(verdicts)
    reason = next((verdict.reason for verdict in found if verdict.reason is not None), None)
    return Verdict(reason, next((verdict.eager for verdict in found if verdict.eager is not None), None))


class PartitionHooks:
    """One compilation under a decision. ``legality`` judges the nodes that Inductor's own passes made."""

    def __init__(self, decision: Decision, legality: Legality) -> None:
        self.decision = decision
        self.legality = legality
        self._judged: dict[Any, Mapping[str, Verdict]] = {}
        self._verdicts: dict[str, Verdict] = {}
        self._trimmed: dict[str, str] = {}
        self._turns: dict[str, int | None] = {}
        self._computed_again: dict[str, bool | None] = {}
        self._computing_again: dict[Any, bool] = {}
        self._times: dict[str, Time] = {}
        self._followed: dict[str, str] = {}
        self._lineage = Lineage()
        self._region_of = {placed.turn: placed.region for placed in decision.nodes.values()}

    @contextmanager
    def active(self, rewrite: Callable[[torch.fx.GraphModule], None] | None = None) -> Iterator[None]:
        """Steer every main graph that Inductor schedules on this thread meanwhile. ``rewrite`` runs after Inductor's
        own graph passes."""
        _install()
        token = _active.set(self)
        try:
            with following(rewrite, self._may_match) as self._lineage:
                yield
        finally:
            _active.reset(token)

    # -- asked by the scheduler ------------------------------------------------------------------------------------

    def should_partition(self, snode: Any) -> str | None:
        """Why a scheduled node has to stay outside of every region, or None."""
        parts = _scheduled_parts(snode)
        trimmed = next((self._trimmed[part.get_name()] for part in parts if part.get_name() in self._trimmed), None)
        return trimmed or self._verdict(parts).reason

    def is_outside(self, node: Any) -> bool:
        """True if a scheduled operation of a main graph stays outside of every region."""
        return self._verdicts.get(node.get_name(), Verdict()).reason is not None

    def _verdict(self, parts: Sequence[Any]) -> Verdict:
        for part in parts:
            if part.get_name() not in self._verdicts:
                self._verdicts[part.get_name()] = self._judge_part(part)
        return _joined(self._verdicts[part.get_name()] for part in parts)

    def _kind(self, snode: Any) -> Kind:
        verdict = self._verdict(_scheduled_parts(snode))
        return Kind.OUTSIDE if verdict.reason else Kind.EAGER if verdict.eager else Kind.LAUNCHES

    def arrange(self, snodes: list[Any]) -> list[Any]:
        """Scheduled nodes in the order of the program."""
        if not self.decision.exact:
            return self.wait_late(self.reorder(self.compute_again_late(snodes)))
        snodes = self.wait_late(snodes)
        before = self._predecessors(snodes)
        wanted = list(map(self._turn, snodes))
        times = settle(wanted, list(map(self._unit, snodes)), before)
        for snode, turn, time, sources in zip(snodes, wanted, times, before, strict=True):
            self._times[snode.get_name()] = time
            if sources and time[:2] > (turn or 0, 0):
                latest = snodes[max(sources, key=lambda p: times[p][:2])]
                self._followed[snode.get_name()] = _names(latest)
        order = sorted(range(len(snodes)), key=lambda v: (*times[v][:2], -1 if times[v][2] is None else times[v][2], v))
        return [snodes[v] for v in order]

    def cut(self, snodes: Sequence[Any]) -> list[list[Any]] | None:
        """The partitions in order, if regions are exact; None if Inductor cuts at nodes outside of regions."""
        if not self._times:
            self._trim(snodes)
            return None
        return [list(run) for _, run in groupby(snodes, lambda snode: self._times[snode.get_name()])]

    def reorder(self, snodes: list[Any]) -> list[Any]:
        """An order with fewer regions, if there is one that Inductor's memory estimate permits; else ``snodes``."""
        kinds = [self._kind(snode) for snode in snodes]
        order = fewest_runs(kinds, self._predecessors(snodes))
        if len(runs([kinds[i] for i in order])) >= len(runs(kinds)):
            return snodes
        chosen = [snodes[i] for i in order]
        return chosen if _memory_allows(snodes, chosen) else snodes

    def compute_again_late(self, snodes: list[Any]) -> list[Any]:
        """An order with less memory for a graph that recomputes parts: the order of lowering, with each part just
        before its backward pass, but nodes that free memory, such as parameter updates, run as early as possible.
        ``snodes`` if that takes no less. Inductor's own memory orders recompute all parts at once."""
        if not self._any_again() or any(map(compat.absent, (compat.prepare_planning_info, compat.memory_timeline))):
            return snodes
        before = self._predecessors(snodes)
        order: nx.DiGraph[int] = nx.DiGraph((source, step) for step, found in enumerate(before) for source in found)
        order.add_nodes_from(range(len(snodes)))

        def listed(early: Collection[int] = ()) -> list[int]:
            keys = [(step not in early, snode.min_order) for step, snode in enumerate(snodes)]
            return list(nx.lexicographical_topological_sort(order, keys.__getitem__))

        _, freeable, outputs = _planning(snodes)
        lowered = listed()
        growth, _ = _growth([snodes[step] for step in lowered], freeable, outputs)
        chosen = [snodes[step] for step in listed({s for s, n in zip(lowered, growth, strict=True) if n <= 0})]
        (_, peak), (_, lower) = (_growth(each, freeable, outputs) for each in (snodes, chosen))
        return chosen if lower < peak else snodes

    def wait_late(self, snodes: list[Any]) -> list[Any]:
        """An order in which waits for collectives that were sent early, and all nodes that depend on them, come last;
        ``snodes`` if Inductor's memory estimate forbids it."""
        before = self._predecessors(snodes)
        waits = [_waits_for(snode) is not None for snode in snodes]
        late: set[int] = set()
        for step, (snode, sources) in enumerate(zip(snodes, before, strict=True)):
            early = waits[step] and _waits_for(snode).meta.get(SENT_EARLY)
            if early or not late.isdisjoint(sources):
                late.add(step)
        if not late:
            return snodes
        place = [len(snodes) if wait else step for step, wait in enumerate(waits)]  # a wait: its first user's
        for step, sources in reversed(list(enumerate(before))):
            for source in sources:
                place[source] = min(place[source], place[step]) if waits[source] else source
        order = sorted(range(len(snodes)), key=lambda step: (step in late, place[step], step))
        chosen = [snodes[step] for step in order]
        return chosen if _memory_allows(snodes, chosen) else snodes

    def _trim(self, snodes: Sequence[Any]) -> None:
        """Leave eager calls outside that, in the final order, are not between the first and last launch of a region."""
        kinds = [self._kind(snode) for snode in snodes]
        between = {step for run in runs(kinds) for step in run}
        for step, (snode, kind) in enumerate(zip(snodes, kinds, strict=True)):
            if kind is Kind.EAGER and step not in between:
                parts = _scheduled_parts(snode)
                self._trimmed.update(
                    dict.fromkeys((part.get_name() for part in parts), self._verdict(parts).eager or "")
                )

    def is_inside(self, run: Sequence[Any]) -> bool:
        """True if a partition that ``cut`` made is a region."""
        return self._times[run[0].get_name()][2] is not None

    def record(self, partitions: Sequence[Sequence[Any]], inside: Sequence[bool]) -> ProgramRecord:
        """The steps of each partition, and their differences from the decision."""
        steps = tuple(tuple(map(self._step, run)) for run in partitions)
        if not self._times:
            differences = (SEVERAL_STREAMS,) if self.decision.exact and steps else ()
            return ProgramRecord(steps, tuple(inside), differences=differences)
        planned = tuple(self._times[run[0].get_name()][2] for run in partitions)
        return ProgramRecord(steps, tuple(inside), planned, tuple(self._differences(partitions, planned)))

    # -- regions that are exact ------------------------------------------------------------------------------------

    def may_fuse(self, one: Any, other: Any) -> bool:
        """True if two scheduled nodes may be fused: not across the bounds of exact regions; and never a node that a
        backward pass recomputes with one before it, or its value would be computed early and kept."""
        if self._any_again() and {self._again(one), self._again(other)} == {False, True}:
            return False
        if not self.decision.exact or None in (self._turn(one), self._turn(other)):
            return True
        return (self._turn(one), self._unit(one)) == (self._turn(other), self._unit(other))

    def _any_again(self) -> bool:
        """True if the graph that is being scheduled recomputes anything."""
        graph = compat.inductor_virtualized.graph.graph
        if graph not in self._computing_again:
            self._computing_again[graph] = any(map(compat.computed_again, graph.nodes))
        return self._computing_again[graph]

    def _again(self, snode: Any) -> bool | None:
        """True if a backward pass recomputes a scheduled node, False if the node comes before; None if unknown."""
        name = snode.get_name()
        if name not in self._computed_again:
            found = {compat.computed_again(origin) for part in _scheduled_parts(snode) for origin in _origins(part)}
            self._computed_again[name] = next((each for each in (True, False) if each in found), None)
        return self._computed_again[name]

    def realize(self, node: Any, value: Any) -> None:
        """Realize ``value``, the lowered form of an FX node, as a buffer of its own if any reader lies beyond the
        bounds of an exact region."""
        if not self.decision.exact or node.op != "call_function":
            return
        homes = ([p for _, p in self._homes(each)] for each in (node, *node.users) if each.op == "call_function")
        if len({max((p.turn for p in found if p.turn is not None), default=None) for found in homes}) > 1:
            for box in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(box, compat.TensorBox):
                    box.realize()

    def _may_match(self, nodes: Iterable[Any]) -> bool:
        """True if a pattern may replace FX nodes: not across the bounds of exact regions."""
        if not self.decision.exact:
            return True
        return len({placed.turn for node in nodes for _, placed in self._homes(node) if placed.launches}) < 2

    def _homes(self, origin: Any) -> list[tuple[str, Placed]]:
        """Names and places, in the decision, of an FX node or of the nodes from which it was made."""
        names = (_indexed(origin).name,) if self._lineage.sources(origin) is None else self._sources(origin)
        homes = [(name, self.decision.nodes[name]) for name in names if name in self.decision.nodes]
        return (
            [(name, replace(placed, launches=False)) for name, placed in homes] if _is_tuple_getitem(origin) else homes
        )

    def _turn(self, snode: Any) -> int | None:
        """The turn of a scheduled node: the latest turn of its nodes. None if it may run at any time."""
        name = snode.get_name()
        if name not in self._turns:
            homes = [p for part in _scheduled_parts(snode) for o in _origins(part) for _, p in self._homes(o)]
            placed = [p for p in homes if p.launches] or homes
            turns = (p.turn for p in placed if p.turn is not None)
            self._turns[name] = max(turns, default=0 if self.should_partition(snode) else None)
        return self._turns[name]

    def _unit(self, snode: Any) -> int | None:
        """The decided region of a scheduled node; None for the host."""
        return None if self.should_partition(snode) else self._region_of.get(self._turn(snode))

    def _differences(self, partitions: Sequence[Sequence[Any]], planned: Sequence[int | None]) -> Iterator[str]:
        """Differences of the program from the decision: regions in several parts, and nodes that run elsewhere."""
        seen: set[int] = set()
        strays: dict[str, str] = {}
        for run, region in zip(partitions, planned, strict=True):
            if region is not None and region in seen:
                followed = next(self._followed[name] for name in (s.get_name() for s in run) if name in self._followed)
                yield f"region {region} is cut before {_names(run[0])}, to run behind {followed}"
            seen.update(() if region is None else (region,))
            for snode in run:
                for name, text in self._strays(snode, region):
                    strays.setdefault(name, text)
        yield from strays.values()

    def _strays(self, snode: Any, region: int | None) -> Iterator[tuple[str, str]]:
        """Names of the nodes that a scheduled node computes elsewhere than decided, each with a note."""
        why = self.should_partition(snode) or ""
        if not why and snode.get_name() in self._followed:
            why = f"behind {self._followed[snode.get_name()]}"
        for origin in dict.fromkeys(origin for part in _scheduled_parts(snode) for origin in _origins(part)):
            for name, placed in self._homes(origin):
                if placed.launches and placed.region != region:
                    decided = "outside" if placed.region is None else f"for region {placed.region}"
                    found = "outside" if region is None else f"in region {region}"
                    part = "" if name == origin.name else f", as part of {origin.name}"
                    reason = f": {why}" if why else ""
                    yield name, f"{name} ({placed.op}) was decided {decided}, and runs {found}{part}{reason}"

    # -- order -----------------------------------------------------------------------------------------------------

    def _predecessors(self, snodes: list[Any]) -> list[list[int]]:
        """Predecessors by the scheduler's dependences, and by effects, which it leaves to its initial order."""
        maker = {name: i for i, snode in enumerate(snodes) for name in snode.get_buffer_names()}
        needed = ({maker[dep.name] for dep in snode.unmet_dependencies if dep.name in maker} for snode in snodes)
        before = [sorted(makers - {i}) for i, makers in enumerate(needed)]
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
        """The chains of a scheduled node. A wait for a collective has none: it concerns no other process."""
        found: dict[str, None] = {}
        if _waits_for(snode) is not None:
            return []
        for part in _scheduled_parts(snode):
            called = isinstance(_kernel(part.node), compat.ExternKernel)
            for origin in _origins(part):
                if called and base_name(op_name(origin.target)) in DRAWS_IF_CALLED:
                    found[RNG] = None
                placed = self.decision.nodes.get(origin.name)
                if placed is not None:
                    found.update(dict.fromkeys(placed.chains))
                    continue
                made_from = (self.decision.nodes[name].chains for name in self._sources(origin))
                found.update(dict.fromkeys((*chain.from_iterable(made_from), *(RNG,) * _draws(origin))))
        return list(found)

    # -- reasons ---------------------------------------------------------------------------------------------------

    def _judge_part(self, part: Any) -> Verdict:
        structural = _uncapturable_structure(part, self.decision.device)
        if structural is not None:
            return Verdict(structural)
        origins = _origins(part)
        launching = [origin for origin in origins if not self._is_free(origin)] or origins
        verdict = _joined(map(self._judge_origin, launching))
        if isinstance(_kernel(part.node), compat.ExternKernel) or verdict.reason:
            return verdict
        if all(map(_is_external, origins)):  # a copy that is made for an external kernel
            return Verdict()
        return Verdict(verdict.eager)  # it is part of a larger kernel

    def _judge_origin(self, origin: Any) -> Verdict:
        if origin.op in ("placeholder", "get_attr", "output"):
            return Verdict()
        if self._lineage.sources(origin) is not None:
            return self._judge_made(origin)
        placed = self.decision.nodes.get(origin.name)
        if placed is not None:
            return Verdict(placed.reason, placed.eager)
        return self._judge_origin(origin.args[0]) if _is_tuple_getitem(origin) else Verdict(UNKNOWN)

    def _judge_made(self, origin: Any) -> Verdict:
        """The verdict on a node made by Inductor: outside for the reason of any of its sources, or for its own."""
        sources = [self.decision.nodes[name] for name in self._sources(origin)]
        reasons = [placed.reason for placed in sources if not placed.is_free] if sources else [UNKNOWN]
        inherited = next((reason for reason in reasons if reason is not None), None)
        if inherited is not None or getattr(origin.target, "_inductor_lowering_function", False) is True:
            return Verdict(inherited)  # the latter calls no operator: it lowers what a pattern matched
        if origin.graph not in self._judged:
            self._judged[origin.graph] = self._judge(origin.graph)
        return self._judged[origin.graph].get(origin.name, Verdict(UNKNOWN))

    def _is_free(self, origin: Any) -> bool:
        """True if an FX node has no place of its own in the decision."""
        homes = self._homes(origin)
        return bool(homes) and all(placed.is_free for _, placed in homes)

    def _judge(self, fx_graph: Any) -> Mapping[str, Verdict]:
        """The verdict of legality on each node of an FX graph, by name."""
        gm = fx_graph.owning_module or torch.fx.GraphModule(torch.nn.Module(), fx_graph)
        graph = lift(gm, kind="inference")
        self.legality.run(graph, PassContext(self.decision.device))
        found: dict[str, Verdict] = {}
        for node in graph.nodes:
            reason = None if node.meta.get(CAPTURABLE) else node.meta.get(REASON) or UNKNOWN
            found[node.name] = Verdict(None, reason) if node.meta.get(EAGER) else Verdict(reason)
        return found

    def _sources(self, origin: Any) -> tuple[str, ...]:
        """The decision's nodes from which a node was made, without constants: these launch nothing."""
        found = map(_indexed, self._lineage.sources(origin) or ())
        known = [(node.name, self.decision.nodes.get(node.name)) for node in found]
        return tuple(dict.fromkeys(name for name, placed in known if placed is not None and placed.op != CONSTANT))

    def _step(self, snode: Any) -> Step:
        parts = _scheduled_parts(snode)
        nodes = {o.name: o for part in parts for o in _origins(part)}
        called = [node for node in nodes.values() if node.op == "call_function"]
        made = [node for node in called if self._lineage.sources(node) is not None]
        return Step(
            buffers=tuple(snode.get_buffer_names()),
            origins=tuple(nodes),
            launches=any(
                not isinstance(part, compat.NopKernelSchedulerNode) and not isinstance(part.node, compat.MultiOutput)
                for part in parts
            ),
            reason=self.should_partition(snode),
            made=tuple(PatternNode(n.name, op_name(n.target), self._sources(n), *self._judge_made(n)) for n in made),
        )


# -- replaced methods of Inductor ------------------------------------------------------------------------------------

_active: ContextVar[PartitionHooks | None] = ContextVar("partition_hooks", default=None)
_expecting: weakref.WeakSet[Any] = weakref.WeakSet()
_known: weakref.WeakKeyDictionary[Any, _Lowered] = weakref.WeakKeyDictionary()


def _listener() -> PartitionHooks | None:
    """The hooks that are active on this thread; None while a subgraph is lowered."""
    return None if isinstance(compat.inductor_virtualized.graph, compat.SubgraphLowering) else _active.get()


Method = Callable[..., Any]
"""An unbound method of Inductor."""


def _lower(hooks: PartitionHooks, lower: Method, lowering: Any, node: Any) -> Any:
    value = lower(lowering, node)
    hooks.realize(node, value)
    return value


def _depend(_hooks: PartitionHooks, depend: Method, scheduler: Any) -> None:
    _order_views(scheduler.nodes)
    depend(scheduler)


def _fuse(hooks: PartitionHooks, fuse: Method, scheduler: Any, one: Any, other: Any, *rest: Any, **more: Any) -> bool:
    return hooks.may_fuse(one, other) and fuse(scheduler, one, other, *rest, **more)


def _keep_outside(hooks: PartitionHooks, _ask: Method, _scheduler: Any, node: Any) -> str | None:
    return hooks.should_partition(node)


def _arrange(hooks: PartitionHooks, group: Method, scheduler: Any) -> None:
    group(scheduler)
    if not getattr(scheduler, "_multi_stream_nodes", False):
        scheduler.nodes = hooks.arrange(scheduler.nodes)


def _partition(hooks: PartitionHooks, partition: Method, scheduler: Any) -> tuple[Any, Any]:
    partitions = hooks.cut(scheduler.nodes)
    if partitions is None:
        partitions, signatures = partition(scheduler)
    else:
        skipped = [not hooks.is_inside(run) for run in partitions]
        signatures = scheduler.get_graph_partition_signature(partitions=partitions, skip_cudagraphs=skipped)
        scheduler.compute_graph_partition_maps(signatures)
    graph: Any = compat.inductor_virtualized.graph
    record = hooks.record(partitions, [not signature.skip_cudagraph for signature in signatures])
    graph.partition_maps = RecordedMaps(graph.partition_maps, record)
    return partitions, signatures


def _sign(_hooks: PartitionHooks, sign: Method, scheduler: Any, partitions: Any, skip_cudagraphs: Any) -> Any:
    signatures = sign(scheduler, partitions, skip_cudagraphs)
    _share(scheduler, partitions, signatures)
    return signatures


def _call(_hooks: PartitionHooks, wrap: Method, scheduler: Any, partition: Any, signature: Any) -> None:
    for whole in {whole for s in partition for b in s.get_outputs() for whole in _wholes(b.node)}:
        if whole in signature.input_nodes:  # allocated here, unless it is already
            scheduler.current_node = partition[0]
            compat.inductor_virtualized.graph.wrapper_code.codegen_allocation(signature.input_nodes[whole])
    wrap(scheduler, partition, signature)


def _generate(_hooks: PartitionHooks, generate: Method, scheduler: Any, nodes: list[Any]) -> None:
    _expect_sizes(compat.inductor_virtualized.graph.wrapper_code)
    generate(scheduler, nodes)


def _decide(hooks: PartitionHooks, write: Method, wrapper: Any, branch: Any) -> None:
    if hooks.is_outside(branch) or not _is_of_tensors(branch):
        write(wrapper, branch)
        return
    if hasattr(branch, "true_subgraph"):
        decides, bodies = branch.predicate, (branch.true_subgraph, branch.false_subgraph)
    else:  # from torch 2.14 on
        decides, bodies = branch.selector, branch.branches[::-1]
    predicate, name = decides.codegen_reference(), branch.get_name()
    functions = [_defined(wrapper, each) for each in bodies]
    wrapper.writeline(f"{name}_args = [{', '.join(each.codegen_reference() for each in branch.operands)}]")
    wrapper.writeline(f"{name} = {MODULE}.cond({predicate}, {', '.join(functions)}, {name}_args)")
    compat.inductor_virtualized.graph.scheduler.free_buffers()
    wrapper.writeline(f"del {name}_args")


def _repeat(hooks: PartitionHooks, write: Method, wrapper: Any, loop: Any, stacked: bool = False) -> None:
    if stacked or hooks.is_outside(loop) or not _is_of_tensors(loop):
        write(wrapper, loop, stacked)
        return
    functions = [_defined(wrapper, each) for each in (loop.cond_subgraph, loop.body_subgraph)]
    carried, given = (
        ", ".join(each.codegen_reference() for each in values)
        for values in (loop.carried_inputs, loop.additional_inputs)
    )
    call = f"{MODULE}.while_loop({', '.join(functions)}, [{carried}], [{given}])"
    wrapper.writeline(f"{loop.get_name()} = {call}")


def _defined(wrapper: Any, subgraph: Any) -> str:
    """Write the function of a subgraph into the program. Returns its name."""
    wrapper.add_import_once(f"from pygraph.runtime import control as {MODULE}")
    wrapper.codegen_subgraph_common(subgraph)
    return str(subgraph.graph.name)


class Replacement(NamedTuple):
    """A replaced method of Inductor.

    Args:
        owner: class of the method
        method: name of the method
        by: called instead, with the hooks, the original method, and the method's arguments
        purpose: effect on the program
        inside: also replaced for subgraphs; default: false
    """

    owner: Any
    method: str
    by: Method
    purpose: str
    inside: bool = False


_LOWERING, _SCHEDULER, _WRAPPER = compat.GraphLowering, compat.Scheduler, compat.PythonWrapperCodegen

REPLACEMENTS = (
    Replacement(_LOWERING, "run_node", _lower, "values that leave an exact region are buffers"),
    Replacement(_SCHEDULER, "compute_dependencies", _depend, "reads and writes through views keep their order"),
    Replacement(_SCHEDULER, "can_fuse", _fuse, "no kernel spans the bounds of an exact region"),
    Replacement(_SCHEDULER, "should_partition", _keep_outside, "what is decided outside of regions cuts the program"),
    Replacement(_SCHEDULER, "process_grouped_nodes", _arrange, "the order is as decided, or has fewer regions"),
    Replacement(_SCHEDULER, "graph_partition", _partition, "exact regions are partitions; the program is recorded"),
    Replacement(_SCHEDULER, "get_graph_partition_signature", _sign, "partitions take a buffer that several write into"),
    Replacement(_SCHEDULER, "_codegen_partition_wrapper", _call, "that buffer is allocated before the first of them"),
    Replacement(_SCHEDULER, "_codegen", _generate, "programs and partitions check the sizes of their inputs"),
    *(
        Replacement(_WRAPPER, method, by, "a capture runs all bodies, and replays have the device decide", inside=True)
        for method, by in ((compat.BRANCH_CODEGEN, _decide), ("codegen_while_loop", _repeat))
        if compat.CONTROL_FLOW
    ),
)
"""In the order in which Inductor calls them."""


@functools.cache
def _install() -> None:
    """Replace the methods, once per process: several threads may compile at the same time."""
    for replaced in REPLACEMENTS:
        original = getattr(replaced.owner, replaced.method)
        setattr(replaced.owner, replaced.method, _answering(original, replaced.by, replaced.inside))


def _answering(original: Method, by: Method, inside: bool) -> Method:
    """A method that calls ``by`` while hooks are active, and ``original`` otherwise."""

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        hooks = _active.get() if inside else _listener()
        return original(*args, **kwargs) if hooks is None else by(hooks, original, *args, **kwargs)

    return method


def _share(scheduler: Any, partitions: Sequence[Sequence[Any]], signatures: Sequence[Any]) -> None:
    """Have all partitions that write parts of one buffer take this buffer as an input, which their caller allocates. An
    example is the result of a concatenation, in which the operands lie.

    In Inductor (torch 2.13), a partition returns the parts that it wrote, and the partition that concatenates allocates
    the whole again, so that these parts are uninitialized.
    """
    buffers = scheduler.get_name_to_nodes()
    made = {name: number for number, run in enumerate(partitions) for snode in run for name in snode.outputs_by_name}
    parts: dict[str, list[str]] = {}
    for name in made:
        for whole in _wholes(buffers[name]):
            parts.setdefault(whole, []).append(name)
    for whole, names in parts.items():
        places = sorted({made[name] for name in (whole, *names)})
        if len(places) == 1:
            continue
        for number in places:
            signature, run = signatures[number], partitions[number]
            signature.input_nodes[whole] = buffers[whole]
            signature.input_deallocation[whole] = any(whole in snode.last_usage for snode in run)
            signature.symbol_inputs.update(scheduler.get_graph_partition_symbol_inputs(run, {whole: buffers[whole]}))
        for name in names:
            others = [run for number, run in enumerate(partitions) if number != made[name]]
            if not any(_reads(scheduler, snode, name) for run in others for snode in run):
                _keep_inside(name, others, signatures)


def _reads(scheduler: Any, snode: Any, name: str) -> bool:
    """True if a scheduled node reads a buffer; a no-op does not."""
    known = (scheduler.mutation_real_name.get(dep.name, dep.name) for dep in snode.read_writes.reads)
    return not isinstance(snode, compat.NopKernelSchedulerNode) and name in known


def _keep_inside(name: str, others: Iterable[Iterable[Any]], signatures: Iterable[Any]) -> None:
    """Remove a buffer from the inputs and results of all partitions, and from what ``others`` free."""
    for signature in signatures:
        signature.input_nodes.pop(name, None)
        signature.input_deallocation.pop(name, None)
        signature.output_nodes[:] = [node for node in signature.output_nodes if node.get_name() != name]
    for snode in chain.from_iterable(others):
        snode.last_usage.discard(name)


def _wholes(buffer: Any) -> Iterator[str]:
    """The names of the buffers of which ``buffer`` is a part."""
    layout = buffer.get_output_spec()
    if isinstance(layout, compat.NonOwningLayout):
        whole = layout.view
        while not isinstance(whole, compat.InductorBuffer):
            whole = whole.data
        yield whole.get_name()
        yield from _wholes(whole)


def _expect_sizes(wrapper: Any) -> None:
    """Have the code of a program or of a partition check the sizes of its inputs, as without partitions.

    torch 2.13 writes such a check before the first use of an input, from a list that it fills too late for partitions,
    and never for code outside of them. An input that Dynamo does not guard (the memory of overlapping views, one of
    them written) would then be used with any size. Without such a list (torch 2.11), all checks come first, and are
    complete.
    """
    if hasattr(wrapper, "_pending_input_asserts") and compat.inductor_config.size_asserts and wrapper not in _expecting:
        _expecting.add(wrapper)
        wrapper.codegen_input_size_asserts()


# -- scheduled nodes --------------------------------------------------------------------------------------------------


def _scheduled_parts(snode: Any) -> list[Any]:
    """The unfused nodes of a scheduled node."""
    parts = list(snode.get_nodes())
    if parts == [snode]:
        return parts
    return [inner for part in parts for inner in _scheduled_parts(part)]


def _order_views(snodes: Sequence[Any]) -> None:
    """Add dependences for memory that goes by several names: reads and writes follow earlier writes, and writes follow
    earlier reads. Inductor misses these if an operator that it does not lower returned a view. ``snodes`` are in the
    order of the program."""
    depends = compat.inductor_virtualized.graph.additional_buffer_deps
    for snode, behind in zip(snodes, _behind_views(snodes), strict=True):
        for step in behind:
            depends[snode.get_name()].update(buffer.get_name() for buffer in snodes[step].get_outputs())


def _behind_views(snodes: Sequence[Any]) -> list[list[int]]:
    """For each node, the earlier nodes that it must follow because of memory that goes by several names."""
    same: dict[str, str] = {}

    def memory(name: str) -> str:
        while name in same:
            name = same[name]
        return name

    for snode in snodes:
        for buffer in snode.get_outputs():
            for alias in buffer.get_aliases():
                one, other = memory(buffer.get_name()), memory(alias)
                if one != other:
                    same[one] = other
    shared = set(same.values())
    writer, readers = dict[str, int](), dict[str, list[int]]()
    found: list[list[int]] = []
    for step, snode in enumerate(snodes):
        read = shared.intersection(memory(dep.name) for dep in snode.read_writes.reads)
        written = shared.intersection(memory(n) for buffer in snode.get_outputs() for n in buffer.get_mutations())
        found.append([writer[name] for name in read | written if name in writer])
        for name in written:
            found[-1] += readers.pop(name, ())
            writer[name] = step
        for name in read - written:
            readers.setdefault(name, []).append(step)
    return found


def _memory_allows(before: list[Any], after: list[Any]) -> bool:
    """True if reordering keeps Inductor's estimate of peak memory within ``MEMORY_BUDGET``; False if there is none."""
    if compat.absent(compat.prepare_planning_info) or compat.absent(compat.estimate_peak_memory):
        return False
    peak, freeable, outputs = _planning(before)
    reordered, _ = compat.estimate_peak_memory(after, freeable, outputs)
    return bool(reordered <= peak * MEMORY_BUDGET)


def _planning(snodes: list[Any]) -> tuple[int, Any, Any]:
    """Inductor's estimate of peak memory in bytes, the inputs that may be freed, and the names of outputs."""
    graph = compat.inductor_virtualized.graph
    scheduler = graph.scheduler
    outputs = type(snodes[0].unmet_dependencies)(graph.get_output_names())
    inputs = type(outputs)(graph.graph_inputs.keys())
    peak, freeable = compat.prepare_planning_info(
        snodes, scheduler.name_to_buf, scheduler.name_to_fused_node, inputs, outputs
    )
    return peak, freeable, outputs


def _growth(snodes: list[Any], freeable: Any, outputs: Any) -> tuple[list[int], int]:
    """Bytes by which intermediates grow with each node, and their peak. Buffers that live only within one fused node
    count as 0 bytes, unlike in Inductor's estimate."""
    taken, freed = [0] * len(snodes), [0] * len(snodes)
    lives, _, _ = compat.memory_timeline(snodes, freeable, outputs)
    for life in lives:
        if life.start_step != life.end_step:
            taken[life.start_step] += life.size_alloc
            if life.end_step >= 0:  # no output
                freed[life.end_step] += life.size_free
    growth = [more - less for more, less in zip(taken, freed, strict=True)]
    held = accumulate(growth, initial=0)
    return growth, max(map(operator.add, held, taken))


def _origins(part: Any) -> list[Any]:
    """The FX nodes that an unfused scheduled node computes, sorted by name.

    Inductor's origins of an external kernel are its own FX node and those of operands that were not realized when it
    was lowered. The latter are removed: the buffers realized for it, which are separate nodes, have them as well. If a
    buffer was made on behalf of the kernel itself (a copy into other strides), it has all origins, and none is removed.
    A node that takes one of several results of a kernel has the origins of the kernel.

    A buffer that is realized for an external kernel, or for a copy to another device, also gets the origin of that
    operator, of which it computes nothing, or at most a copy into other strides, which may be captured.
    """
    node = _kernel(part.node)
    found = getattr(node, "origins", None) or ()
    if isinstance(node, compat.ComputedBuffer):
        where = part.get_device()
        found = [origin for origin in found if not _is_external(origin) and not _is_elsewhere(origin, where)] or found
    if isinstance(node, compat.ExternKernel):
        buffers = map(compat.inductor_virtualized.graph.try_get_buffer, (r.name for r in node.get_read_writes().reads))
        operands = {origin for buffer in buffers for origin in getattr(buffer, "origins", None) or ()}
        found = [origin for origin in found if origin not in operands] or found
    listener = _active.get()
    if listener is not None and listener.decision.exact:  # a view, and its reader, has its base's origins
        lowered = _lowered()
        read = (lowered.buffers[o] for o in found if lowered.buffers.get(o, node) is not node)
        elsewhere = frozenset(chain.from_iterable(buffer.origins for buffer in read)) - lowered.external
        found = [origin for origin in found if origin not in elsewhere] or found
    return sorted(found, key=lambda origin: str(origin.name))


def _names(snode: Any) -> str:
    """Names of the FX nodes of a scheduled node, or else of its buffers, for messages."""
    names = {origin.name: None for part in _scheduled_parts(snode) for origin in _origins(part)}
    return ", ".join(names) or ", ".join(snode.get_buffer_names())


def _waits_for(snode: Any) -> Any:
    """The FX node of the collective for which a scheduled node waits, if it does nothing else; else None."""
    parts = _scheduled_parts(snode)
    kernel = _kernel(parts[0].node)
    if len(parts) > 1 or not isinstance(kernel, compat.ExternKernel):
        return None
    computed = (origin for origin in _computed(kernel) if origin is not None)
    return next((origin.args[0] for origin in computed if op_name(origin.target).startswith(WAIT)), None)


def _kernel(node: Any) -> Any:
    """The operation that computes ``node``, which may be a ``MultiOutput`` of it."""
    while isinstance(node, compat.MultiOutput):
        node = node.inputs[0]
    return node


@dataclass(frozen=True, slots=True)
class _Lowered:
    """FX nodes of a lowered graph with ``count`` operations: ``external``, those that external kernels compute, and
    ``buffers``, the buffer of the value of each other node that has one."""

    count: int
    external: frozenset[Any]
    buffers: dict[Any, Any]


def _lowered() -> _Lowered:
    graph = compat.inductor_virtualized.graph
    if graph not in _known or _known[graph].count < len(graph.operations):
        kernels = [one for one in graph.operations if isinstance(one, compat.ExternKernel)]
        external = frozenset(chain.from_iterable(map(_computed, kernels)))
        place = {node: i for i, node in enumerate(graph.module.graph.nodes)}
        buffers = {}
        for one in graph.operations:
            computed = one.origins - external if isinstance(one, compat.ComputedBuffer) else ()
            if computed:  # it holds the value of the last of them
                buffers[max(computed, key=lambda node: place.get(node, -1))] = one
        _known[graph] = _Lowered(len(graph.operations), external, buffers)
    return _known[graph]


def _is_external(origin: Any) -> bool:
    """True if an external kernel computes an FX node."""
    return origin in _lowered().external


def _computed(kernel: Any) -> Iterator[Any]:
    """The FX nodes that an external kernel computes. A kernel that only writes its operands may not name its node; then
    they are found by operator. It may be the in-place form of an operator, called on a copy."""
    yield getattr(kernel, "origin_node", None)
    called = getattr(kernel, "op_overload", None)
    copying = op_name(called).replace("_.", ".") if called is not None else None
    for origin in getattr(kernel, "origins", ()):
        if origin.target is called or op_name(origin.target) == copying:
            yield origin


def _is_elsewhere(origin: Any, device: Any) -> bool:
    """True if the result of an FX node lies on another kind of device than ``device``."""
    value = origin.meta.get("val")
    return isinstance(value, torch.Tensor) and device is not None and value.device.type != device.type


def _uncapturable_structure(part: Any, device: str) -> str | None:
    """Why the kind of Inductor's node cannot be captured, whatever its origins are; None if it can."""
    node = part.node
    if isinstance(node, compat.DeviceCopy):
        return "device-copy"
    if isinstance(node, (compat.Conditional, compat.WhileLoop)) and not (compat.CONTROL_FLOW and _is_of_tensors(node)):
        return "control-flow"
    if isinstance(node, compat.DynamicScalar):
        return "host-read"
    if getattr(node, "unbacked_bindings", None):
        return "dynamic-shape"
    where = part.get_device()
    if where is not None and where.type != device:
        return "unsupported-device"
    return None


def _is_of_tensors(node: Any) -> bool:
    """True if a branch returns only tensors, or a loop carries only tensors and writes none of them in place."""
    if getattr(node, "unbacked_bindings", None) or not all(
        isinstance(each, compat.MultiOutput) for each in node.outputs
    ):
        return False
    if isinstance(node, compat.Conditional):
        return bool(getattr(node, "is_cond", True))  # from torch 2.14 on, one class has torch.switch as well
    carried = [getattr(each, "get_name", str)() for each in node.carried_inputs]
    return all(hasattr(each, "get_layout") for each in node.carried_inputs) and not any(
        name in carried for output in node.get_outputs() for name in output.get_mutation_names()
    )


def _draws(node: Any) -> bool:
    """True if an FX node, made by Inductor's own passes, draws random numbers from a generator."""
    return base_name(op_name(node.target)) in DRAWS or "nondeterministic_seeded" in tags_of(node.target)


def _indexed(node: Any) -> Any:
    """The node whose result a getitem selects; for any other node, the node itself."""
    return _indexed(node.args[0]) if _is_tuple_getitem(node) and node.args else node


def _is_tuple_getitem(node: Any) -> bool:
    """True if an FX node only selects one of several results."""
    return node.op == "call_function" and node.target is operator.getitem
