"""Runs a graph on torch, one operator after the other: the reference for compiled programs and for rewritten graphs.

    graph, [tensor, 3, …]  ── evaluate ──►  {value: tensor or number, …}  ── returned ──►  outputs

``draw_inputs`` makes random inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

import sympy
import torch

from pygraph.frontend.lift import leaves_of
from pygraph.frontend.names import FrontendError, resolve_op
from pygraph.frontend.types import TypeReader, to_fx_arg, torch_dtype
from pygraph.ir import (
    CONSTANT,
    UPLOAD,
    Arg,
    Device,
    Dim,
    Graph,
    GraphRef,
    KernelNode,
    ScalarType,
    TensorType,
    Type,
    Value,
    symbol,
)
from pygraph.ir.text.print import type_text


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How a graph is evaluated.

    Args:
        sizes: values of symbols, by name; not needed for symbols that follow from sizes of inputs
        device: device of the whole run; None: the devices in the graph
        seed: seed of drawn inputs, constants and the n-th draw of each generator; None: operators draw as in torch
        constant: returns the tensor of a ``pygraph.constant`` node; None: draw one of its type
        seen: called after each node with its results, before later nodes write them
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    device: str | None = None
    seed: int | None = None
    constant: Callable[[KernelNode], Any] | None = None
    seen: Callable[[KernelNode, Sequence[Any]], None] | None = None


AS_SAID = Evaluation()
"""The default: devices of the graph, draws of torch."""


def evaluate(graph: Graph, inputs: Sequence[Any], how: Evaluation = AS_SAID) -> dict[Value, Any]:
    """Run ``graph`` on ``inputs``, which it may write. Returns the tensor or number of each of its values.

    Raises FrontendError for inputs of other types than the graph's, and for an operator, literal or size without a
    counterpart in torch. Errors of operators are raised unchanged.
    """
    run = _Run(graph, how, dict(how.sizes))
    with _own_draws(graph, how):
        return run.run(inputs)


def returned(graph: Graph, values: Mapping[Value, Any]) -> list[Any]:
    """The outputs of ``graph``, given its ``values``."""
    return [to_fx_arg(arg, values.__getitem__) for arg in graph.outputs]


def draw_inputs(graph: Graph, how: Evaluation = AS_SAID) -> list[Any]:
    """Random inputs for ``graph``. Each depends only on type, seed and name; sizes not in ``how`` are the hints.

    Raises FrontendError for an opaque input, and for an unknown size.
    """
    run = _Run(graph, how, {**graph.hints, **how.sizes})
    return [run.draw(value.type, value.name) for value in graph.inputs]


@contextmanager
def _own_draws(graph: Graph, how: Evaluation) -> Iterator[None]:
    """Restore torch's generators at the end, if ``how`` seeds them."""
    kinds = {value.type.device.kind for value in graph.values() if isinstance(value.type, TensorType)}
    uses_gpu = how.device is None and "cuda" in kinds and torch.cuda.is_available()
    with torch.random.fork_rng(range(torch.cuda.device_count()) if uses_gpu else [], enabled=how.seed is not None):
        yield


