"""Chooses the faster library, cuBLAS or cuBLASLt, for each small product with a bias.

    add(bias, mm(x, w))  ◄─►  addmm(bias, x, w)

ATen runs ``mm`` in cuBLAS, and ``addmm`` with a row as its bias in cuBLASLt. For float32, either may choose a kernel
ten times as slow as the other's: on an H100, (8 × 256) (256 × 256) takes 31 µs and 2.8 µs, (64 × 1024) (1024 × 10)
takes 7.5 µs and 20.8 µs. Inductor decides only by the operators that follow. Here both are timed, once per machine and
size. In half precision, both have the same kernels.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed

from pygraph import compat
from pygraph.cache import kept_under, load_json, store_json
from pygraph.runtime.identity import machine

_MM, _ADD, _ADDMM = torch.ops.aten.mm.default, torch.ops.aten.add.Tensor, torch.ops.aten.addmm.default

_LARGEST = 1 << 31
"""Most floating-point operations of a product that is timed: for larger ones, both libraries fill the device."""

_MARGIN = 0.9
"""The other form is chosen if it takes less than this fraction of the time."""

_ROUNDS, _LAUNCHES = 16, 20
_AGREE = 1.1
"""The least time counts once another round took at most this multiple of it: other processes may use the device."""
_ASLEEP, _LONGEST = 1_000_000, 32_000_000
"""Cycles that the device sleeps while the host issues a round: at first (about half a millisecond), and at most."""


class Times(NamedTuple):
    """Device time in µs of either form, and of a separate kernel that adds the bias."""

    mm: float
    addmm: float
    add: float


@dataclass(frozen=True, slots=True)
class _Product:
    """``node`` adds ``bias`` to ``x @ w``: it is an ``addmm``, or an ``add`` whose operand ``product`` is a ``mm`` with
    no other user. For an ``addmm``, ``product`` is ``node`` itself."""

    node: torch.fx.Node
    product: torch.fx.Node
    bias: Any
    x: Any
    w: Any

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        """The traced values of bias, x and w."""
        return tuple(node.meta["val"] for node in (self.bias, self.x, self.w))

    @property
    def is_fused(self) -> bool:
        """True for an ``addmm``."""
        return self.node is self.product

    def prefers(self, times: Times) -> bool:
        """True if the other form is faster."""
        if not self.is_fused:
            return times.addmm < _MARGIN * times.mm
        alone = any(torch.Tag.pointwise not in getattr(user.target, "tags", ()) for user in self.node.users)
        return times.mm + alone * times.add < _MARGIN * times.addmm

    def __str__(self) -> str:
        (m, k), n = self.operands[1].shape, self.operands[2].shape[1]
        return f"{self.node.name} ({m} × {k}, {k} × {n}) is {'a mm and an add' if self.is_fused else 'an addmm'}"

    def exchange(self) -> None:
        """Replace it by the other form, at the place of ``product``: a later operator may write the operands."""
        graph, value = self.node.graph, self.node.meta
        with graph.inserting_before(self.product):
            if self.is_fused:
                product = graph.call_function(_MM, (self.x, self.w))
                product.meta = dict(value)
                made = graph.call_function(_ADD, (product, self.bias))
            else:
                made = graph.call_function(_ADDMM, (self.bias, self.x, self.w))
            made.meta = dict(value)
        self.node.replace_all_uses_with(made)
        for old in dict.fromkeys((self.node, self.product)):
            graph.erase_node(old)


class Products:
    """Rewrites the products of graphs after Inductor's own passes; ``notes`` list the rewritten ones. Times are kept
    in ``cache_dir``.

    Nothing is timed if Inductor tunes products itself, or if this process is one of several: ranks that compute the
    same values have to round alike.
    """

    def __init__(self, cache_dir: str | None) -> None:
        self.notes: list[str] = []
        self._cache_dir = cache_dir

    def choose(self, gm: torch.fx.GraphModule) -> None:
        """Exchange the products of ``gm`` that are faster in their other form."""
        tuned = compat.inductor_config.max_autotune or compat.inductor_config.max_autotune_gemm
        if tuned or _several_ranks() or compat.absent(compat.cuda_sleep):
            return
        nodes = {node: place for place, node in enumerate(gm.graph.nodes)}
        for node in nodes:
            product = _product(node)
            if product is None or nodes.get(product.bias, math.inf) > nodes[product.product]:
                continue
            times = self._times(*product.operands)
            if times is not None and product.prefers(times):
                self.notes.append(f"{product}: mm takes {times.mm:.1f} µs, addmm {times.addmm:.1f} µs")
                product.exchange()

    def _times(self, bias: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Times | None:
        """Stored times, or else measured ones; None if nothing can be measured."""
        facts = (torch.__version__, torch.get_float32_matmul_precision(), machine(x.device))
        key = repr((*facts, [(*value.shape, value.stride()) for value in (bias, x, w)]))
        if key not in _known:
            path = kept_under(self._cache_dir, "products", key)
            _known[key] = _read(path) or _measured(path, bias, x, w)
        return _known[key]


_known: dict[str, Times | None] = {}


def _product(node: torch.fx.Node) -> _Product | None:
    """The product with a bias whose last node is ``node``, if it is one to time; else None."""
    if node.kwargs or node.target not in (_ADD, _ADDMM):
        return None
    parts: tuple[Any, ...] = (node, *node.args) if node.target is _ADDMM else _split(*node.args)
    product, bias, x, w = parts
    values: list[Any] = [given.meta.get("val") if isinstance(given, torch.fx.Node) else None for given in (bias, x, w)]
    if not all(isinstance(value, torch.Tensor) and value.is_cuda for value in values):
        return None
    sizes = [size for value in values for size in (*value.shape, *value.stride())]
    if [value.dim() for value in values] != [1, 2, 2] or not all(type(size) is int for size in sizes):
        return None
    (m, k), n = values[1].shape, values[2].shape[1]
    if {value.dtype for value in values} != {torch.float32} or values[0].shape[0] != n:
        return None
    return _Product(node, product, bias, x, w) if 0 < 2 * m * k * n <= _LARGEST else None


def _split(one: Any, other: Any) -> tuple[Any, Any, Any, Any]:
    """The ``mm`` among the operands of a sum, if it has no other user; the other operand, x and w. Else four Nones."""
    for product, bias in ((one, other), (other, one)):
        if isinstance(product, torch.fx.Node) and product.target is _MM and len(product.users) == 1:
            return product, bias, *product.args
    return None, None, None, None


def _read(path: Path | None) -> Times | None:
    found: Any = None if path is None else load_json(path)
    try:
        times = Times(*(float(found[name]) for name in Times._fields))
    except (KeyError, TypeError, ValueError):
        return None
    return times if all(0 < time < math.inf for time in times) else None


def _measured(path: Path | None, *operands: torch.Tensor) -> Times | None:
    try:
        times = measure(*operands)
    except RuntimeError:  # memory is short, or the caller's stream is being captured
        return None
    if path is not None:
        with contextlib.suppress(OSError):
            store_json(path, times._asdict())
    return times


def _several_ranks() -> bool:
    """True if this process is one of several: they might decide differently."""
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


def measure(bias: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Times:
    """Time both forms on tensors like these, on the current stream. Raises RuntimeError if they cannot be timed."""
    with compat.without_dispatch_modes(), torch.no_grad(), torch.cuda.device(x.device):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the current stream is being captured")
        like: Any = {"dtype": x.dtype, "device": x.device}
        a, b, c = (torch.empty_strided(each.shape, each.stride(), **like).zero_() for each in (bias, x, w))
        out = torch.empty(x.shape[0], w.shape[1], **like)
        forms: tuple[Callable[[], Any], ...] = (
            lambda: torch.mm(b, c, out=out),
            lambda: torch.addmm(a, b, c, out=out),
            lambda: torch.add(out, a, out=out),
        )
        return Times(*map(_least, forms))


def _least(form: Callable[[], Any]) -> float:
    """The least time of ``form`` in µs. Raises RuntimeError if no two rounds agree on it."""
    form()
    asleep, seen = _ASLEEP, list[float]()
    for _ in range(_ROUNDS):
        took = _round(form, asleep)
        if took is None:
            asleep = min(2 * asleep, _LONGEST)
            continue
        seen = sorted([*seen, took])[:2]
        if len(seen) == 2 and seen[1] <= _AGREE * seen[0]:
            return seen[0]
    raise RuntimeError("the device is too busy to time a product")


def _round(form: Callable[[], Any], asleep: int) -> float | None:
    """Device time in µs per launch, of several launches that are queued while the device sleeps; None if the sleep was
    too short, so that the device had to wait for the host."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    compat.cuda_sleep(asleep)
    start.record()
    for _ in range(_LAUNCHES):
        form()
    late = start.query()
    end.record()
    end.synchronize()
    return None if late else float(start.elapsed_time(end)) / _LAUNCHES * 1000
