"""torchtitan: a wrapper for its graph trainer. Replace torchtitan's own before the trainer compiles:

    from torchtitan.experiments.graph_trainer import cudagraph
    cudagraph.CUDAGraphWrapper = pygraph.integrations.torchtitan.CUDAGraphWrapper

Interface: ``CUDAGraphWrapper`` of ``torchtitan/experiments/graph_trainer/cudagraph.py`` at b5bcd76c66d0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import pygraph

__all__ = ["CUDAGraphWrapper"]

_VARYING = (torch.Tensor, torch.Generator, bool, int, float, complex, str, type(None))


class CUDAGraphWrapper:
    """Runs at the first call, is captured at the second, and is replayed from the third on. Arguments are used in
    place, without copies, whether or not ``static_input_indices`` lists them. Results are new tensors.

    Opaque arguments, such as a DeviceMesh, must be those of the first call: calls with others run uncaptured. Each
    replay calls collectives once, as the uncaptured run does. Calls with a generator as an argument stay uncaptured.

    Args:
        runnable: a graph of forward and backward pass, run under ``no_grad``
        example_inputs: ignored
        static_input_indices: ignored
        should_check_address: ignored: addresses may change
        tensor_input_indices: ignored
    """

    options: Mapping[str, Any] = {}
    """Options of ``pygraph.graph``, for all wrappers."""

    def __init__(
        self,
        runnable: Callable[..., Any],
        example_inputs: Sequence[Any],  # noqa: ARG002
        static_input_indices: Sequence[int] | None = None,  # noqa: ARG002
        should_check_address: bool = False,  # noqa: ARG002
        tensor_input_indices: Sequence[int] | None = None,  # noqa: ARG002
    ) -> None:
        self._runnable = runnable
        self._opaque: dict[int, Any] | None = None
        self._session = pygraph.Session()
        with self._session.owning():
            self._graph = pygraph.graph(self._run, options=self.options)

    def __call__(self, *args: Any) -> Any:
        opaque = {index: arg for index, arg in enumerate(args) if not isinstance(arg, _VARYING)}
        if self._opaque is None:
            self._opaque = opaque
        known = self._opaque
        if opaque.keys() != known.keys() or any(opaque[index] is not known[index] for index in known):
            return self._runnable(*args)
        return self._graph(*(None if index in known else arg for index, arg in enumerate(args)))

    def _run(self, *args: Any) -> Any:
        assert self._opaque is not None
        return self._runnable(*(self._opaque.get(index, arg) for index, arg in enumerate(args)))

    def print_readable(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``print_readable`` of the wrapped graph."""
        module: Any = getattr(self._runnable, "__self__", self._runnable)
        return module.print_readable(*args, **kwargs)

    def teardown(self) -> None:
        """Free its captures. Later calls run uncaptured."""
        self._session.close()
