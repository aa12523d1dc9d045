"""The IR: values, kernel nodes, graphs, costs, text. Imports sympy and ``pygraph.errors`` only, never torch."""

from pygraph.ir.annotations import (
    CAPTURABLE,
    DETAIL,
    MADE_FROM,
    PLACEMENT,
    REASON,
    REGION,
    SELECTED,
    TAGS,
    Parameter,
    Region,
    sources,
)
from pygraph.ir.cost import FREE, H200, HOST, UNKNOWN, Cost, DeviceModel, Peak
from pygraph.ir.dims import canonical
from pygraph.ir.effects import PURE, Effects
from pygraph.ir.graph import Graph, GraphError, Stage
from pygraph.ir.node import (
    CONSTANT,
    UPLOAD,
    Arg,
    GraphRef,
    KernelNode,
    Location,
    Meta,
    MetaKey,
    Token,
    Value,
    base_name,
    graph_refs_in,
    map_arg,
    values_in,
)
from pygraph.ir.order import dependences, memory_roots
from pygraph.ir.text.parse import parse
from pygraph.ir.text.print import print_graph
from pygraph.ir.types import Device, Dim, DType, OpaqueType, ScalarType, TensorType, Type, symbol
from pygraph.ir.verify import verify

__all__ = [
    "CAPTURABLE",
    "CONSTANT",
    "DETAIL",
    "FREE",
    "H200",
    "HOST",
    "MADE_FROM",
    "PLACEMENT",
    "PURE",
    "REASON",
    "REGION",
    "SELECTED",
    "TAGS",
    "UNKNOWN",
    "UPLOAD",
    "Arg",
    "Cost",
    "DType",
    "Device",
    "DeviceModel",
    "Dim",
    "Effects",
    "Graph",
    "GraphError",
    "GraphRef",
    "KernelNode",
    "Location",
    "Meta",
    "MetaKey",
    "OpaqueType",
    "Parameter",
    "Peak",
    "Region",
    "ScalarType",
    "Stage",
    "TensorType",
    "Token",
    "Type",
    "Value",
    "base_name",
    "canonical",
    "dependences",
    "graph_refs_in",
    "map_arg",
    "memory_roots",
    "parse",
    "print_graph",
    "sources",
    "symbol",
    "values_in",
    "verify",
]
