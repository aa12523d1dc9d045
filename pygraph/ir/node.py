"""Values and kernel nodes, which define the meaning of a program, and the typed annotations that passes compute.

They are changed only through ``pygraph.ir.graph.Graph``, which keeps names, users and order consistent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Generic, TypeAlias, TypeVar, cast

import sympy

from pygraph.errors import Location
from pygraph.ir.cost import COST_FIELDS, UNKNOWN, Cost
from pygraph.ir.effects import PURE, Effects
from pygraph.ir.types import Device, DType, Type
from pygraph.text.words import name_text

__all__ = [
    "CONSTANT",
    "UPLOAD",
    "Arg",
    "GraphRef",
    "KernelNode",
    "Location",
    "Meta",
    "MetaKey",
    "Token",
    "Value",
    "base_name",
    "leaves",
    "map_arg",
    "values_in",
]

T = TypeVar("T")

CONSTANT = "pygraph.constant"
"""The operator of a node for a tensor or an opaque object that the program holds; ``target`` names the object."""

UPLOAD = "pygraph.upload.default"
"""``upload(Tensor[] xs, Device device) -> Tensor[]``: copies of CPU tensors on a device, each in its own storage."""


@dataclass(frozen=True, slots=True)
class Token:
    """An enumerated constant of the source program, such as a memory format; printed ``#name``."""

    name: str


@dataclass(frozen=True, slots=True)
class GraphRef:
    """A subgraph of this graph, by name; printed ``graph @name``."""

    name: str


RESERVED = (*COST_FIELDS, "in", "loc", "function", "code", "frames")
"""Names in ``.pgir`` text of a node's cost, module and source line; annotations cannot have these names."""


@dataclass(frozen=True, slots=True)
class MetaKey(Generic[T]):
    """The name and type of an annotation. Two keys with one name must have the same type.

    Raises ValueError for a name in ``RESERVED``, TypeError for a type without text: an annotation is a literal or
    a tuple of literals.
    """

    name: str
    type: type[T]

    def __post_init__(self) -> None:
        if self.name in RESERVED:
            raise ValueError(f"an annotation cannot be called '{self.name}': .pgir text reserves {', '.join(RESERVED)}")
        if not issubclass(self.type, _PRINTABLE):
            names = ", ".join(kind.__name__ for kind in _PRINTABLE)
            raise TypeError(f"annotation '{self.name}' cannot be a {self.type.__name__}: it must be one of {names}")


@dataclass(slots=True)
class Meta:
    """Annotations of one node or region. They are typed and printable; dropping them keeps the program's meaning."""

    _entries: dict[str, object] = field(default_factory=dict)

    def get(self, key: MetaKey[T]) -> T | None:
        """The annotation under ``key``, or None."""
        return cast("T | None", self._entries.get(key.name))

    def set(self, key: MetaKey[T], value: T) -> None:
        """Annotate. Raises TypeError if ``value`` is not of the key's type or has no text, or ``key`` is no MetaKey."""
        if not isinstance(key, MetaKey):
            raise TypeError(f"annotations are set by a MetaKey, such as REASON, and not by {key!r}")
        if not isinstance(value, key.type):
            raise TypeError(f"annotation '{key.name}' must be {key.type.__name__}, not {type(value).__name__}")
        _check_printable(key.name, value)
        self._entries[key.name] = value

    def drop(self, *keys: MetaKey[Any]) -> None:
        """Remove annotations; missing ones are ignored."""
        for key in keys:
            self._entries.pop(key.name, None)

    def items(self) -> list[tuple[str, object]]:
        """Entries sorted by name."""
        return sorted(self._entries.items())

    def copy(self) -> Meta:
        """An independent copy."""
        return Meta(dict(self._entries))

    def __contains__(self, key: MetaKey[T]) -> bool:
        return key.name in self._entries


_PRINTABLE = (bool, int, float, complex, str, tuple, DType, Device, Token, GraphRef, sympy.Expr, type(None))


def _check_printable(name: str, value: object) -> None:
    if isinstance(value, tuple):
        for item in value:
            _check_printable(name, item)
    elif not isinstance(value, _PRINTABLE):
        raise TypeError(f"annotation '{name}' cannot hold a {type(value).__name__}: it has no text")


