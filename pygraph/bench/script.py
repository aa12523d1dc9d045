"""A user's script as a side: torch.compile compiles as the side does, and the process waits between blocks.

A timed call is a call of an outermost compiled callable, from its entry to the entry of the next such call: the time
includes all code of the script in between.
"""

from __future__ import annotations

import functools
import itertools
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import pygraph
from pygraph.bench.process import Spec
from pygraph.bench.sides import OURS, compile_as
from pygraph.bench.worker import Serving

_OWN = ("backend", "mode", "options")
"""Arguments of torch.compile that belong to the side."""


def run_script(spec: Spec, serving: Serving) -> Callable[[], None]:
    """A function that runs the script as ``python SCRIPT ARGS`` would, until the coordinator has seen enough."""

    def run() -> None:
        gate = Gate(spec.side, serving)
        sys.argv = [spec.program, *spec.args]
        sys.path.insert(0, str(Path(spec.program).resolve().parent))
        status: object = None
        with mock.patch.object(torch, "compile", gate.compile), mock.patch.object(pygraph, "graph", gate.graph):
            try:
                runpy.run_path(spec.program, run_name="__main__")
            except SystemExit as error:
                status = error.code
        serving.save()
        if status not in (None, 0):
            raise RuntimeError(f"the script exited with status {status}")
        told = f"the script ended after {gate.made} calls of what it compiled"
        serving.answer({"calls": gate.made}, "ended", told)

    return run


class Gate:
    """Replaces torch.compile and pygraph.graph, and intercepts every call of their results, however it is made.

    ``made`` counts these calls.
    """

    def __init__(self, side: str, serving: Serving) -> None:
        self._side, self._serving = side, serving
        self.made = 0
        self._inside = False
        self._calls = itertools.chain([True], serving.calls)  # the command for the first call came before the script
        self._compile, self._graph = torch.compile, pygraph.graph

    def compile(self, model: Any = None, **given: Any) -> Any:
        """``torch.compile`` with the side's backend, mode and options; a decorator without ``model``."""
        if model is None:
            return functools.partial(self.compile, **given)
        if given.get("disable"):
            return model
        kept = {name: value for name, value in given.items() if name not in _OWN}
        compiled = compile_as(self._side, model, self._compile, **kept)
        return _Gated(model, compiled, self) if isinstance(model, nn.Module) else self._gated(model, compiled)

    def graph(self, function: Callable[..., Any] | None = None, **given: Any) -> Any:
        """``pygraph.graph``, a decorator without ``function``; on other sides, the callable runs unchanged."""
        if function is None:
            return functools.partial(self.graph, **given)
        return self._gated(function, self._graph(function, **given) if self._side == OURS else function)

    def _gated(self, function: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            return self.call(compiled, args, kwargs)

        return call

    def call(self, compiled: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call ``compiled``. The call is an outermost one unless it is made within another call."""
        if self._inside:
            return compiled(*args, **kwargs)
        keep = next(self._calls, None)
        if keep is None:  # the coordinator has seen enough
            sys.stderr.flush()
            os._exit(0)
        self.made += 1
        self._inside = True
        try:
            result = compiled(*args, **kwargs)
        finally:
            self._inside = False
        if keep:
            self._serving.keep(result)
        return result


class _Gated(nn.Module):
    """The result of torch.compile for a module: attributes are those of the module, calls run the compiled one."""

    def __init__(self, module: nn.Module, compiled: Callable[..., Any], gate: Gate) -> None:
        super().__init__()
        self._orig_mod = module
        object.__setattr__(self, "_compiled", compiled)
        object.__setattr__(self, "_gate", gate)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled module."""
        return self(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._orig_mod(*args, **kwargs)
        return self._gate.call(self._compiled, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_orig_mod":
            return super().__getattr__(name)
        return getattr(self._orig_mod, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_orig_mod" in self.__dict__.get("_modules", {}) and name != "training":
            setattr(self._orig_mod, name, value)
        else:
            super().__setattr__(name, value)
