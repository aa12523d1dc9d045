"""Replacement for vLLM's wrapper of captured pieces. A platform plugin names it:

    get_static_graph_wrapper_cls = classmethod(lambda cls: "pygraph.integrations.vllm.StaticGraphWrapper")

Interfaces: ``CUDAGraphWrapper`` of ``vllm/compilation/cuda_graph.py`` at a86ed33ec4cf, with ``clear_all_graphs`` and
``cudagraph_wrapper`` of later versions; ``PiecewiseBackend.graph`` of ``vllm/compilation/piecewise_backend.py``, and
``ForwardContext`` of ``vllm/forward_context.py`` at 01fb6e2f5e8e.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, ClassVar

import torch
from vllm.compilation import monitor
from vllm.forward_context import get_forward_context

import pygraph
from pygraph.compat import tree_leaves
from pygraph.integrations.vllm_compiler import layout_of, memory_for, unset_outputs
from pygraph.runtime.native_build import waiting_for_builds

__all__ = ["StaticGraphWrapper", "session"]

_log = logging.getLogger("pygraph.integrations.vllm")

session = pygraph.Session()
"""Owns the captures of all wrappers: ``memory()``, ``stats()``. It is frozen, except during calls that capture."""

_capturing = threading.RLock()
_numbers = itertools.count()


class StaticGraphWrapper:
    """Replaces ``CUDAGraphWrapper``: arguments are used in place, results are new tensors, and there is no pool.
    While vLLM allows captures, a batch descriptor is captured by three calls with its dummy inputs; later, none is.
    Calls with a descriptor that is not captured run ``runnable``; they do not raise.

    - In mode FULL, tensors of the attention metadata are looked up at every call. Numbers in it are those of the
      capture, as in vLLM's own wrapper: they must be equal for equal descriptors.
    - If the model runs on several ranks, nothing is captured.
    """

    _wrappers: ClassVar[weakref.WeakSet[StaticGraphWrapper]] = weakref.WeakSet()

    @classmethod
    def clear_all_graphs(cls) -> None:
        """Forget all captures of all wrappers."""
        for wrapper in list(cls._wrappers):
            wrapper.clear_graphs()
        session.release()

    def __init__(
        self, runnable: Callable[..., Any], vllm_config: Any, runtime_mode: Any, cudagraph_options: Any = None
    ) -> None:
        self.runnable, self.vllm_config, self.runtime_mode = runnable, vllm_config, runtime_mode
        self.compilation_config, self.cudagraph_options = vllm_config.compilation_config, cudagraph_options
        self._whole, ranks = runtime_mode.name == "FULL", vllm_config.parallel_config
        self._alone = ranks.world_size * ranks.data_parallel_size == 1
        piece = vars(runnable).get("graph") if hasattr(runnable, "__dict__") else None
        self._unset = unset_outputs(piece) if isinstance(piece, torch.fx.GraphModule) else ()
        self._graphs: dict[Hashable, Any] = {}
        self._wrappers.add(self)

    def __getattr__(self, name: str) -> Any:
        if name == "runnable":  # during construction
            raise AttributeError(name)
        return getattr(self.runnable, name)

    def unwrap(self) -> Callable[..., Any]:
        return self.runnable

    @property
    def cudagraph_wrapper(self) -> StaticGraphWrapper:
        return self

    def clear_graphs(self) -> None:
        """Forget the captures of this wrapper. Calls are captured again while vLLM allows it."""
        self._graphs.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = get_forward_context()
        if context.cudagraph_runtime_mode != self.runtime_mode or not self._alone:
            return self.runnable(*args, **kwargs)
        metadata = _metadata(context, args, kwargs) if self._whole else ()
        if monitor.cudagraph_capturing_enabled:
            return self._capture(context.batch_descriptor, metadata, args, kwargs)
        graph = self._graphs.get(context.batch_descriptor)
        if graph is None:
            return self.runnable(*args, **kwargs)
        return self._replaced(graph(metadata, *args, **kwargs), memory_for)

    def _capture(self, descriptor: Hashable, metadata: Any, args: Any, kwargs: Any) -> Any:
        with _capturing, session.owning(), waiting_for_builds():
            graph = self._graphs.get(descriptor) or self._graphs.setdefault(descriptor, self._graph(descriptor))
            session.thaw()
            try:
                for _ in range(3):  # runs, is captured, is replayed
                    replays = graph.record.replays
                    result = graph(metadata, *args, **kwargs)
                    if graph.record.replays > replays:
                        break
                else:
                    _log.warning("%s is not captured: %s", descriptor, graph.record.reason)
            finally:
                session.freeze()
        return self._replaced(result, memory_for)

    def _graph(self, descriptor: Hashable) -> Any:
        def run(metadata: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001 - the context leads to it
            return self._replaced(self.runnable(*args, **kwargs), layout_of)

        run.__module__ = "vllm"  # reports search it for the name of memory that is unknown
        run.__qualname__ = f"vllm{next(_numbers)}.{getattr(descriptor, 'num_tokens', descriptor)}"
        held = self.runnable if self._whole else ()
        options = {"order": "program"}  # other orders would be timed during serving
        return pygraph.graph(run, held=held, compare=lambda path, _: "kv_cache" not in path, options=options)

    def _replaced(self, result: Any, function: Callable[..., Any]) -> Any:
        """A result, with ``function`` applied to the outputs without content (see ``unset_outputs``)."""
        if not self._unset:
            return result
        return tuple(function(each) if index in self._unset else each for index, each in enumerate(result))


def _metadata(context: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Tensors on the model's device that the attention operators find in the context."""
    device = next((leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)), None)
    found = _tensors([context.attn_metadata, context.slot_mapping], set())
    return tuple(tensor for tensor in found if tensor.device == device)


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    else:
        value = vars(value) if dataclasses.is_dataclass(value) else value
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        for item in items:
            yield from _tensors(item, seen)
