"""The verifier of graphs: one table of rules per stage, checked in order; the first violation is raised.

Each rule yields ``(node, reason)`` for each violation; node is None if no single node causes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from graphlib import CycleError, TopologicalSorter
from itertools import chain, zip_longest
from typing import TypeAlias

import sympy

from pygraph.errors import VerifyError
from pygraph.ir.annotations import CAPTURABLE, EAGER, REASON, REGION, SELECTED, unit_of
from pygraph.ir.cost import COST_FIELDS
from pygraph.ir.dims import canonical, dim_text
from pygraph.ir.graph import Graph, Stage
from pygraph.ir.node import GraphRef, KernelNode, Value, leaves, values_in
from pygraph.ir.operators import Signature, listed, signature_of
from pygraph.ir.order import dependences
from pygraph.ir.text.print import type_text
from pygraph.ir.types import Dim, DType, OpaqueType, ScalarType, TensorType, Type
from pygraph.text.words import symbol_text, word_text

Violation: TypeAlias = tuple[KernelNode | None, str]
Rule: TypeAlias = Callable[[Graph], Iterator[Violation]]


def names(graph: Graph) -> Iterator[Violation]:
    """Every input and node has a unique name, by which the graph finds it."""
    owners: list[KernelNode | Value] = [*graph.inputs, *graph.nodes]
    for owner in owners:
        if graph.owner(owner.name) is not owner:
            node = owner if isinstance(owner, KernelNode) else None
            yield node, f"the name '{owner.name}' is used twice, or unknown to the graph"


def links(graph: Graph) -> Iterator[Violation]:
    """Operands belong to the graph; results know their producer; ``users`` lists exactly the users, with use counts."""
    users: dict[Value, Counter[KernelNode]] = {value: Counter() for value in graph.values()}
    for node in graph.nodes:
        if tuple(values_in((*node.args, *node.attrs.values()))) != node.inputs:
            yield node, "its flattened operands are not those of its arguments and attributes"
        for index, value in enumerate(node.outputs):
            if value.producer is not node or value.index != index:
                yield node, f"result {index} does not say that this node produces it"
        for value in node.inputs:
            if value in users:
                users[value][node] += 1
            else:
                yield node, f"operand {value!r} belongs to no node or input of this graph"
    for value, counted in users.items():
        if counted != value.users:
            yield value.producer, f"the users recorded for {value!r} are not those that use it"


def outputs(graph: Graph) -> Iterator[Violation]:
    """Returned values belong to the graph."""
    known = set(graph.values())
    for value in graph.output_values:
        if value not in known:
            yield None, f"returned value {value!r} belongs to no node or input of this graph"


def order(graph: Graph) -> Iterator[Violation]:
    """Program order is topological: producers, and nodes named by ``after``, come first."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        needed = [value.producer for value in node.inputs if value.producer is not None]
        for before in (*needed, *node.after):
            if before not in place:
                yield node, f"it must run after {before.name}, which is not in this graph"
            elif place[before] >= place[node]:
                yield node, f"it needs {before.name}, which comes later"


def effects(graph: Graph) -> Iterator[Violation]:
    """Effects name operands and results that exist; written operands have memory."""
    for node in graph.nodes:
        stated = node.effects
        operands, results = range(len(node.inputs)), range(len(node.outputs))
        positions = [*stated.writes, *(stated.reads or ()), *(operand for _, operand in stated.aliases)]
        for position in positions:
            if position not in operands:
                yield node, f"its effects name operand {position}, but it has {len(operands)}"
        for result, _ in stated.aliases:
            if result not in results:
                yield node, f"its effects name result {result}, but it has {len(results)}"
        for position in stated.writes:
            if position in operands and isinstance(node.inputs[position].type, ScalarType):
                yield node, f"it writes operand {position}, a number, which has no memory"


def types(graph: Graph) -> Iterator[Violation]:
    """Sizes and strides are not negative, strides are one per size, scalars are int, float or bool, names not empty."""
    for value in graph.values():
        type = value.type
        if isinstance(type, TensorType):
            if len(type.strides) != len(type.shape):
                yield value.producer, f"{value!r}: {len(type.shape)} sizes but {len(type.strides)} strides"
            for size in (*type.shape, *type.strides):
                if isinstance(size, int) and size < 0:
                    yield value.producer, f"{value!r}: size or stride {size} is negative"
        elif isinstance(type, ScalarType) and type.kind not in ("int", "float", "bool"):
            yield value.producer, f"{value!r}: '{type.kind}' is no kind of number"
        elif isinstance(type, OpaqueType) and not type.name:
            yield value.producer, f"{value!r}: an opaque type needs a name"


def expressions(graph: Graph) -> Iterator[Violation]:
    """Sizes and costs are in the IR's own terms, so that they print, parse and compare."""
    for value in graph.values():
        for size in _dims_of(value.type):
            if not _is_canonical(size):
                yield value.producer, f"{value!r}: size {size} uses terms that the IR does not have"
    for node in graph.nodes:
        for field in COST_FIELDS:
            cost = getattr(node.cost, field)
            if cost is not None and not _is_canonical(cost):
                yield node, f"its cost {field} = {cost} uses terms that the IR does not have"