@dataclass(slots=True)
class _Run:
    """State of a run of one graph: values, symbols, and the number of draws from each generator."""

    graph: Graph
    how: Evaluation
    sizes: dict[str, int]
    values: dict[Value, Any] = field(default_factory=dict)
    draws: Counter[str] = field(default_factory=Counter)

    def run(self, inputs: Sequence[Any]) -> dict[Value, Any]:
        if len(inputs) != len(self.graph.inputs):
            raise FrontendError(f"graph {self.graph.name} takes {len(self.graph.inputs)} inputs, not {len(inputs)}")
        for value, given in zip(self.graph.inputs, inputs, strict=True):
            self._set(value, given)
        for value in self.graph.inputs:
            self._check(value)
        for node in self.graph.nodes:
            results = self._results(node)
            if len(results) != len(node.outputs):
                made = f"{len(results)} results, not {len(node.outputs)}"
                raise FrontendError(f"node {node.name}: {node.op} returned {made}")
            for value, result in zip(node.outputs, results, strict=True):
                self._set(value, result)
            if self.how.seen is not None:
                self.how.seen(node, results)
        return self.values

    def draw(self, type: Type, name: str) -> Any:
        """A random value of that type: floats around 0, integers 0 and 1, which are valid indices from size 2 on."""
        if isinstance(type, ScalarType):
            return {"int": 1, "float": 0.5, "bool": True}[type.kind] if type.expr is None else self._number(type.expr)
        if not isinstance(type, TensorType):
            raise FrontendError(f"%{name} is a {type.name}, which cannot be drawn")
        shape, stride = ([self._number(size) for size in sizes] for sizes in (type.shape, type.strides))
        dtype, device = torch_dtype(type.dtype), self._device(type.device)
        generator = torch.Generator().manual_seed(crc32(f"{self.how.seed} {name}".encode()))
        if dtype.is_floating_point or dtype.is_complex:
            wide = torch.promote_types(dtype, torch.float32) if dtype.itemsize > 1 else torch.float32
            drawn = torch.randn(shape, dtype=wide, generator=generator)
        else:
            drawn = torch.randint(2, shape, generator=generator)
        return torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(drawn)

    # -- values and sizes ----------------------------------------------------------------------------------------------

    def _set(self, value: Value, given: Any) -> None:
        """Record the content of ``value``, and the symbols that follow from its sizes."""
        self.values[value] = given
        self.sizes = {**sizes_told(value, given), **self.sizes}

    def _check(self, value: Value) -> None:
        """Raise FrontendError if an input is not of its type."""
        given, wanted = self.values[value], value.type
        if isinstance(wanted, TensorType):
            shape = tuple(map(self._number, wanted.shape))
            dtype = torch_dtype(wanted.dtype)
            if not isinstance(given, torch.Tensor) or given.dtype != dtype or tuple(given.shape) != shape:
                raise FrontendError(f"input {value!r} is {type_text(wanted)}, not {_type_of(given)}")
        elif isinstance(wanted, ScalarType) and type_text(ScalarType(wanted.kind)) != type(given).__name__:
            raise FrontendError(f"input {value!r} is {type_text(wanted)}, not {_type_of(given)}")

    def _number(self, size: Dim) -> Any:
        return number_of(size, self.sizes)

    def _device(self, device: Device) -> str:
        return self.how.device or str(device)

    # -- operators -----------------------------------------------------------------------------------------------------

    def _results(self, node: KernelNode) -> list[Any]:
        if node.op == CONSTANT:
            draw = self.how.constant
            return [draw(node) if draw else self.draw(node.output.type, str(node.attrs.get("target", node.name)))]
        args = [self._arg(arg) for arg in node.args]
        if node.op == UPLOAD:  # torch knows it only once moves of placement are compiled
            return [one.to(args[1], copy=True) for one in args[0]]
        attrs = {key: self._arg(arg) for key, arg in node.attrs.items()}
        generator = node.effects.rng
        if generator is not None and self.how.seed is not None:
            self.draws[generator] += 1
            torch.manual_seed(self.how.seed + self.draws[generator])
        results = [leaf for _, leaf in leaves_of(resolve_op(node.op)(*args, **attrs))]
        return results if self.how.device is None else self._apart(node, results)

    def _apart(self, node: KernelNode, results: list[Any]) -> list[Any]:
        """``results``, where moves between devices are copied: on one device they return their operand itself."""
        shared = {result for result, _ in node.effects.aliases}
        given = {_storage(self.values[value]) for value in node.inputs} - {None}
        return [
            result.clone() if place not in shared and _storage(result) in given else result
            for place, result in enumerate(results)
        ]

    def _arg(self, arg: Arg) -> Any:
        return to_fx_arg(self._placed(arg), self.values.__getitem__, self._other)

    def _placed(self, arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return tuple(map(self._placed, arg))
        return Device.parse(self.how.device) if isinstance(arg, Device) and self.how.device else arg

    def _other(self, arg: sympy.Expr | GraphRef) -> Any:
        return self._number(arg) if isinstance(arg, sympy.Expr) else self._called(self.graph.subgraphs[arg.name])

    def _called(self, graph: Graph) -> Callable[..., Any]:
        """``graph`` as a callable for higher-order operators."""

        def call(*inputs: Any) -> tuple[Any, ...]:
            how = replace(self.how, seen=None)
            inner = _Run(graph, how, dict(self.sizes), draws=self.draws)
            return tuple(returned(graph, inner.run(inputs)))

        return call


def number_of(size: Dim, sizes: Mapping[str, int]) -> Any:
    """``size`` as a number, with symbols from ``sizes``. Raises FrontendError if a symbol is missing."""
    if not isinstance(size, sympy.Expr):
        return size
    found = size.subs({symbol(name): value for name, value in sizes.items()})
    if not found.is_number:
        names = ", ".join(sorted(one.name for one in found.free_symbols))
        raise FrontendError(f"the size {names} is not known before the graph runs")
    return int(found) if found.is_Integer else float(found)


def sizes_told(value: Value, given: Any) -> dict[str, int]:
    """The symbols that follow from the sizes of ``given``, the content of ``value``."""
    if isinstance(value.type, TensorType) and isinstance(given, torch.Tensor):
        pairs: list[tuple[Any, Any]] = list(zip(value.type.shape, given.shape, strict=False))
    else:
        pairs = [(value.type.expr, given)] if isinstance(value.type, ScalarType) else []
    return {size.name: int(known) for size, known in pairs if isinstance(size, sympy.Symbol)}


def _storage(value: Any) -> int | None:
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else None


def _type_of(value: object) -> str:
    return type_text(TypeReader().type_of(value))
