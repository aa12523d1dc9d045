"""Predictions beside measurements, of programs that nothing was fitted to: operators, small graphs, calls.

Costs are those of the IR: each program is traced, lifted, and costed as a compiled one is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from pygraph import compat
from pygraph.calibration.fitting import quartiles
from pygraph.calibration.launching import moved, replayed, uncaptured
from pygraph.calibration.records import DEVICE, HOST_CALL, Point
from pygraph.calibration.targets import CHECKED_CHAINS, CHECKED_WIDES, Program, Target
from pygraph.calibration.timing import Sampler, Samples
from pygraph.frontend.lift import lift
from pygraph.ir import DeviceModel, Graph
from pygraph.passes.analysis import node_time_us

__all__ = ["Check", "Workload", "calls", "graph_time_us", "operators", "points", "workloads"]


LEAST_US = 1e-3
"""No prediction is less: figures may be 0 where noise hides them, and errors are of logarithms."""


@dataclass(frozen=True)
class Workload:
    """A function of tensors, and its arguments. ``kind`` groups workloads in a plot."""

    kind: str
    name: str
    fn: Callable[..., Any]
    args: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Check:
    """One prediction to be: what is timed, and what a model says of it (None where it cannot)."""

    panel: str
    kind: str
    name: str
    sampler: Sampler
    predict: Callable[[DeviceModel], float | None]


def operators(target: Target, chosen: Sequence[Workload]) -> list[Check]:
    """The device time of ``chosen``."""
    return [_operator(target, work) for work in chosen]


def points(chosen: Sequence[Check], samples: Samples, model: DeviceModel) -> list[Point]:
    """What ``model`` predicts beside the medians of ``samples``; what it cannot predict is left out."""
    found = []
    for check, times in zip(chosen, samples, strict=True):
        predicted = check.predict(model)
        if predicted is not None:
            low, median, high = quartiles(times)
            found.append(Point(check.panel, check.kind, check.name, max(predicted, LEAST_US), median, low, high))
    return found


def _operator(target: Target, work: Workload) -> Check:
    sampler = target.device(lambda: work.fn(*work.args))
    graph = _lifted(work)
    return Check(DEVICE, work.kind, work.name, sampler, lambda model: graph_time_us(graph, model))


def graph_time_us(graph: Graph, model: DeviceModel) -> float | None:
    """The device time of all operators of ``graph``; None where the cost of one is unknown."""
    times = [node_time_us(node, model, graph.hints) for node in graph.nodes]
    return None if None in times else sum(time for time in times if time is not None)


def _lifted(work: Workload) -> Graph:
    traced: torch.fx.GraphModule = compat.make_fx(lambda *args: work.fn(*args), tracing_mode="fake")(*work.args)
    return lift(traced, kind="inference")


def calls(target: Target, stack: ExitStack) -> list[Check]:
    """The host time of calls of small graphs, uncaptured and replayed. ``stack`` closes what is held."""
    chains = [target.chain(count) for count in CHECKED_CHAINS]
    wides = [target.wide(count) for count in CHECKED_WIDES]
    return [
        *_named("uncaptured", chains, uncaptured(target, chains), _uncaptured_us),
        *_named("replay", chains, replayed(target, chains, stack), _replayed_us),
        *_named("replay, moved", wides, moved(target, wides, stack), _moved_us),
    ]


def _named(
    kind: str, programs: Sequence[Program], samplers: Sequence[Sampler], predict: Callable[[DeviceModel, int], float]
) -> Iterator[Check]:
    for program, sampler in zip(programs, samplers, strict=True):
        yield Check(HOST_CALL, kind, f"{program.launches} launches", sampler, _of(predict, program.launches))


def _of(predict: Callable[[DeviceModel, int], float], launches: int) -> Callable[[DeviceModel], float]:
    return lambda model: predict(model, launches)


def _uncaptured_us(model: DeviceModel, launches: int) -> float:
    return model.uncaptured_us(launches)


def _replayed_us(model: DeviceModel, launches: int) -> float:
    return model.replayed_us(launches)


def _moved_us(model: DeviceModel, launches: int) -> float:
    return model.replayed_us(launches, launches * model.patch_us)


# -- workloads ---------------------------------------------------------------------------------------------------------


def workloads(kind: str) -> list[Workload]:
    """Operators and small graphs of several sizes for a CPU, or for the current CUDA device, in its usual types."""
    make = _Maker(kind, torch.float16 if kind == "cuda" else torch.float32)
    scale = 8 if kind == "cuda" else 1
    found = [
        *_pointwise(make, scale),
        *_rows(make, scale),
        *_products(make, scale),
        *_attention(make, scale),
        *_graphs(make, scale),
    ]
    if kind == "cuda":
        found += _products(_Maker(kind, torch.float32), 2)
    return found


class _Maker:
    """Tensors of one device and type."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def __call__(self, *size: int) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(0)
        made = torch.rand(size, generator=generator, device=self.device, dtype=torch.float32)
        return (made - 0.5).to(self.dtype)

    def named(self, *size: int) -> str:
        """``f16[64, 64]``, for names of workloads."""
        letters = {torch.float16: "f16", torch.float32: "f32"}[self.dtype]
        return f"{letters}{list(size)}"


