"""Writes changes of the IR by passes back into the FX graph from which it was lifted: operands, new nodes, order.

Nodes are matched by name, inputs by the name of their placeholder. A graph that no pass changed is left as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node as FxNode

from pygraph import compat
from pygraph.errors import VerifyError
from pygraph.frontend.lift import leaves_of, result_paths
from pygraph.frontend.names import resolve_op
from pygraph.frontend.types import TypeReader, to_fx_arg
from pygraph.inductor.upload import make_compilable
from pygraph.ir import Graph, KernelNode, TensorType, Type, Value
from pygraph.ir.cost import evaluate
from pygraph.ir.text.print import type_text

_MOVE = torch.ops.prims.device_put.default
_LIFT = torch.ops.aten.lift_fresh_copy.default
"""The only operator that Inductor accepts a constant of the module for."""


def fingerprint(graph: Graph) -> dict[str, str]:
    """The computation of each node as text, by name, and the results of the graph under ``"return"``: taken before
    passes run, and compared afterwards."""
    rows = {node.name: _operands(node) for node in graph.nodes}
    return {**rows, "return": repr(graph.outputs)}


def _operands(node: KernelNode) -> str:
    return f"{node.op} {node.args!r} {list(node.attrs.items())!r}"


def write_back(gm: torch.fx.GraphModule, graph: Graph, lifted: Mapping[str, str]) -> list[str]:
    """Update the FX graph of ``gm`` to ``graph``, whose fingerprint before the passes is ``lifted``.

    Returns notes on the changes. Raises FrontendError for an operator or literal that torch does not have.
    """
    make_compilable()
    writer = _Writer(gm, graph, lifted)
    notes = writer.write()
    if notes:
        gm.graph.lint()
        gm.recompile()
    return notes


class _Writer:
    def __init__(self, gm: torch.fx.GraphModule, graph: Graph, lifted: Mapping[str, str]) -> None:
        self.gm = gm
        self.fx = gm.graph
        self.graph = graph
        self.lifted = lifted
        self.by_name: dict[str, FxNode] = {node.name: node for node in self.fx.nodes}
        items = self.fx.find_nodes(op="call_function", target=operator.getitem)
        self.items: dict[tuple[Any, Any], FxNode] = {(item.args[0], item.args[1]): item for item in items}
        self.changed: list[FxNode] = []

    def write(self) -> list[str]:
        notes = self._write_order()
        made = [node for node in self.graph.nodes if node.name not in self.lifted]
        edited = [n for n in self.graph.nodes if n.name in self.lifted and self.lifted[n.name] != _operands(n)]
        for node in made:
            self._make(node)
        for node in edited:
            fx_node = self.by_name[node.name]
            fx_node.target = resolve_op(node.op)
            fx_node.args, fx_node.kwargs = self._args(node)
            self.changed.append(fx_node)
        if self.lifted["return"] != repr(self.graph.outputs):
            self.fx.output_node().args = (tuple(to_fx_arg(arg, self._value) for arg in self.graph.outputs),)
            notes.append("what the graph returns was rewritten")
        gone = self._erase()
        self._check_results(refresh_values(self.fx, self.changed))
        counts = (("made", len(made)), ("rewritten", len(edited)), ("removed", gone))
        return notes + [f"{count} operators were {verb} by passes" for verb, count in counts if count]

    def _write_order(self) -> list[str]:
        """Put kept nodes in the IR's order, each followed by the getitem nodes of its results.

        Writes of inputs at the end of the program stay there. Inductor relies on that: it computes a value that is
        copied to an input directly in that input, where other nodes read it.
        """
        found = (self.by_name.get(node.name) for node in self.graph.nodes)
        kept = [node for node in found if node is not None and node.op == "call_function"]
        kept.sort(key=self._epilogue().__contains__)
        known = dict.fromkeys(kept)
        if kept == [node for node in self.fx.nodes if node in known]:
            return []
        cursor = next(
            (node for node in reversed(self.fx.nodes) if node.op in ("placeholder", "get_attr")), self.fx._root
        )
        for node in kept:
            for moved in (node, *self._items_of(node)):
                cursor.append(moved)
                cursor = moved
        return ["operators were put in the order of the regions"]

    def _epilogue(self) -> frozenset[FxNode]:
        """The nodes at the end of the program that write its inputs."""
        last = [node for node in reversed(self.fx.nodes) if node.op != "output"]
        return frozenset(takewhile(_writes_input, last))

    def _items_of(self, node: FxNode) -> list[FxNode]:
        direct = [item for (base, _), item in self.items.items() if base is node]
        return [one for item in direct for one in (item, *self._items_of(item))]

    def _make(self, node: KernelNode) -> None:
        """Insert a new node before the first kept node that follows it in the IR."""
        after = self.graph.nodes[self.graph.nodes.index(node) + 1 :]
        anchor = next((self.by_name[n.name] for n in after if n.name in self.by_name), self.fx.output_node())
        args, kwargs = self._args(node)
        target, args = lifted_constant(self.gm, resolve_op(node.op), args)
        with self.fx.inserting_before(anchor):
            made = self.fx.create_node("call_function", target, args, kwargs, name=node.name)
        if made.name != node.name:
            raise RuntimeError(f"FX renamed {node.name} to {made.name}")
        self.by_name[node.name] = made
        self.changed.append(made)

    def _erase(self) -> int:
        kept = {node.name for node in self.graph.nodes}
        gone = [self.by_name[name] for name in self.lifted if name != "return" and name not in kept]
        for node in reversed(gone):
            for item in self._items_of(node):
                self.fx.erase_node(item)
            self.fx.erase_node(node)
        return len(gone)

    def _check_results(self, refreshed: Collection[FxNode]) -> None:
        """Raise VerifyError if the IR's type of a result is not the type that torch computed."""
        types = TypeReader()
        for node in self.graph.nodes:
            fx_node = self.by_name[node.name]
            if fx_node not in refreshed:
                continue
            found = [types.type_of(leaf) for _, leaf in leaves_of(fx_node.meta["val"])]
            noted = [value.type for value in node.outputs]
            pairs = zip(found, noted, strict=False)
            if len(found) != len(noted) or not all(self._agree(*pair) for pair in pairs):
                returned, has = (", ".join(map(type_text, of)) or "nothing" for of in (found, noted))
                where = f" at {node.loc}" if node.loc else ""
                reason = f"{node.op}{where} returns {returned}, and the node has {has}"
                raise VerifyError(reason, rule="results", stage=self.graph.stage.value, node=node.name)

    def _agree(self, found: Type, noted: Type) -> bool:
        """True if two types have one dtype, device and shape, as far as example sizes tell; layouts may differ."""
        if not isinstance(found, TensorType) or not isinstance(noted, TensorType):
            return type(found) is type(noted)
        if (found.dtype, found.device, len(found.shape)) != (noted.dtype, noted.device, len(noted.shape)):
            return False
        sizes = ([evaluate(size, self.graph.hints) for size in type.shape] for type in (found, noted))
        return all(None in pair or pair[0] == pair[1] for pair in zip(*sizes, strict=True))

    # -- operands --------------------------------------------------------------------------------------------------

    def _args(self, node: KernelNode) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kwargs = {key: to_fx_arg(arg, self._value) for key, arg in node.attrs.items()}
        return tuple(to_fx_arg(arg, self._value) for arg in node.args), kwargs

    def _value(self, value: Value) -> FxNode:
        if value.producer is None:
            return self.by_name[value.placeholder]
        node = self.by_name[value.producer.name]
        if node.name in self.lifted:
            path = result_paths(node)[value.index]
        else:  # several results of a new node come in a list
            schema = getattr(node.target, "_schema", None)
            types = [result.type for result in schema.returns] if schema is not None else []
            single = len(types) == 1 and not isinstance(types[0], torch.ListType)
            path = () if single else (value.index,)
        for index in path:
            node = self._item(node, index)
        return node

    def _item(self, node: FxNode, index: int | str) -> FxNode:
        if (node, index) not in self.items:
            with self.fx.inserting_after(node):
                item: FxNode = self.fx.call_function(operator.getitem, (node, index))
            self.items[node, index] = item
            self.changed.append(item)
        return self.items[node, index]


