"""Compares the graphs before and after a pass on random inputs, for ``check="full"``, once this module is imported.

before ──┐  inputs of one seed      ┌── outputs, and inputs that were written
after  ──┴─ evaluate, node by node ─┴── the first node that differs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from pygraph.errors import MeaningError
from pygraph.frontend.interpret import Evaluation, draw_inputs, evaluate, returned
from pygraph.ir import DType, Graph, KernelNode, TensorType
from pygraph.ir.cost import evaluate as number_of
from pygraph.passes.manager import register_comparison
from pygraph.runtime.judge import distance

MEGABYTES = 64
"""Limit on the size of all values of both graphs, MiB; larger graphs are not run."""

TOLERANCES = {DType.F64: 1e-12, DType.F32: 1e-5, DType.F16: 4e-3, DType.BF16: 3e-2}
"""Allowed difference of results, relative to the largest element, by type; the coarsest type in the graphs decides."""


def compare(before: Graph, after: Graph, exact: bool) -> str:
    """Run both graphs. Returns why they were not compared, else an empty text. Raises MeaningError if results differ.

    Args:
        before: the graph before a pass
        after: the graph after the pass
        exact: results must be equal bit by bit; otherwise within TOLERANCES, in floating point
    """
    reason = _unsuitable(before) or _unsuitable(after)
    if reason:
        return reason
    tolerance = 0.0 if exact else max(_tolerance(before), _tolerance(after))
    small = dict(zip(sorted(before.hints), (n for n in count(3) if n % 2), strict=False))
    for sizes in (small, before.hints) if before.hints else (before.hints,):
        if sum(map(sum, (_bytes(graph, sizes) for graph in (before, after)))) > MEGABYTES << 20:
            reason = f"its values take more than {MEGABYTES} MB"
            continue
        how = Evaluation(sizes=sizes, device=_device(before), seed=0)
        try:
            expected = _Observed.run(before, how)
        except Exception as error:  # noqa: BLE001 - operators may refuse drawn inputs, and sizes other than the hints
            reason = f"{type(error).__name__}: {error}"
            continue
        try:
            _hold(after, expected, how, tolerance)
        except MeaningError:
            if _differences(expected, _Observed.run(before, how), tolerance):
                return "its results vary from run to run"
            raise
        return ""
    return reason


@dataclass
class _Observed:
    """Observable values of a run: results of each node by name, outputs, and inputs that were written."""

    nodes: dict[str, list[Any]] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)
    written: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def run(graph: Graph, how: Evaluation) -> _Observed:
        seen = _Observed()

        def note(node: KernelNode, results: Sequence[Any]) -> None:
            seen.nodes[node.name] = [_copy(result) for result in results]

        how = Evaluation(how.sizes, how.device, how.seed, seen=note)
        with torch.no_grad():
            inputs = draw_inputs(graph, how)
            values = evaluate(graph, inputs, how)
        seen.outputs = returned(graph, values)
        seen.written = {value.name: values[value] for value in graph.inputs}
        return seen


def _hold(after: Graph, expected: _Observed, how: Evaluation, tolerance: float) -> None:
    on = ", ".join(f"{name} = {size}" for name, size in sorted(how.sizes.items()))
    on = "on random inputs" + (f" ({on})" if on else "")
    try:
        found = _Observed.run(after, how)
    except Exception as error:
        raise MeaningError(f"{on}, it fails where the graph before did not: {type(error).__name__}: {error}") from error
    different = _differences(expected, found, tolerance)
    if not different:
        return
    what, why = different[0]
    makers = (value.producer for value in after.output_values)
    new = next((node for node in makers if node is not None and node.name not in expected.nodes), None)
    node = next((node for node in after.nodes if _differs(node, expected, found, tolerance)), new)
    if node is None:
        raise MeaningError(f"{on}, {what} differs: {why}")
    where = f" at {node.loc}" if node.loc else ""
    raise MeaningError(f"{on}, {what} differs: {why}; first at {node.name} = {node.op}{where}", node=node.name)


def _differences(expected: _Observed, found: _Observed, tolerance: float) -> list[tuple[str, str]]:
    """Observable differences, in words."""
    pairs = [(f"output {i}", pair) for i, pair in enumerate(zip(expected.outputs, found.outputs, strict=False))]
    pairs += [(f"input %{name} at the end", (one, found.written.get(name))) for name, one in expected.written.items()]
    different = [(what, why) for what, pair in pairs if (why := _difference(*pair, tolerance))]
    if len(expected.outputs) != len(found.outputs):
        different.append(("the number of outputs", f"{len(expected.outputs)} before, {len(found.outputs)} after"))
    return different


def _differs(node: KernelNode, expected: _Observed, found: _Observed, tolerance: float) -> bool:
    """True if results of ``node`` differ from those of the node of that name before the pass; false for a new node."""
    if node.name not in expected.nodes:
        return False
    pairs = zip(expected.nodes[node.name], found.nodes[node.name], strict=False)
    return any(_difference(*pair, tolerance) for pair in pairs)


def _difference(one: Any, other: Any, tolerance: float) -> str:
    """Difference between ``one`` and ``other`` in words, bit by bit if ``tolerance`` is 0; empty if there is none."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
            return next((why for pair in zip(one, other, strict=True) if (why := _difference(*pair, tolerance))), "")
        same = type(one) is type(other) and (one == other or (one != one and other != other))
        return "" if same else f"{one} before, {other} after"
    facts = [(str(each.dtype).removeprefix("torch."), tuple(each.shape), each.device) for each in (one, other)]
    if facts[0] != facts[1]:
        return " before, ".join(f"{dtype} {list(shape)} on {device}" for dtype, shape, device in facts) + " after"
    if not one.numel() or torch.equal(_bits(one), _bits(other)):
        return ""
    distant = distance(one, other)
    if isinstance(distant, str):
        return f"it {distant}"
    off, largest = float(distant.apart.max()), float(distant.magnitude.max())
    return "" if tolerance and off <= tolerance * largest else f"by up to {off:.3g} of {largest:.3g}"


