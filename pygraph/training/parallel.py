"""DistributedDataParallel, as Dynamo sees it in a training step: gradients are averaged in the graph.

The C++ reducer of DDP sends from hooks of the autograd engine. A graph that holds its own backward pass has none: there
each traced backward pass is followed by the collectives that the reducer would have sent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from pygraph import compat

__all__ = ["average_gradients", "facts", "state", "synchronized", "untraceable"]

_FIRST_BUCKET = 1 << 20
"""Bytes of the gradients that are sent first (1 MiB), as by DDP: the sooner the network is busy, the better."""


def untraceable(model: DistributedDataParallel) -> str:
    """Why what ``model`` does cannot be part of a graph; empty if it can."""
    if type(model) is not DistributedDataParallel:
        return "it is a subclass of DistributedDataParallel"
    options = {
        "find_unused_parameters": "which parameters are used is found in each step",
        "mixed_precision": "it casts parameters",
        "_use_python_reducer": "it is torch's own for compiled autograd",
        "_delay_all_reduce_params": "it delays some of its gradients",
        "_comm_hooks": "it has a communication hook",
        "buffer_hook": "it has a hook for buffers",
    }
    for name, why in options.items():
        if getattr(model, name, None):
            return why
    if model._join_config.enable:
        return "ranks may join it"
    if model._get_ddp_logging_data().get("comm_hook"):
        return "it has a communication hook"
    if any(
        isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse for module in model.modules()
    ):
        return "gradients are sparse"
    if any(buffer.device != model.device for buffer in model.modules_buffers):
        return "a buffer is on another device"
    if _known(model) is None:
        return "other parameters are trained than when it was made"
    return ""


def _known(model: DistributedDataParallel) -> list[torch.Tensor] | None:
    """The parameters that were trained when ``model`` was made: gradients of others stay on their rank. None where
    that cannot be told."""
    count = model._get_ddp_logging_data()["num_parameter_tensors"]
    parameters = list(model._module_parameters)
    trained = [each for each in parameters if each.requires_grad]
    return next((each for each in (parameters, trained) if len(each) == count), None)


def state(model: DistributedDataParallel) -> list[Any]:
    """What may change of ``model`` from step to step and decides on all else here."""
    buffers = map(id, model.module.buffers()) if model.modules_buffers else ()
    return [
        model.process_group.group_name,
        model._join_config.enable,
        len(model._comm_hooks),
        hasattr(model, "buffer_hook"),
        *buffers,
    ]


def facts(model: DistributedDataParallel) -> dict[str, Any]:
    """What a program needs to know of ``model``, as attributes that it guards on."""
    model._assign_modules_buffers()
    kinds: dict[torch.dtype, list[tuple[torch.nn.Module, str]]] = {}
    synchronizes = vars(model)["forward_sync_buffers" if "forward_sync_buffers" in vars(model) else "broadcast_buffers"]
    for name, buffer in model.module.named_buffers() if synchronizes else ():
        if name in model.parameters_to_ignore:
            continue
        owner, _, own = name.rpartition(".")
        kinds.setdefault(buffer.dtype, []).append((model.module.get_submodule(owner), own))
    return {
        "_pygraph_group": model.process_group.group_name,
        "_pygraph_scale": 1.0 / model.process_group.size(),
        "_pygraph_buckets": _buckets(model),
        "_pygraph_buffers": list(kinds.values()),
    }


def _buckets(model: DistributedDataParallel) -> list[list[torch.Tensor]]:
    """Parameters whose gradients are sent together, about in the order in which a backward pass has them ready."""
    made: list[list[torch.Tensor]] = [[]]
    free = min(_FIRST_BUCKET, model.bucket_bytes_cap)
    for parameter in reversed(_known(model) or ()):
        kinds = {(each.dtype, each.device) for each in made[-1]}
        if made[-1] and (free < parameter.nbytes or kinds != {(parameter.dtype, parameter.device)}):
            made.append([])
            free = model.bucket_bytes_cap
        made[-1].append(parameter)
        free -= parameter.nbytes
    return made if made[-1] else []


# -- what Dynamo traces ------------------------------------------------------------------------------------------------


def synchronized(self: Any, inputs: Any, kwargs: Any) -> Any:
    """DDP's own ``forward``: buffers are those of rank 0, and gradients of the next backward pass are averaged."""
    if self.require_forward_param_sync:
        with torch.no_grad():
            for places in self._pygraph_buffers:
                kind = [getattr(owner, name) for owner, name in places]  # a forward pass may have put others there
                flat = torch.cat([buffer.reshape(-1) for buffer in kind])
                latest = _wait(_broadcast(flat, 0, self._pygraph_group))
                for buffer, value in zip(kind, _split(latest, kind)):  # noqa: B905 - Dynamo has no strict
                    buffer.data.copy_(value)  # an earlier forward pass may have saved it, for a backward pass to check
    if self.device_ids:
        inputs, kwargs = _moved(inputs, self.device), _moved(kwargs, self.device)
    result = self.module(*inputs, **kwargs)
    synchronizes = torch.is_grad_enabled() and self.require_backward_grad_sync
    self.require_forward_param_sync = synchronizes
    if synchronizes:
        compat.owe(self, [parameter for bucket in self._pygraph_buckets for parameter in bucket])
    return result


def _moved(value: Any, device: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        return type(value)([_moved(each, device) for each in value])
    if isinstance(value, dict):
        return {key: _moved(each, device) for key, each in value.items()}
    return value


def average_gradients(self: Any, reached: Any) -> None:
    """What follows a backward pass: the average over ranks of the gradients of the parameters that it was the first to
    reach. ``reached`` has a flag for each parameter of all buckets."""
    at = 0
    with torch.no_grad():
        for bucket in self._pygraph_buckets:
            flags = reached[at : at + len(bucket)]
            at += len(bucket)
            updated = [p for p, flag in zip(bucket, flags) if flag and p.grad is not None]  # noqa: B905
            if updated:
                for p, average in zip(updated, _averages(self, [p.grad for p in updated])):  # noqa: B905
                    p.grad.copy_(average)


def _averages(self: Any, gradients: Any) -> Any:
    flat = torch.cat([(each * self._pygraph_scale).reshape(-1) for each in gradients])
    total = _wait(_all_reduce(flat, "sum", self._pygraph_group))
    return _split(total, gradients)


def _split(flat: Any, like: Any) -> Any:
    """The tensors that lie side by side in ``flat``, of the sizes of those in ``like``."""
    parts, at = [], 0
    for each in like:
        parts.append(flat[at : at + each.numel()].view(each.shape))
        at += each.numel()
    return parts


_all_reduce = torch.ops._c10d_functional.all_reduce
_broadcast = torch.ops._c10d_functional.broadcast
_wait = torch.ops._c10d_functional.wait_tensor