def _pointwise(make: _Maker, scale: int) -> Iterator[Workload]:
    for count in (3000, 50_000 * scale, 400_000 * scale * scale):
        x, y = make(count), make(count)
        yield Workload("pointwise", f"add {make.named(count)}", torch.add, (x, y))
        yield Workload("pointwise", f"silu {make.named(count)}", functional.silu, (x,))
        yield Workload("copy", f"clone {make.named(count)}", torch.clone, (x,))


def _rows(make: _Maker, scale: int) -> Iterator[Workload]:
    for rows, width in ((16, 64), (96 * scale, 768), (256 * scale, 1024)):
        x, weight = make(rows, width), make(width)
        size = make.named(rows, width)
        yield Workload("reduction", f"sum {size}", _sum, (x,))
        yield Workload("normalisation", f"softmax {size}", _softmax, (x,))
        yield Workload("normalisation", f"layer_norm {size}", _layer_norm, (x, weight))
        yield Workload("copy", f"transpose {size}", _transposed, (x,))


def _products(make: _Maker, scale: int) -> Iterator[Workload]:
    for m, k, n in ((8, 96, 96), (24 * scale, 192 * scale, 96 * scale), (72 * scale, 96 * scale, 384 * scale)):
        name = f"mm {make.named(m, k)} × {make.named(k, n)}"
        yield Workload("matrix product", name, torch.mm, (make(m, k), make(k, n)))
    batched = (make(6, 40 * scale, 48), make(6, 48, 40 * scale))
    yield Workload("matrix product", f"bmm {make.named(6, 40 * scale, 48)}", torch.bmm, batched)


def _attention(make: _Maker, scale: int) -> Iterator[Workload]:
    for batch, heads, length in ((1, 4, 64), (2, 6, 96 * scale)):
        size = (batch, heads, length, 64)
        operands = (make(*size), make(*size), make(*size))
        yield Workload("attention", f"attention {make.named(*size)}", functional.scaled_dot_product_attention, operands)


def _graphs(make: _Maker, scale: int) -> Iterator[Workload]:
    for rows, width in ((4, 48), (24 * scale, 96 * scale)):
        weights = (make(width, 3 * width), make(3 * width, width), make(width))
        yield Workload("small graph", f"block {make.named(rows, width)}", _block, (make(rows, width), *weights))
    tensors = (make(500), make(500))
    yield Workload("small graph", f"chain {make.named(500)}", _chain, tensors)


def _sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1)


def _softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def _layer_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, (x.shape[-1],), weight, weight)


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous()


def _block(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The feed-forward half of a transformer's layer."""
    return x + functional.gelu(_layer_norm(x, weight) @ up) @ down


def _chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Pointwise operators, as scientific codes have them."""
    for _ in range(6):
        x = torch.sin(x * y) + y
    return x
