"""Graphs as ``.pgir`` text: deterministic, and it parses back to an equal graph.

Names are quoted by ``words``, expressions written by ``pygraph.ir.dims``; ``docs/ir.md`` explains the language.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import sympy

from pygraph.ir.annotations import Region
from pygraph.ir.cost import COST_FIELDS
from pygraph.ir.dims import dim_text
from pygraph.ir.effects import FLAGS, NAMED, Effects
from pygraph.ir.node import GraphRef, KernelNode, Meta, Token, Value
from pygraph.ir.types import Device, DType, ScalarType, TensorType, Type
from pygraph.text.words import name_text, quote, symbol_text, word_text

if TYPE_CHECKING:
    from pygraph.ir.graph import Graph  # which prints itself by this module

_INDENT = "  "


def print_graph(graph: Graph) -> str:
    """``graph`` as ``.pgir`` text, ending in a newline. Raises TypeError for an operand that has no text."""
    return "\n".join(_graph_lines(graph)) + "\n"


def literal_text(arg: object) -> str:
    """Text of an operand, attribute or annotation. Raises TypeError for any other object."""
    if isinstance(arg, Value):
        return repr(arg)
    if isinstance(arg, tuple):
        return f"[{', '.join(map(literal_text, arg))}]"
    if arg is None or isinstance(arg, bool):
        return {None: "None", True: "true", False: "false"}[arg]
    if isinstance(arg, str):
        return quote(arg)
    if isinstance(arg, (int, float)):
        return repr(arg)
    if isinstance(arg, complex):
        return f"complex({arg.real!r}, {arg.imag!r})"
    if isinstance(arg, sympy.Expr):
        return str(arg) if isinstance(arg, sympy.Integer) else f"$({dim_text(arg)})"
    if isinstance(arg, DType):
        return arg.value
    if isinstance(arg, Device):
        return _device_text(arg)
    if isinstance(arg, Token):
        return f"#{word_text(arg.name)}"
    if isinstance(arg, GraphRef):
        return f"graph @{symbol_text(arg.name)}"
    raise TypeError(f"a {type(arg).__name__} has no .pgir text")


@lru_cache(maxsize=4096)
def type_text(type: Type) -> str:
    """Text of a type: ``f32[s0, 16]{16, 1}@cuda:0``, ``int(s0)``, ``opaque<"name">``."""
    if isinstance(type, TensorType):
        stride = "" if type.stride is None else f"{{{_dims_text(type.stride)}}}"
        return f"{type.dtype.value}[{_dims_text(type.shape)}]{stride}{_device_text(type.device)}"
    if isinstance(type, ScalarType):
        return type.kind if type.expr is None else f"{type.kind}({dim_text(type.expr)})"
    return f"opaque<{quote(type.name)}>"


def _dims_text(dims: Iterable[int | sympy.Expr]) -> str:
    return ", ".join(map(dim_text, dims))


def _device_text(device: Device) -> str:
    return f"@{symbol_text(device.kind)}" + ("" if device.index is None else f":{device.index}")


def _graph_lines(graph: Graph) -> Iterator[str]:
    hints = ", ".join(f"{word_text(name)} = {value}" for name, value in sorted(graph.hints.items()))
    settings = f"kind = {word_text(graph.kind)}, stage = {graph.stage.value}"
    settings += f", hints = {{{hints}}}" if hints else ""
    settings += f", operators = [{', '.join(map(word_text, sorted(graph.operators)))}]" if graph.operators else ""
    yield f"graph @{symbol_text(graph.name)} {{{settings}}} (" + ("" if graph.inputs else ") {")
    for value in graph.inputs:
        facts = f"role = {word_text(value.role)}" + (", static" if value.static else "")
        if value.placeholder != value.name:
            facts += f", placeholder = {word_text(value.placeholder)}"
        yield f"{_INDENT}{value!r} : {type_text(value.type)} {{{facts}}},"
    if graph.inputs:
        yield ") {"
    for node in graph.nodes:
        yield _INDENT + _node_text(node)
    yield f"{_INDENT}return ({', '.join(map(literal_text, graph.outputs))})"
    if graph.regions:
        yield "} regions {"
        yield from (_INDENT + _region_text(index, region) for index, region in sorted(graph.regions.items()))
    if graph.subgraphs:
        yield "} subgraphs {"
        for key, subgraph in graph.subgraphs.items():
            lines = list(_graph_lines(subgraph))
            lines[0] = lines[0] if key == subgraph.name else f"@{symbol_text(key)} = {lines[0]}"
            yield from (_INDENT + line for line in lines)
    yield "}"


def _node_text(node: KernelNode) -> str:
    operands = [literal_text(arg) for arg in node.args]
    operands += [f"{word_text(key)} = {literal_text(arg)}" for key, arg in node.attrs.items()]
    name = name_text(node.name)
    target = f"%{name}" if len(node.outputs) == 1 else f"%{name}:{len(node.outputs)}" if node.outputs else f"^{name}"
    parts = [f"{target} = {word_text(node.op)}({', '.join(operands)})"]
    if node.after:
        parts.append(f"after({', '.join(f'^{name_text(before.name)}' for before in node.after)})")
    if node.outputs:
        types = ", ".join(type_text(out.type) for out in node.outputs)
        parts += [":", types if len(node.outputs) == 1 else f"({types})"]
    parts += _effect_texts(node.effects)
    annotations = ", ".join(_annotation_texts(node))
    return " ".join([*parts, f"{{{annotations}}}"] if annotations else parts)


def _effect_texts(effects: Effects) -> Iterator[str]:
    if effects.reads is not None:
        yield f"!reads[{', '.join(map(str, effects.reads))}]"
    if effects.writes:
        yield f"!writes[{', '.join(map(str, effects.writes))}]"
    if effects.aliases:
        yield f"!aliases[{', '.join(f'{output}:{operand}' for output, operand in effects.aliases)}]"
    for kind in NAMED:
        if getattr(effects, kind) is not None:
            yield f"!{kind}({quote(getattr(effects, kind))})"
    yield from (f"!{flag}" for flag in FLAGS if getattr(effects, flag))


def _annotation_texts(node: KernelNode) -> Iterator[str]:
    for field in COST_FIELDS:
        value = getattr(node.cost, field)
        if value is not None:
            yield f"{field} = {dim_text(value)}"
    yield from _meta_texts(node.meta)
    if node.module:
        yield f"in = {quote(node.module)}"
    if node.loc is not None:
        yield f"loc = {quote(str(node.loc))}"
        if node.loc.function:
            yield f"function = {quote(node.loc.function)}"
        if node.loc.code:
            yield f"code = {quote(node.loc.code)}"
        if node.loc.frames:
            yield f"frames = [{', '.join(map(quote, node.loc.frames))}]"


def _meta_texts(meta: Meta) -> Iterator[str]:
    return (f"{word_text(key)} = {literal_text(value)}" for key, value in meta.items())


def _region_text(index: int, region: Region) -> str:
    parameters = (
        f"{value!r}: {word_text(parameter.decision)} {quote(parameter.reason)}"
        for value, parameter in region.parameters.items()
    )
    meta = ", ".join(_meta_texts(region.meta))
    return f"{index} " + (f"{{{meta}}} " if meta else "") + f"({', '.join(parameters)})"
