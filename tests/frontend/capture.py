"""Captures the FX graphs that AOTAutograd hands to Inductor, without compiling them: what the frontend lifts.

The graphs run as they are, so that a backward graph comes out of a real backward call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config
from torch import fx
from torch._inductor.compile_fx import compile_fx

from pygraph.frontend import lift
from pygraph.ir import Graph


@dataclass
class Captured:
    """One graph as ``inner_compile`` gets it."""

    gm: fx.GraphModule
    kind: str
    static_inputs: Sequence[int]

    def lift(self, **options: Any) -> Graph:
        return lift(self.gm, kind=self.kind, static_inputs=self.static_inputs, **options)


def kind_of(options: dict[str, Any]) -> str:
    if options.get("is_inference"):
        return "inference"
    return "backward" if options.get("is_backward") else "forward"


def compile_and_run(fn: Callable[..., Any], *args: Any, backward: bool = False, dynamic: bool | None = None) -> list[Captured]:
    """Run ``fn`` compiled, then its backward when asked to; the graphs met, in order."""
    found: list[Captured] = []

    def inner(gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[[list[Any]], Any]:
        found.append(Captured(gm, kind_of(options), options.get("static_input_idxs", ())))

        def run(values: list[Any]) -> Any:
            results = gm(*values)
            values.clear()
            return results

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_fx(gm, inputs, inner_compile=inner)

    torch._dynamo.reset()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        results = torch.compile(fn, backend=backend, dynamic=dynamic)(*args)
        if backward:
            _first_tensor(results).float().sum().backward()
    return found


def _first_tensor(results: Any) -> torch.Tensor:
    if isinstance(results, torch.Tensor):
        return results
    items = results.values() if isinstance(results, dict) else results
    return next(_first_tensor(item) for item in items if item is not None)