def _dims_of(type: Type) -> tuple[Dim, ...]:
    if isinstance(type, TensorType):
        return (*type.shape, *(type.stride or ()))
    return (type.expr,) if isinstance(type, ScalarType) and type.expr is not None else ()


def _is_canonical(value: Dim) -> bool:
    try:
        return isinstance(value, int) or (isinstance(value, (float, sympy.Expr)) and canonical(value) == value)
    except ZeroDivisionError:
        return False


def subgraphs(graph: Graph) -> Iterator[Violation]:
    """Operands and attributes refer to subgraphs that exist."""
    for node in graph.nodes:
        for reference in leaves((*node.args, *node.attrs.values()), GraphRef):
            if reference.name not in graph.subgraphs:
                yield node, f"there is no subgraph @{reference.name}"


def operators(graph: Graph) -> Iterator[Violation]:
    """Operators are torch's, or declared by the graph; arguments and results match their signatures."""
    for node in graph.nodes:
        signature = signature_of(node.op)
        if signature is None and node.op not in graph.operators:
            close = get_close_matches(node.op, listed(), n=1, cutoff=0.8)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            declared = f"graph @{symbol_text(graph.name)} {{operators = [{word_text(node.op)}]}}"
            yield node, f"{_called(node)} is no operator of torch's{hint} (a custom operator is declared: {declared})"
        if signature is not None and signature.kind != "any":
            mismatches = chain(_call_mismatches(node, signature), _result_mismatches(node, signature))
            yield from ((node, f"{_called(node)} {reason}") for reason in mismatches)


def _called(node: KernelNode) -> str:
    """The operator of ``node``, and the user's line."""
    return node.op if node.loc is None else f"{node.op} at {node.loc}"


def _call_mismatches(node: KernelNode, signature: Signature) -> Iterator[str]:
    by_position, names = len(node.args), (*signature.positional, *signature.keywords)
    if by_position > len(signature.positional):
        yield f"takes {len(signature.positional)} arguments by position, and has {by_position}: it is {signature}"
    for key in node.attrs:
        if key not in names:
            yield f"has no argument '{key}': it is {signature}"
        elif key in signature.positional[:by_position]:
            yield f"is given its argument '{key}' twice: it is {signature}"
    for name in names[by_position:] if by_position <= len(signature.positional) else ():
        if name not in node.attrs and name not in signature.optional:
            yield f"lacks its argument '{name}': it is {signature}"


def _result_mismatches(node: KernelNode, signature: Signature) -> Iterator[str]:
    count = len(node.outputs)
    if (
        signature.results is not None
        and count != signature.results
        and not (signature.fewer and count < signature.results)
    ):
        yield f"returns {signature.results} results, and has {count}"
    operands = [value.type for value in node.inputs]
    if not signature.kind or count != 1 or any(isinstance(type, OpaqueType) for type in operands):
        return
    found, tensors = node.output.type, [type for type in operands if isinstance(type, TensorType)]
    if not tensors or not isinstance(found, TensorType):
        return
    taken = ", ".join(map(type_text, tensors))
    shape = _broadcast([type.shape for type in tensors])
    if shape is not None and not _may_be_equal(found.shape, shape):
        yield f"returns sizes {_sizes_text(shape)} for {taken}, and has the result {type_text(found)}"
    sized = [type.device for type in tensors if type.shape] or [type.device for type in tensors]
    if "device" not in node.attrs and len(set(sized)) == 1 and found.device != sized[0]:
        yield f"returns a tensor on {sized[0]} for {taken}, and has the result {type_text(found)}"
    dtypes = {type.dtype for type in tensors}
    wanted = DType.B8 if signature.kind == "bool" else tensors[0].dtype
    is_known = signature.kind == "bool" or (signature.kind == "same" and len(dtypes) == 1 and wanted.is_floating)
    is_known &= "dtype" not in node.attrs and next(leaves((*node.args, *node.attrs.values()), complex), None) is None
    if is_known and found.dtype is not wanted:
        yield f"returns {wanted.value} for {taken}, and has the result {type_text(found)}"


def _broadcast(shapes: Sequence[tuple[Dim, ...]]) -> tuple[Dim | None, ...] | None:
    """The sizes of an elementwise result, None for a size that depends on symbols; None if shapes do not broadcast."""
    found: list[Dim | None] = []
    for sizes in zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1):
        wide = {size for size in sizes if size != 1}
        if len({size for size in wide if isinstance(size, int)}) > 1:
            return None
        found.append(wide.pop() if len(wide) == 1 else None if wide else 1)
    return tuple(reversed(found))


def _may_be_equal(shape: tuple[Dim, ...], wanted: tuple[Dim | None, ...]) -> bool:
    """True unless the ranks differ, or two sizes are different numbers."""
    pairs = zip(shape, wanted, strict=False)
    return len(shape) == len(wanted) and not any(
        isinstance(one, int) and isinstance(other, int) and one != other for one, other in pairs
    )


