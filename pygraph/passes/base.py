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
    """Facts that passes may use beside the graph or the program.

    Args:
        device: the kind of device whose work is captured: ``cuda``, or ``cpu`` for the host driver
        model: rates and overheads of that device
        order: the order of launches that is asked for: ``program``, as captured, or by ``dependences``
    """

    device: str = "cpu"
    model: DeviceModel = HOST
    order: str = "dependences"


@dataclass(frozen=True, slots=True)
class PassResult:
    """The result of a pass.

    Args:
        modified: the printed graph, or program, differs from that before
        notes: sentences for the report
        program: what a launch pass made of its program; None: that is unchanged
    """

    modified: bool
    notes: tuple[str, ...] = ()
    program: Program | None = None


@dataclass(frozen=True)
class BasePass(ABC):
    """Base of all passes. Subclasses are frozen dataclasses whose fields are their options.

    Attributes:
        name: the name in pipeline text, kebab-case
        ensures: the stage that a resulting graph is verified at; None when the stage stays what it was
    """

    name: ClassVar[str]
    ensures: ClassVar[Stage | None] = None

    @abstractmethod
    def run(self, subject: Any, ctx: PassContext, /) -> PassResult:
        """Transform ``subject``, a graph or a launch program."""


@dataclass(frozen=True)
class LaunchPass(BasePass):
    """Base of passes over launch programs. Programs are immutable, and whole: order, layout and steps hold together."""

    @abstractmethod
    def run(self, program: Program, ctx: PassContext, /) -> PassResult:
        """The result has the program that ``program`` becomes."""


@dataclass(frozen=True)
class Pass(BasePass):
    """Base of passes over graphs.

    Attributes:
        requires: the stage that a graph must have reached, checked on the input
        keeps_meaning: the graph computes what it did; ``check="full"`` holds the pass to it
    """

    requires: ClassVar[Stage] = Stage.LIFTED
    keeps_meaning: ClassVar[bool] = True

    @abstractmethod
    def run(self, graph: Graph, ctx: PassContext, /) -> PassResult:
        """Transform or annotate ``graph`` in place."""


PassFunction: TypeAlias = Callable[[Graph, PassContext], "PassResult | bool"]
"""A pass as a plain function: it transforms or annotates the graph in place, and says whether it changed anything."""


@cache
def as_pass(function: PassFunction) -> type[Pass]:
    """The pass class, without options, that runs ``function``; ``keep_out`` becomes the pass ``keep-out``.

    Raises OptionError for a function without a name.
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