# -- constants and fake results ----------------------------------------------------------------------------------------


def takes_constants(target: Any) -> bool:
    """True if Inductor compiles calls of ``target`` on a constant of the module; other operators need a copy of it."""
    return target in (_LIFT, _MOVE, torch.ops.aten.lift_fresh.default)


def lifted_constant(gm: torch.fx.GraphModule, target: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The call of ``target`` on ``args``, as Inductor accepts it: a move of a constant of ``gm`` is done now."""
    if target is _MOVE and isinstance(args[0], FxNode) and args[0].op == "get_attr":
        return _LIFT, (_moved_constant(gm, args[0], args[1]),)
    return target, args


def _moved_constant(gm: torch.fx.GraphModule, constant: FxNode, device: torch.device) -> FxNode:
    """A node for the tensor of ``constant`` (a ``get_attr``), as a constant of ``gm`` on ``device``.

    It is placed right after ``constant``, and is made once per device.
    """
    name = f"{constant.target}_on_{device.type}_{device.index or 0}".replace(".", "_")
    nodes: list[FxNode] = list(gm.graph.nodes)
    for node in nodes:
        if node.op == "get_attr" and node.target == name:
            return node
    value: torch.Tensor = getattr(gm, str(constant.target))
    mode = compat.detect_fake_mode([node.meta.get("val") for node in nodes])
    with compat.without_dispatch_modes():  # AOTAutograd compiles under its fake mode, and this needs real memory
        moved = value.detach().to(device)
    gm.register_buffer(name, moved)
    with gm.graph.inserting_after(constant):
        made: FxNode = gm.graph.create_node("get_attr", name)
    made.meta["val"] = mode.from_tensor(getattr(gm, name)) if mode is not None else getattr(gm, name)
    return made


def _writes_input(node: FxNode) -> bool:
    schema = getattr(node.target, "_schema", None)
    written = node.args[0] if schema is not None and schema.is_mutable and node.args else None
    return isinstance(written, FxNode) and written.op == "placeholder" and not node.users


def refresh_values(graph: FxGraph, changed: Sequence[FxNode]) -> Collection[FxNode]:
    """Recompute ``meta["val"]`` of the ``changed`` nodes and of nodes that depend on them. Returns all of these."""
    if not changed:
        return ()
    mode = compat.detect_fake_mode([node.meta.get("val") for node in graph.nodes])
    stale = set(changed)
    for node in graph.nodes:
        if node.op != "call_function" or not (node in stale or stale.intersection(node.all_input_nodes)):
            continue
        before = node.meta.get("val")
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
        with mode:
            node.meta["val"] = node.target(*args, **kwargs)
        if node in stale or not _alike(before, node.meta["val"]):
            stale.add(node)
    return stale


def _alike(before: Any, after: Any) -> bool:
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return type(before) is type(after) and not isinstance(before, (torch.Tensor, tuple, list))
    same = (before.dtype, before.device, before.shape) == (after.dtype, after.device, after.shape)
    return same and before.stride() == after.stride()
