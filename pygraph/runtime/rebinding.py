"""A region's function over a copy of its globals, so that what it calls can be watched while it is captured.

The compiled module itself is left as it is: other threads go on calling it unwatched.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["module_constants", "rebound"]


@contextlib.contextmanager
def rebound(fn: types.FunctionType, substitute: Callable[[str, Any], Any]) -> Iterator[Callable[[list[Any]], Any]]:
    """``fn`` in which each global is what ``substitute`` returns for its name and value, until the block is left.

    Functions that share its globals, as those of one compiled module do, are rebound like it. They and their globals
    refer to each other. Leaving breaks that cycle: what ``substitute`` refers to, such as gigabytes of copies, would
    otherwise stay until Python collects garbage.
    """
    copied: dict[str, Any] = {}
    try:
        for name, value in fn.__globals__.items():
            own = isinstance(value, types.FunctionType) and value.__globals__ is fn.__globals__
            copied[name] = _over(value, copied) if own else substitute(name, value)
        yield _over(fn, copied)
    finally:
        copied.clear()


def module_constants(fn: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """The tensors among the globals of ``fn``, by name; none for a callable without globals."""
    return {name: value for name, value in getattr(fn, "__globals__", {}).items() if isinstance(value, torch.Tensor)}


def _over(fn: types.FunctionType, module: dict[str, Any]) -> types.FunctionType:
    """``fn`` with ``module`` for its globals."""
    copy = types.FunctionType(fn.__code__, module, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy
