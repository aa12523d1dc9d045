"""CPU work for the device moves to the device: equal operators merge; factories and exact operators move.

An operator is exact if it gives the same bits on the device: factories, data movement, integer arithmetic, casts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import replace

import sympy

from pygraph.ir import (
    CONSTANT,
    PLACEMENT,
    PURE,
    REASON,
    Arg,
    Device,
    DType,
    Graph,
    KernelNode,
    ScalarType,
    TensorType,
    Value,
    base_name,
)
from pygraph.passes.legality.rules import Target, copy_source, is_on_host
from pygraph.passes.placement.facts import Facts, computes_only, has_own_memory, host_operands, is_copy_in, put_after


def merge_equal(graph: Graph) -> int:
    """Replace equal CPU operators with the same operands by the first of them; returns how many were removed.

    before:  %s ─┬─ mul@cpu ─ sub@cpu ─ mul@cuda          after:  %s ─ mul@cpu ─ sub@cpu ─┬─ mul@cuda
                 └─ mul@cpu ─ sub@cpu ─ mul@cuda                                          └─ mul@cuda

    An optimizer's loop over parameters computes with the same learning rate for each. Only operators without effects
    merge, if nothing writes their tensor operands and nobody could tell their results apart.
    """
    facts = Facts(graph)
    first: dict[str, KernelNode] = {}
    gone: list[KernelNode] = []
    for node in graph.nodes:
        if node.effects.barrier:
            first.clear()
        if not _is_mergeable(node, facts):
            continue
        # As text, numbers differ that are equal but not the same: -0.0, and 1.0 beside 1.
        attrs = sorted(node.attrs.items(), key=lambda item: item[0])
        kept = first.setdefault(f"{node.op} {node.args!r} {attrs!r} {node.output.type!r}", node)
        if kept is not node:
            graph.replace_uses(node.output, kept.output)
            gone.append(node)
    graph.erase(*gone)
    return len(gone)


def _is_mergeable(node: KernelNode, facts: Facts) -> bool:
    if node.meta.get(REASON) != "cpu-operator" or not node.op.startswith(("aten.", "prims.")):
        return False
    if node.effects != PURE or is_factory(node) or len(node.outputs) != 1 or node in facts.pinned:
        return False
    if any(isinstance(value.type, TensorType) and facts.is_written(value) for value in node.inputs):
        return False
    return not facts.is_observed(node.output)


def move_factories(graph: Graph, target: Target) -> Counter[str]:
    """Make tensors on the device that factories make for it on the CPU.

    before:  arange@cpu ─ ge@cpu ─ _to_copy ─ where@cuda
    after:   arange@cuda ─ ge@cuda ─ where@cuda

    before:  zeros@cpu ─┬─ _to_copy ─ add@cuda        after:  zeros@cpu ─ return
                        └─ return                             zeros_cuda@cuda ─ add@cuda

    Returns how many nodes ``moved``, how many were ``made`` beside a CPU original that stays, and how many ``copies``
    were removed.
    """
    return _Mover(graph, target).run()


class _Mover:
    def __init__(self, graph: Graph, target: Target) -> None:
        self.graph = graph
        self.target = target
        self.facts = Facts(graph)
        self.twins: dict[Value, Value] = {}
        self.apart = self._apart()

    def run(self) -> Counter[str]:
        wanted = self._wanted()
        staying = self._staying(wanted)
        served = [node for node in self.graph.nodes if node not in wanted and node not in self.apart]
        copies = [node for node in served if is_copy_in(node, self.target) and node.inputs[0].producer in wanted]
        made: dict[KernelNode, KernelNode | None] = {}
        for node in wanted:
            if node in staying:
                made[self._make_twin(node)] = node
            else:
                self._move(node)
                node.meta.set(PLACEMENT, f"moved from cpu to {self.target.device}")
        for node in served:
            if any(value in self.twins for value in host_operands(node, self.target)):
                self.graph.replace_operands(node, self.twins)
        idle = [node for node in copies if self._serve_copy(node)]
        self.graph.erase(*idle)
        if made:
            put_after(self.graph, made)
        return Counter(moved=len(wanted) - len(staying), made=len(staying), copies=len(idle))

    def _wanted(self) -> dict[KernelNode, None]:
        """Movable nodes whose results reach the device only through movable nodes, in program order."""
        movable: dict[KernelNode, None] = {}
        for node in self.graph.nodes:
            if self._is_movable(node, movable):
                movable[node] = None
        wanted: dict[KernelNode, None] = {}
        for node in reversed(movable):
            if any(self._uses_on_device(node, wanted)):
                wanted[node] = None
        return dict.fromkeys(reversed(wanted))

    def _is_movable(self, node: KernelNode, movable: Container[KernelNode | None]) -> bool:
        if node.meta.get(REASON) != "cpu-operator" or not node.outputs or not computes_only(node):
            return False
        if not is_exact(node):
            return False
        if any(not is_on_host(value) or self.facts.is_written(value) for value in node.outputs):
            return False
        return all(value.producer in movable for value in node.inputs if isinstance(value.type, TensorType))

    def _uses_on_device(self, node: KernelNode, moving: Container[KernelNode]) -> Iterator[bool]:
        """For each use of ``node``: true if the user runs on or moves to the device, and can take the value there."""
        for value in node.outputs:
            for user in value.users:
                operands = user.inputs if is_copy_in(user, self.target) else host_operands(user, self.target)
                yield user in moving or (user not in self.apart and value in operands)

    def _apart(self) -> frozenset[KernelNode]:
        """All but the first of the copies of one memory whose results must not share memory: they copy from the CPU."""
        first: dict[Value, KernelNode] = {}
        owners = [node for node in self.graph.nodes if has_own_memory(node, self.facts, self.target)]
        for node in owners:
            source = copy_source(node)
            assert source is not None
            first.setdefault(self.facts.roots[source], node)
        return frozenset(owners).difference(first.values())

    def _staying(self, wanted: dict[KernelNode, None]) -> dict[KernelNode, None]:
        """Nodes of ``wanted`` whose CPU results are still needed. Constants stay on the CPU."""
        staying: dict[KernelNode, None] = {}
        returned = frozenset(self.graph.output_values)
        for node in reversed(wanted):
            followed = any(user in staying for value in node.outputs for user in value.users)
            needed = followed or not all(self._uses_on_device(node, wanted))
            if needed or node.op == CONSTANT or returned.intersection(node.outputs):
                staying[node] = None
        return staying

    def _move(self, node: KernelNode) -> None:
        """Have ``node`` run on the device. A factory without a device gets one; ``pin_memory`` is for the CPU only."""
        self.graph.replace_operands(node, self.twins)
        attrs = {key: arg for key, arg in node.attrs.items() if key != "pin_memory"}
        if is_factory(node) or isinstance(attrs.get("device"), Device):
            attrs["device"] = self.target.device
        self.graph.set_args(node, node.args, attrs)
        for value in node.outputs:
            if isinstance(value.type, TensorType):
                value.type = replace(value.type, device=self.target.device)

    def _make_twin(self, node: KernelNode) -> KernelNode:
        """Add a copy of ``node`` on the device; the original stays on the CPU."""
        held, device = node.op == CONSTANT, self.target.device
        name = f"{node.name}_{device.kind}"
        while self.graph.owner(name) is not None:
            name += "_"
        twin = self.graph.add(
            "prims.device_put.default" if held else node.op,
            (node.output, device) if held else node.args,
            [value.type for value in node.outputs],
            attrs={} if held else node.attrs,
            name=name,
            effects=node.effects,
            cost=node.cost,
            loc=node.loc,
            module=node.module,
        )
        self._move(twin)
        twin.meta.set(PLACEMENT, f"made on {device} beside {node.name} on cpu")
        self.twins.update(zip(node.outputs, twin.outputs, strict=True))
        return twin

    def _serve_copy(self, node: KernelNode) -> bool:
        """True if a copy of a value that is now on the device was replaced by it: no cast, no observable difference."""
        moved = self.twins.get(node.inputs[0], node.inputs[0])
        if node.output.type == moved.type and node not in self.facts.pinned and not self.facts.is_observed(node.output):
            self.graph.replace_uses(node.output, moved)
            return True
        self.graph.replace_operands(node, self.twins)
        node.meta.set(PLACEMENT, f"copies within {self.target.device}")
        return False


# -- what is exact -----------------------------------------------------------------------------------------------------
# Checked by runs on an x86 CPU and on one H200. Not listed: random factories (another generator draws other numbers),
# indexing (out-of-range indices raise on the CPU only), and arithmetic on floats.

_TABLE = {
    # factories whose values are given, or arbitrary
    "fills": f"""
        aten.empty aten.empty_permuted aten.empty_strided aten.eye aten.full aten.ones aten.scalar_tensor
        aten.tril_indices aten.triu_indices aten.zeros prims.empty prims.empty_permuted prims.empty_strided prims.full
        prims.scalar_tensor {CONSTANT}
    """,
    # factories that count: in floating-point they are computed differently (f16, bf16 and fractional steps differ)
    "ranges": "aten.arange prims.iota",
    # operators that move elements; all operands except masks must have the element type of the result
    "movement": """
        aten._reshape_alias aten._unsafe_view aten.alias aten.broadcast_to aten.cat aten.clone aten.constant_pad_nd
        aten.detach aten.diagonal aten.empty_like aten.expand aten.fill aten.flip aten.full_like aten.lift_fresh
        aten.lift_fresh_copy aten.masked_fill aten.new_empty aten.new_full aten.new_ones aten.new_zeros aten.ones_like
        aten.permute aten.repeat aten.reshape aten.roll aten.select aten.slice aten.split aten.split_with_sizes
        aten.squeeze aten.stack aten.t aten.transpose aten.tril aten.triu aten.unbind aten.unsqueeze aten.view
        aten.where aten.zeros_like prims.broadcast_in_dim prims.cat prims.clone prims.squeeze prims.transpose
        prims.where
    """,
    # exact on integers and booleans, sums included; shifts and powers are not: beyond the width, devices differ
    "integer": """
        aten.abs aten.add aten.all aten.any aten.bitwise_and aten.bitwise_not aten.bitwise_or aten.bitwise_xor
        aten.clamp aten.clamp_max aten.clamp_min aten.cumsum aten.eq aten.ge aten.gt aten.le aten.logical_and
        aten.logical_not aten.logical_or aten.logical_xor aten.lt aten.maximum aten.minimum aten.mul aten.ne aten.neg
        aten.rsub aten.sign aten.sub aten.sum
    """,
    # exact on integers; division by zero raises on the CPU only, so the divisor has to be a nonzero literal
    "divisions": "aten.div aten.floor_divide aten.fmod aten.remainder",
    "casts": "aten._to_copy prims.convert_element_type",
}
_OPERATORS = {kind: frozenset(names.split()) for kind, names in _TABLE.items()}

_WIDE = frozenset({DType.F32, DType.F64})
_NARROW = frozenset({DType.F16, DType.BF16})
_ROUNDED = {
    DType.F64: _WIDE,
    DType.F32: _WIDE | _NARROW,
    DType.F16: _WIDE | {DType.F16},
    DType.BF16: _WIDE | {DType.BF16},
}
"""Floating types that a floating type may be cast to. From f64 to 16 bits devices round once or twice."""


def is_factory(node: KernelNode) -> bool:
    """True if ``node`` takes no tensors."""
    return not _dtypes(node.inputs)


def is_exact(node: KernelNode) -> bool:
    """True if ``node`` gives the same bits on any device."""
    base = base_name(node.op)
    kinds = [kind for kind, names in _OPERATORS.items() if base in names]
    taken, made = _dtypes(node.inputs), _dtypes(node.outputs)
    if "fills" in kinds:
        return True
    if "movement" in kinds:
        return len(set(made)) == 1 and set(taken) <= {*made, DType.B8}
    if "casts" in kinds:
        return bool(taken and made) and _casts_exactly(taken[0], made[0])
    return all(map(_is_integral, (*taken, *made))) and (
        ("ranges" in kinds and all(map(_is_whole, node.args)))
        or ("integer" in kinds and _whole_numbers(node))
        or ("divisions" in kinds and _divides_by_number(node))
    )


def _dtypes(values: Iterable[Value]) -> list[DType]:
    return [value.type.dtype for value in values if isinstance(value.type, TensorType)]


def _is_integral(dtype: DType) -> bool:
    return dtype is DType.B8 or dtype.value[0] in "iu"


def _is_whole(arg: Arg) -> bool:
    if isinstance(arg, Value):
        return isinstance(arg.type, ScalarType) and arg.type.kind == "int"
    return arg is None or isinstance(arg, int | sympy.Expr)


def _whole_numbers(node: KernelNode) -> bool:
    """True if every number among the operands is an integer or a boolean."""
    literals = (arg for arg in (*node.args, *node.attrs.values()) if not isinstance(arg, Value))
    scalars = (value.type for value in node.inputs if isinstance(value.type, ScalarType))
    return not any(isinstance(arg, float | complex) for arg in literals) and all(s.kind != "float" for s in scalars)


def _divides_by_number(node: KernelNode) -> bool:
    divisor = node.args[1] if len(node.args) > 1 else None
    mode = node.attrs.get("rounding_mode", "floor")
    return isinstance(divisor, int) and not isinstance(divisor, bool) and divisor != 0 and mode is not None


def _casts_exactly(source: DType, result: DType) -> bool:
    """True if the cast rounds once, to nearest, or not at all. Floats to integers are undefined out of range."""
    if _is_integral(source):
        return _is_integral(result) or result in _WIDE or (source is DType.B8 and result in _NARROW)
    return result in _ROUNDED.get(source, ())
