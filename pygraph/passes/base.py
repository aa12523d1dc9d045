"""A pass: a frozen dataclass with a contract.

It runs on a graph, or on a launch program. A plain function of a graph and a context is a pass, too (``as_pass``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeAlias

from pygraph.errors import OptionError
from pygraph.ir import HOST, DeviceModel, Graph, Stage
from pygraph.program.program import Program

__all__ = ["BasePass", "LaunchPass", "Pass", "PassContext", "PassFunction", "PassResult", "as_pass"]


@dataclass(frozen=True, slots=True)
class PassContext:
    """Facts that passes may use besides the graph or the program.

    Args:
        device: kind of device whose work is captured: ``cuda``, or ``cpu`` for the host driver
        model: rates of that device
        order: requested order of launches: ``program``, as captured, or ``dependences``
    """

    device: str = "cpu"
    model: DeviceModel = HOST
    order: str = "dependences"


@dataclass(frozen=True, slots=True)
class PassResult:
    """Result of a pass.

    Args:
        modified: true if the pass changed the printed graph or program
        notes: sentences for the report
        program: new program of a launch pass; None: unchanged
    """

    modified: bool
    notes: tuple[str, ...] = ()
    program: Program | None = None


@dataclass(frozen=True)
class BasePass(ABC):
    """Base of all passes. Subclasses are frozen dataclasses whose fields are their options.

    Attributes:
        name: name in pipeline text, kebab-case
        ensures: stage of the resulting graph, at which it is verified; None: the stage does not change
    """

    name: ClassVar[str]
    ensures: ClassVar[Stage | None] = None

    @abstractmethod
    def run(self, subject: Any, ctx: PassContext, /) -> PassResult:
        """Transform ``subject``, a graph or a launch program."""


@dataclass(frozen=True)
class LaunchPass(BasePass):
    """Base of passes over launch programs. Programs are immutable; order, layout and steps of one are consistent."""

    @abstractmethod
    def run(self, program: Program, ctx: PassContext, /) -> PassResult:
        """Transform ``program``. The result has the new program."""


@dataclass(frozen=True)
class Pass(BasePass):
    """Base of passes over graphs.

    Attributes:
        requires: stage that the input graph must have reached; the pass manager checks it
        keeps_meaning: true if the graph computes the same results as before; ``check="full"`` tests it
    """

    requires: ClassVar[Stage] = Stage.LIFTED
    keeps_meaning: ClassVar[bool] = True

    @abstractmethod
    def run(self, graph: Graph, ctx: PassContext, /) -> PassResult:
        """Transform or annotate ``graph`` in place."""


PassFunction: TypeAlias = Callable[[Graph, PassContext], "PassResult | bool"]
"""A pass as a plain function: it transforms or annotates the graph in place, and returns true if it changed it."""


@cache
def as_pass(function: PassFunction) -> type[Pass]:
    """Make a pass class without options that runs ``function``; ``keep_out`` becomes the pass ``keep-out``.

    Raises OptionError for a function without a name, such as a lambda.
    """

    def run(self: Pass, graph: Graph, ctx: PassContext) -> PassResult:  # noqa: ARG001
        result = function(graph, ctx)
        return PassResult(result) if isinstance(result, bool) else result

    qualname = getattr(function, "__qualname__", type(function).__name__)
    name = qualname.rpartition(".")[2]
    if not name.isidentifier():
        raise OptionError(f"a pass needs a name, which {function!r} does not have")
    members = {"name": name.replace("_", "-"), "run": run}
    about = {"__doc__": function.__doc__, "__module__": function.__module__, "__qualname__": qualname}
    return dataclass(frozen=True)(type(name, (Pass,), members | about))
