"""The device computes what the CPU computed for it: equal operators merge, factories and what is exact move."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pygraph.ir import (
    CONSTANT,
    PLACEMENT,
    REASON,
    Arg,
    Device,
    Graph,
    KernelNode,
    TensorType,
    Type,
    Value,
    map_arg,
)
from pygraph.passes.legality.rules import Target, copy_source, is_on_host
from pygraph.passes.placement.exact import is_exact, is_factory
from pygraph.passes.placement.facts import (
    Facts,
    Names,
    facts_of,
    has_own_memory,
    host_operands,
    is_copy_in,
    note_of_move,
    put_after,
)

__all__ = ["Moves", "merge_equal", "move_factories"]


def merge_equal(graph: Graph) -> int:
    """Use the first of CPU operators with the same operands in place of the others; returns how many went.

    before:  %s ─┬─ mul@cpu ─ sub@cpu ─ mul@cuda          after:  %s ─ mul@cpu ─ sub@cpu ─┬─ mul@cuda
                 └─ mul@cpu ─ sub@cpu ─ mul@cuda                                          └─ mul@cuda

    An optimizer's loop over parameters computes with the same learning rate for each. Only operators that do nothing
    but compute, on tensors that nothing writes to, and whose results nobody could tell from one another.
    """
    facts = facts_of(graph)
    first: dict[str, KernelNode] = {}
    gone: list[KernelNode] = []
    for node in graph.nodes:
        if node.effects.barrier:
            first.clear()
        if not _is_mergeable(node, facts):
            continue
        kept = first.setdefault(_computation(node), node)
        if kept is not node:
            graph.replace_uses(node.output, kept.output)
            gone.append(node)
    graph.erase(*gone)
    return len(gone)


def _is_mergeable(node: KernelNode, facts: Facts) -> bool:
    if node.meta.get(REASON) != "cpu-operator" or not node.op.startswith(("aten.", "prims.")):
        return False
    if not node.effects.is_pure or is_factory(node) or len(node.outputs) != 1 or node in facts.pinned:
        return False
    if any(isinstance(value.type, TensorType) and facts.is_written(value) for value in node.inputs):
        return False
    return not facts.is_observed(node.output)


def _computation(node: KernelNode) -> str:
    """What ``node`` computes, as text: numbers that are equal but not the same (``-0.0``, ``1.0`` and ``1``) differ."""
    return f"{node.op} {node.args!r} {sorted(node.attrs.items(), key=lambda item: item[0])!r} {node.output.type!r}"


# -- moving ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moves:
    """How many nodes were moved, how many made beside a CPU original that stays, how many copies fell away."""

    moved: int = 0
    made: int = 0
    copies: int = 0


def move_factories(graph: Graph, target: Target, *, floating: bool = False) -> Moves:
    """Make on the device what factories make on the CPU for it.

    before:  arange@cpu ─ ge@cpu ─ _to_copy ─ where@cuda
    after:   arange@cuda ─ ge@cuda ─ where@cuda

    before:  zeros@cpu ─┬─ _to_copy ─ add@cuda        after:  zeros@cpu ─ return
                        └─ return                             zeros_cuda@cuda ─ add@cuda
    """
    return _Mover(graph, target, floating).run()


class _Mover:
    def __init__(self, graph: Graph, target: Target, floating: bool) -> None:
        self.graph = graph
        self.target = target
        self.floating = floating
        self.facts: Facts = facts_of(graph)
        self.names = Names(graph)
        self.twins: dict[Value, Value] = {}
        self.made: list[tuple[KernelNode, KernelNode]] = []
        self.apart = self._apart()

    def run(self) -> Moves:
        wanted = self._wanted()
        staying = self._staying(wanted)
        served = [node for node in self.graph.nodes if node not in wanted and node not in self.apart]
        copies = [node for node in served if is_copy_in(node, self.target) and node.inputs[0].producer in wanted]
        for node in wanted:
            if node in staying:
                self._make_twin(node)
            else:
                self._move(node)
        for node in served:
            self._serve(node)
        idle = [node for node in copies if self._serve_copy(node)]
        self.graph.erase(*idle)
        if self.made:
            put_after(self.graph, self.made)
        return Moves(len(wanted) - len(staying), len(staying), len(idle))

    # -- what to move ------------------------------------------------------------------------------------------------

    def _wanted(self) -> dict[KernelNode, None]:
        """Movable nodes whose results reach the device through movable nodes alone, in program order."""
        movable: dict[KernelNode, None] = {}
        for node in self.graph.nodes:
            if self._is_movable(node, movable):
                movable[node] = None
        wanted: dict[KernelNode, None] = {}
        for node in reversed(movable):
            users = [(value, user) for value in node.outputs for user in value.users]
            if any(user in wanted or self._consumes(user, value) for value, user in users):
                wanted[node] = None
        return dict.fromkeys(reversed(wanted))

    def _is_movable(self, node: KernelNode, movable: dict[KernelNode, None]) -> bool:
        if node.meta.get(REASON) != "cpu-operator" or not node.outputs or not is_exact(node, floating=self.floating):
            return False
        if not replace(node.effects, aliases=(), reads=None).is_pure:
            return False
        if any(not is_on_host(value) or self.facts.is_written(value) for value in node.outputs):
            return False
        tensors = [value for value in node.inputs if isinstance(value.type, TensorType)]
        return all(value.producer in movable for value in tensors)

    def _consumes(self, user: KernelNode, value: Value) -> bool:
        """Whether ``user`` runs on the device and would take ``value`` there just as well."""
        if user in self.apart:
            return False
        if is_copy_in(user, self.target):
            return value in user.inputs
        return value in host_operands(user, self.target)

    def _apart(self) -> frozenset[KernelNode]:
        """All but the first of the copies of one memory that must be memory of their own: they copy from the CPU."""
        first: dict[Value, KernelNode] = {}
        owners = [node for node in self.graph.nodes if has_own_memory(node, self.facts, self.target)]
        for node in owners:
            source = copy_source(node)
            assert source is not None
            first.setdefault(self.facts.roots[source], node)
        return frozenset(owners).difference(first.values())

    def _staying(self, wanted: dict[KernelNode, None]) -> dict[KernelNode, None]:
        """Those of ``wanted`` whose CPU results somebody needs all the same. Constants are held on the CPU."""
        staying: dict[KernelNode, None] = {}
        returned = frozenset(self.graph.output_values)
        for node in reversed(wanted):
            users = [(value, user) for value in node.outputs for user in value.users]
            needed = any(u in staying or not (u in wanted or self._consumes(u, v)) for v, u in users)
            if needed or node.op == CONSTANT or returned.intersection(node.outputs):
                staying[node] = None
        return staying

    # -- moving ------------------------------------------------------------------------------------------------------

    def _move(self, node: KernelNode) -> None:
        self.graph.set_args(node, self._args(node), self._attrs(node))
        for value in node.outputs:
            self.graph.set_type(value, self._type(value.type))
        node.meta.set(PLACEMENT, note_of_move(self.target))

    def _make_twin(self, node: KernelNode) -> None:
        """The same node on the device, beside the one that stays."""
        held = node.op == CONSTANT
        twin = self.graph.add(
            "prims.device_put.default" if held else node.op,
            (node.output, self.target.device) if held else self._args(node),
            [self._type(value.type) for value in node.outputs],
            attrs={} if held else self._attrs(node),
            name=self.names.suffixed(f"{node.name}_{self.target.device.kind}"),
            effects=node.effects,
            cost=node.cost,
            loc=node.loc,
        )
        twin.meta.set(PLACEMENT, f"made on {self.target.device} beside {node.name} on cpu")
        self.twins.update(zip(node.outputs, twin.outputs, strict=True))
        self.made.append((twin, node))

    def _args(self, node: KernelNode) -> tuple[Arg, ...]:
        return tuple(map_arg(arg, self._twin_of) for arg in node.args)

    def _attrs(self, node: KernelNode) -> dict[str, Arg]:
        """The attributes with the device changed; a factory that names none gets one. Pinned memory is the CPU's."""
        attrs = {key: arg for key, arg in self._attrs_of_user(node).items() if key != "pin_memory"}
        if is_factory(node) or isinstance(attrs.get("device"), Device):
            attrs["device"] = self.target.device
        return attrs

    def _twin_of(self, value: Value) -> Arg:
        return self.twins.get(value, value)

    def _type(self, type: Type) -> Type:
        return replace(type, device=self.target.device) if isinstance(type, TensorType) else type

    # -- those who use what was moved ----------------------------------------------------------------------------------

    def _serve(self, node: KernelNode) -> None:
        """Give an operator of the device its operands there."""
        if any(value in self.twins for value in host_operands(node, self.target)):
            self.graph.set_args(node, self._args(node), self._attrs_of_user(node))

    def _attrs_of_user(self, node: KernelNode) -> dict[str, Arg]:
        return {key: map_arg(arg, self._twin_of) for key, arg in node.attrs.items()}

    def _serve_copy(self, node: KernelNode) -> bool:
        """Whether a copy of a value that is on the device now is idle: it casts nothing, and nobody could tell it."""
        moved = self.twins.get(node.inputs[0], node.inputs[0])
        if node.output.type == moved.type and node not in self.facts.pinned and not self.facts.is_observed(node.output):
            self.graph.replace_uses(node.output, moved)
            return True
        self.graph.set_args(node, self._args(node), self._attrs_of_user(node))
        node.meta.set(PLACEMENT, f"copies within {self.target.device}")
        return False