def _bits(value: torch.Tensor) -> torch.Tensor:
    flat = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    dense = flat.detach().clone(memory_format=torch.contiguous_format)  # also normalises strides of size-1 dimensions
    return dense.reshape(-1).view(torch.uint8)


def _copy(result: Any) -> Any:
    return result.detach().clone() if isinstance(result, torch.Tensor) else result


def _unsuitable(graph: Graph) -> str:
    """Reason why ``graph`` cannot be run here; empty if it can."""
    for node in graph.nodes:
        if node.effects.collective is not None:
            return f"{node.op} communicates with other processes"
        if node.effects.barrier and not node.op.startswith("aten."):
            return f"nothing is known of what {node.op} does"
    return next((reason for one in graph.subgraphs.values() if (reason := _unsuitable(one))), "")


def _device(graph: Graph) -> str | None:
    """``cpu`` if this machine lacks a device of the graph; None: the graph's own devices."""
    kinds = {value.type.device.kind for value in graph.values() if isinstance(value.type, TensorType)}
    return None if kinds <= {"cpu"} or (kinds <= {"cpu", "cuda"} and torch.cuda.is_available()) else "cpu"


def _bytes(graph: Graph, sizes: Mapping[str, int]) -> list[float]:
    types = [value.type for value in graph.values() if isinstance(value.type, TensorType)]
    return [number_of(type.nbytes, sizes) or 0 for type in types]


def _tolerance(graph: Graph) -> float:
    types = {value.type.dtype for value in graph.values() if isinstance(value.type, TensorType)}
    return max((TOLERANCES.get(one, 0.0) for one in types), default=0.0)


register_comparison(compare)
