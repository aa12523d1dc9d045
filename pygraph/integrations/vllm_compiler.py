"""PyGraph behind vLLM's compiler interface, and queries on the graphs of its pieces. A platform plugin names it:

    get_compile_backend = classmethod(lambda cls: "pygraph.integrations.vllm_compiler.Compiler")

Interface: ``CompilerInterface`` of ``vllm/compilation/compiler_interface.py`` at 193d8f3a24c8.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from vllm.compilation.compiler_interface import CompilerInterface

import pygraph
from pygraph.backend import pygraph as backend

__all__ = ["Compiler", "layout_of", "memory_for", "unset_outputs"]

_UNSET: dict[Any, Any] = {torch.empty: torch.zeros, torch.empty_like: torch.zeros_like, "new_empty": "new_zeros"}
_VIEWS = {"view", "reshape", "flatten", "unflatten", torch.reshape, torch.flatten}


def unset_outputs(graph: torch.fx.GraphModule) -> tuple[int, ...]:
    """Outputs of a piece without content: memory for the next attention operator, which no other output shares."""
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    results = output.args[0] if isinstance(output.args[0], (tuple, list)) else ()
    found: list[int] = []
    for node in graph.graph.nodes:
        views = [node] if node.target in _UNSET else []
        for view in views:  # grows
            views += [user for user in view.users if user.target in _VIEWS and user.args[0] is view]
        shown = [index for index, result in enumerate(results) if result in views]
        if len(shown) == 1 and all(user is output or user in views for view in views for user in view.users):
            found += shown
    return tuple(found)


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Sizes, strides, dtype and device of a tensor, as plain values."""
    return tuple(tensor.size()), tensor.stride(), tensor.dtype, tensor.device


def memory_for(layout: tuple[Any, ...]) -> torch.Tensor:
    """An uninitialised tensor with that layout."""
    return torch.empty_strided(layout[0], layout[1], dtype=layout[2], device=layout[3])


class Compiler(CompilerInterface):  # type: ignore[misc]
    """Compiles each piece with ``backend="pygraph"``, which captures by itself: set vLLM's ``cudagraph_mode`` to NONE.
    vLLM does not cache it on disk. Memory that a piece leaves unset is zeroed, so that runs can be compared."""

    name = "pygraph"

    def compute_hash(self, vllm_config: Any) -> str:  # noqa: ARG002 - vLLM adds that of its configuration
        """Hash of the version of PyGraph."""
        return hashlib.sha256(f"pygraph {pygraph.__version__}".encode()).hexdigest()[:10]

    def compile(
        self,
        graph: torch.fx.GraphModule,
        example_inputs: list[Any],
        compiler_config: dict[str, Any] | None,
        compile_range: Any,  # noqa: ARG002 - inputs have its sizes
        key: str | None = None,  # noqa: ARG002
    ) -> tuple[Callable[..., Any], None]:
        """Compile a piece, with vLLM's passes over Inductor's graph. Returns it, and no handle for loading it."""
        own = copy.deepcopy(graph)
        for node in own.graph.nodes:
            node.target = _UNSET.get(node.target, node.target)
        own.recompile()
        return backend(own, example_inputs, options={"inductor": dict(compiler_config or {})}), None