def _sizes_text(sizes: tuple[Dim | None, ...]) -> str:
    return f"[{', '.join('?' if size is None else dim_text(size) for size in sizes)}]"


# -- judged, partitioned, indirected and selected graphs ---------------------------------------------------------------


def judged(graph: Graph) -> Iterator[Violation]:
    """Every node is judged; a node that cannot be captured has a reason."""
    for node in graph.nodes:
        capturable = node.meta.get(CAPTURABLE)
        if capturable is None:
            yield node, "it is not judged: annotation 'capturable' is missing"
        elif not capturable and not node.meta.get(REASON):
            yield node, "it is not capturable but gives no 'reason'"


def membership(graph: Graph) -> Iterator[Violation]:
    """Capturable nodes are in a region or have a reason; other nodes are in one only if a region may call them."""
    for node in graph.nodes:
        capturable = node.meta.get(CAPTURABLE)
        region = node.meta.get(REGION)
        reason: str | None = node.meta.get(REASON)
        if region is not None and not capturable and not node.meta.get(EAGER):
            yield node, f"it is in region {region} but cannot be captured: {reason}"
        if region is None and capturable and not reason:
            yield node, "it is capturable, in no region, and gives no 'reason'"


def table(graph: Graph) -> Iterator[Violation]:
    """The table of regions lists exactly the regions that nodes are in."""
    used: dict[int, KernelNode] = {}
    for node in graph.nodes:
        region = node.meta.get(REGION)
        if region is not None:
            used.setdefault(region, node)
    for index, node in used.items():
        if index not in graph.regions:
            yield node, f"its region {index} is not in the table of regions"
    for index in graph.regions:
        if index not in used:
            yield None, f"region {index} has no nodes"


def quotient(graph: Graph) -> Iterator[Violation]:
    """With each region contracted to one node, the dependences have no cycle; so each region is convex."""
    needed: dict[int | KernelNode, dict[int | KernelNode, None]] = {unit_of(node): {} for node in graph.nodes}
    for before, node in dependences(graph):
        if unit_of(before) != unit_of(node):
            needed[unit_of(node)][unit_of(before)] = None
    try:
        TopologicalSorter(needed).prepare()
    except CycleError as error:
        cycle: list[int | KernelNode] = error.args[1]
        names = (f"region {unit}" if isinstance(unit, int) else unit.name for unit in cycle)
        first = next(node for node in graph.nodes if unit_of(node) in cycle)
        yield first, "regions and nodes need each other: " + " → ".join(names)


def parameters(graph: Graph) -> Iterator[Violation]:
    """Parameters of a region are exactly the values that it takes from outside, each with a known decision."""
    outside: dict[int, dict[Value, KernelNode]] = {index: {} for index in graph.regions}
    for node in graph.nodes:
        region = node.meta.get(REGION)
        if region is None:
            continue
        for value in node.inputs:
            if value.producer is None or value.producer.meta.get(REGION) != region:
                outside[region].setdefault(value, node)
    for index, region_entry in graph.regions.items():
        for value, node in outside[index].items():
            if value not in region_entry.parameters:
                yield node, f"region {index} takes {value!r} from outside, but that is no parameter of it"
        for value, parameter in region_entry.parameters.items():
            if value not in outside[index]:
                yield None, f"region {index} does not take its parameter {value!r} from outside"
            if parameter.decision not in ("static", "patched"):
                yield None, f"parameter {value!r} of region {index}: unknown decision '{parameter.decision}'"


def selected(graph: Graph) -> Iterator[Violation]:
    """Every region is selected or not, and has a reason."""
    for index, region in graph.regions.items():
        if region.meta.get(SELECTED) is None or not region.meta.get(REASON):
            yield None, f"region {index} lacks 'selected' or 'reason'"


# -- tables ------------------------------------------------------------------------------------------------------------

_RULES: dict[Stage, tuple[Rule, ...]] = {
    Stage.LIFTED: (names, links, outputs, order, effects, types, expressions, subgraphs, operators),
    Stage.JUDGED: (judged,),
    Stage.PARTITIONED: (membership, table, quotient),
    Stage.INDIRECTED: (parameters,),
    Stage.SELECTED: (selected,),
}
"""The rules that each stage adds to those of earlier stages."""


def verify(graph: Graph, stage: Stage | None = None) -> None:
    """Check ``graph`` against the rules of ``stage`` (its own if None), and its subgraphs against those of their own.

    Raises VerifyError for the first rule that is broken, with the first node (in program order) that breaks it.
    """
    at = graph.stage if stage is None else stage
    for rule in chain.from_iterable(rules for added, rules in _RULES.items() if at.reached(added)):
        for node, reason in rule(graph):
            name = rule.__name__
            raise VerifyError(reason, rule=name, stage=at.value, node=None if node is None else node.name)
    for subgraph in graph.subgraphs.values():
        verify(subgraph)
