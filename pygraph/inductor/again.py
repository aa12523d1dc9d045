"""What it takes to compile a graph a second time, at run time: the graph as it came, and the state that was around.

AOTAutograd does the same for backward graphs that it compiles late: it keeps the tracing context and enters it again.
Here the context is a new one with the same fake mode, as the original may hold the user's modules.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pygraph import compat

__all__ = ["Original"]


@dataclass(frozen=True)
class Original:
    """A graph before Inductor rewrites it, its fake ``inputs``, the keyword arguments of Inductor's entry, and its
    configuration. ``graphs`` are those of ``gm`` and its subgraphs, by path."""

    gm: torch.fx.GraphModule
    inputs: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    graphs: Mapping[str, torch.fx.Graph]
    config: Mapping[str, Any]
    grad: bool
    inference: bool
    tracing: Any
    compilation: Any

    @classmethod
    def take(cls, gm: torch.fx.GraphModule, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Original:
        """A copy of what is about to be compiled, and of what surrounds it on this thread."""
        return cls(
            gm=gm,
            inputs=tuple(inputs),
            kwargs=dict(kwargs),
            graphs={path: copy.deepcopy(module.graph) for path, module in _modules(gm).items()},
            config=compat.inductor_config.get_config_copy(),
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            tracing=_tracing_like(compat.TracingContext.try_get()),
            compilation=compat.CompileContext.try_get(),
        )

    def restore(self) -> None:
        """Give the module and its subgraphs their graphs back, whatever was made of those, and take back what
        AOTAutograd was told of a program's strides: Inductor accepts no second report."""
        for path, module in _modules(self.gm).items():
            if path in self.graphs:
                module.graph = copy.deepcopy(self.graphs[path])
        context = compat.TracingContext.try_get()
        told = None if context is None else context.output_strides
        if told is not None:
            told.clear()

    @contextlib.contextmanager
    def surroundings(self) -> Iterator[None]:
        """The state that Inductor finds when Dynamo has it compile."""
        with (
            compat.tracing(self.tracing),
            compat.compile_context(self.compilation),
            compat.inductor_config.patch(dict(self.config)),
            torch.inference_mode(self.inference),
            torch.set_grad_enabled(self.grad),
            compat.without_autocast(),
        ):
            yield

    def assumptions(self) -> tuple[object, ...]:
        """What has been assumed of symbolic sizes so far. Dynamo checks only what was when it compiled: a program that
        rests on more is wrong for other sizes."""
        env = getattr(getattr(self.tracing, "fake_mode", None), "shape_env", None)
        if env is None:
            return ()
        ignored = int(env.counter["ignored_backward_guard"])
        return (len(env.guards), ignored, len(env.replacements), len(env.divisible), dict(env.var_to_range))


def _modules(gm: torch.fx.GraphModule) -> dict[str, torch.fx.GraphModule]:
    return {path: m for path, m in gm.named_modules() if isinstance(m, torch.fx.GraphModule)}


def _tracing_like(context: Any) -> Any:
    """A new tracing context that tells Inductor the same: fake mode, facts of AOTAutograd, name of the graph."""
    if context is None:
        return None
    made = compat.TracingContext(context.fake_mode)
    made.fw_metadata = copy.copy(context.fw_metadata)
    made.aot_graph_name = context.aot_graph_name
    made.hop_dispatch_set_cache = context.hop_dispatch_set_cache
    return made
