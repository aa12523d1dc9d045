"""Regions for tests: functions compiled by Inductor as a user's would be, with the calls their partitions receive.

Nothing here knows of drivers: a RegionCall is a plain Inductor partition function and the arguments of one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config
from torch._inductor import scheduler
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

__all__ = ["Compiled", "RegionCall", "compile_regions", "copy_arguments", "same_bits"]

Cut = Callable[[Any], bool]
"""Whether an Inductor scheduler node (never a fused one) stays outside every region."""


@dataclass
class RegionCall:
    """One call of a partition function: ``fn(list(args))`` runs it. ``args`` are copies made before the call ran."""

    fn: Callable[[list[Any]], Sequence[Any]]
    args: list[Any]

    def fresh(self, seed: int | None = None) -> list[Any]:
        """Copies of the arguments; with ``seed``, floating ones get new values."""
        copies = copy_arguments(self.args)
        if seed is None:
            return copies
        generator = torch.Generator().manual_seed(seed)
        for value in copies:
            if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
                flat = _elements(value)
                flat.copy_(torch.randn(flat.shape, generator=generator).to(value.dtype))
        return copies

    def run(self, args: Sequence[Any]) -> list[Any]:
        """The uncaptured region on ``args`` (whose tensors it may mutate); the list itself is left alone."""
        return list(self.fn(list(args)))


@dataclass
class Compiled:
    """A compiled function (``call``) and every region call seen so far, in order (``regions``)."""

    call: Callable[..., Any]
    regions: list[RegionCall] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)


def copy_arguments(args: Sequence[Any]) -> list[Any]:
    """Tensors are cloned with their sizes and strides (storage offset 0), everything else is kept."""
    return [_copy_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]


def _copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    flat = _elements(tensor).clone()
    return torch.as_strided(flat, tensor.size(), tensor.stride(), 0)


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """All that ``tensor`` spans, gaps included, in one dimension and each element once."""
    source = tensor.detach()
    spans = zip(source.size(), source.stride(), strict=True)
    count = 1 + sum((n - 1) * s for n, s in spans) if source.numel() else 0
    return torch.as_strided(source, (count,), (1,), source.storage_offset())


def same_bits(left: Any, right: Any) -> bool:
    """Equal type, layout and bits (NaN included) for tensors; ``==`` and type for other values; lists by element."""
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same_bits(a, b) for a, b in zip(left, right, strict=True))
    if not isinstance(left, torch.Tensor):
        return type(left) is type(right) and bool(left == right)
    if left.dtype != right.dtype or left.size() != right.size() or left.stride() != right.stride():
        return False
    return torch.equal(_bytes(left), _bytes(right))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def compile_regions(
    function: Callable[..., Any], *, cut: Cut | None = None, dynamic: bool | None = None, **config: Any
) -> Compiled:
    """Compile ``function`` with Inductor, its program cut into regions at the nodes that ``cut`` names.

    Without ``cut`` the whole forward (and backward) graph is one region each. ``config`` patches Inductor's settings.
    """
    torch._dynamo.reset()
    compiled = Compiled(call=function)

    def backend(graph: Any, inputs: Any) -> Any:
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return compile_fx(graph, inputs, inner_compile=inner)

    def inner(graph: Any, inputs: Any, **options: Any) -> Any:
        settings = {"graph_partition": True, "fx_graph_cache": False, **config}
        cuts = mock.patch.object(scheduler.Scheduler, "should_partition", _answer(cut))
        with cuts, torch._inductor.config.patch(settings):
            output = compile_fx_inner(graph, inputs, **options)
        compiled.sources.append(output.source_code)
        output.recursively_apply_fns([_observer(compiled)] * len(output.partition_maps))
        return output

    compiled.call = torch.compile(function, backend=backend, dynamic=dynamic)
    return compiled


def _answer(cut: Cut | None) -> Callable[[Any, Any], str | None]:
    def should_partition(self: Any, node: Any) -> str | None:
        if isinstance(node, scheduler.FusedSchedulerNode):
            return next(filter(None, (should_partition(self, n) for n in node.snodes)), None)
        return "cut" if cut is not None and cut(node) else None

    return should_partition


def _observer(compiled: Compiled) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(fn: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        def region(args: list[Any]) -> Any:
            compiled.regions.append(RegionCall(fn, copy_arguments(args)))
            return fn(args)

        return region

    return wrap