@dataclass(slots=True, eq=False)
class Value:
    """One result of a node, or one input of the graph.

    Args:
        name: unique in the graph; for an input, the user's name if known (``layers.0.weight``)
        type: a tensor, a host scalar or an opaque object
        producer: node that returns the value; None for an input
        index: position among the results of ``producer``
        role: role of an input: input, parameter, buffer, saved, tangent, scalar or constant; empty for a result
        static: true for an input whose address does not change between calls
        placeholder: name of an input in the FX graph and in Inductor's program (``primals_3``)
        users: nodes that read the value, in order of first use, with the number of uses
    """

    name: str
    type: Type
    producer: KernelNode | None = None
    index: int = 0
    role: str = ""
    static: bool = False
    placeholder: str = ""
    users: dict[KernelNode, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        """As in ``.pgir`` text: ``%name``, or ``%name.index`` for one of several results."""
        if self.producer is None or len(self.producer.outputs) == 1:
            return f"%{name_text(self.name if self.producer is None else self.producer.name)}"
        return f"%{name_text(self.producer.name)}.{self.index}"


Literal: TypeAlias = int | float | complex | bool | str | sympy.Expr | DType | Device | Token | GraphRef | None
"""Literals in operands, attributes and annotations."""

Arg: TypeAlias = "Value | Literal | tuple[Arg, ...]"
"""An operand or attribute: a value, a literal, or a tuple of these."""


def values_in(arg: Arg) -> Iterator[Value]:
    """Every value in ``arg``, in order, with repetitions."""
    return leaves(arg, Value)


def leaves(arg: object, *kinds: type[T]) -> Iterator[T]:
    """The items of ``kinds`` in ``arg``, in order, at any depth of tuples."""
    if isinstance(arg, kinds):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from leaves(item, *kinds)


def map_arg(arg: Arg, twins: Mapping[Value, Arg]) -> Arg:
    """``arg`` with each value replaced by its twin, if it has one."""
    if isinstance(arg, Value):
        return twins.get(arg, arg)
    if isinstance(arg, tuple):
        return tuple(map_arg(item, twins) for item in arg)
    return arg


@cache
def base_name(op: str) -> str:
    """``op`` without its overload: ``aten.mm`` for ``aten.mm.default``."""
    return ".".join(op.split(".")[:2])


@dataclass(slots=True, eq=False, repr=False)
class KernelNode:
    """One operator: ``outputs = op(*args, **attrs)``.

    Args:
        name: unique in the graph
        op: operator with overload, such as ``aten.mm.default``
        args: positional operands
        attrs: keyword operands
        effects: effects besides computing outputs from inputs
        cost: cost of one run
        loc: the user's source line
        module: path of the user's module that contains the line, or whose gradient the node computes
            (``layers.3.attn``); empty if unknown, or for the whole model
        outputs: results
        after: nodes that must run before this one without a data dependence, in order
        meta: annotations by passes

    Attributes:
        inputs: values in ``args``, then in ``attrs``, flattened; effects refer to positions in this tuple
    """

    name: str
    op: str
    args: tuple[Arg, ...]
    attrs: dict[str, Arg]
    effects: Effects = PURE
    cost: Cost = UNKNOWN
    loc: Location | None = None
    module: str = ""
    inputs: tuple[Value, ...] = field(init=False)
    outputs: tuple[Value, ...] = ()
    after: dict[KernelNode, None] = field(default_factory=dict)
    meta: Meta = field(default_factory=Meta)

    def __post_init__(self) -> None:
        self.inputs = tuple(values_in((*self.args, *self.attrs.values())))

    @property
    def output(self) -> Value:
        """The only output. Raises ValueError if there are none or several."""
        if len(self.outputs) != 1:
            raise ValueError(f"node {self.name} has {len(self.outputs)} outputs")
        return self.outputs[0]

    def __repr__(self) -> str:
        text = f"<{self.name} = {self.op}>"
        return text if text.isprintable() else ascii(text)
