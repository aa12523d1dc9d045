"""The user's source line of an FX node: the innermost frame of its stack trace that is not torch's own.

Also where Dynamo's graph comes from: function, first line, and the graph break that ended it. Files under the working
directory are given relative to it, so that dumps of one program agree across checkouts.
"""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any

import torch

from pygraph import compat
from pygraph.errors import Location

_FRAME = re.compile(
    r'^\s*File "(?P<file>[^"\n]*)", line (?P<line>\d+), in (?P<function>[^\n]*)\n?(?P<code>[^\n]*)', re.MULTILINE
)
_RESUMED = re.compile(r"torch_dynamo_resume_in_(?P<function>.+)_at_\d+")
_ROOT = re.compile(r"^[LG]\['[^']*'\]")
_INDEX = re.compile(r"\['?([^'\]]*)'?\]")
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def location_of(meta: Mapping[str, Any]) -> Location | None:
    """The user's line of a node with that ``meta``, or None when it has no frame of the user's."""
    return next(reversed(_user_frames(meta.get("stack_trace") or "", os.getcwd())), None)


def location_of_code(code: CodeType) -> Location:
    """The first line of a function's code."""
    file, line = code.co_filename, code.co_firstlineno
    return _location(file, line, code.co_name, linecache.getline(file, line), os.getcwd())


@dataclass(frozen=True, slots=True)
class GraphOrigin:
    """Where a graph of Dynamo's begins and why it ends.

    ``function`` is what was compiled, a module's class where its code is torch's own; ``start`` is the first line of it
    that the graph holds, None where there is none of the user's. ``breaks`` are the lines at which Dynamo had to stop,
    with the reason: that which ended the graph, and those around it that have no graph between.
    """

    function: str = ""
    start: Location | None = None
    breaks: dict[Location, str] = field(default_factory=dict)


UNKNOWN = GraphOrigin()
"""The origin of a graph that nobody knows it of."""


_latest: list[Any] = [UNKNOWN, None, None]
"""Of the graph that Dynamo handed over last: its origin, why it ends, and the last break that was noted."""


def origin_of(gm: torch.fx.GraphModule) -> GraphOrigin:
    """The origin of ``gm``, the module that Dynamo hands to a backend."""
    # A placeholder has the line of its first use.
    traces = [node.meta.get("stack_trace") or "" for node in gm.graph.nodes if node.op != "placeholder"]
    start = next((frame for trace in traces for frame in _user_frames(trace, os.getcwd())[:1]), None)
    origin = GraphOrigin(start.function if start is not None else _outer_module(gm), start)
    _latest[:2] = origin, compat.compile_reason(gm)
    note_breaks()
    return origin


def note_breaks() -> None:
    """Note, at the graph that Dynamo handed over last, the breaks of its function that it has met since the one before
    it. (Dynamo's list has those of all functions, also of other backends.)"""
    origin, ended, noted = _latest
    met = [] if compat.absent(compat.graph_break_reasons) else list(compat.graph_break_reasons)
    new = met[next((i + 1 for i, reason in enumerate(met) if reason is noted), 0) :]
    for reason in [*new, ended] if ended is not None else ():
        if reason.graph_break and reason.user_stack and _function(reason) == _function(ended):
            frames = [frame for frame in reason.user_stack if _is_user_file(frame.filename)] or reason.user_stack
            last = frames[-1]
            line = _location(last.filename, last.lineno or 0, last.name, last.line or "", os.getcwd())
            origin.breaks[line] = reason.reason.strip().partition("\n")[0]
    _latest[2] = met[-1] if met else None


def _function(reason: Any) -> list[tuple[str, str]]:
    """The function that Dynamo was compiling when it stopped: file and name."""
    return [(frame.filename, _location("", 0, frame.name, "", "").function) for frame in reason.user_stack[:1]]


def _outer_module(gm: torch.fx.GraphModule) -> str:
    """The class of the module that was compiled, where nodes say so."""
    stacks = (list((node.meta.get("nn_module_stack") or {}).values()) for node in gm.graph.nodes)
    path, module = next((stack[0] for stack in stacks if stack), (".", ""))
    return "" if "." in path else str(getattr(module, "__name__", module)).rpartition(".")[2]


def module_of(meta: Mapping[str, Any]) -> str:
    """The module of the user's that a node with that ``meta`` computes a part of: ``layers.3.mlp``; else nothing.

    A node of a backward graph belongs to the module whose gradient it computes.
    """
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    path = next((str(entry[0]) for entry in reversed(list(stack.values()))), "")
    return _INDEX.sub(r".\1", _ROOT.sub("", path)).strip(".")


@lru_cache(maxsize=8192)
def _user_frames(trace: str, directory: str) -> tuple[Location, ...]:
    """The user's frames in a Python traceback text, outermost first; files inside ``directory`` are relative to it."""
    found = []
    for frame in _FRAME.finditer(trace):
        if _is_user_file(frame["file"]):
            code = "" if frame["code"].strip().startswith('File "') else frame["code"]
            found.append(_location(frame["file"], int(frame["line"]), frame["function"], code, directory))
    return tuple(found)


def _is_user_file(file: str) -> bool:
    return not file.startswith("<") and not file.startswith(_TORCH)


def _location(file: str, line: int, function: str, code: str, directory: str) -> Location:
    resumed = _RESUMED.fullmatch(function.strip())  # what Dynamo calls the rest of a function behind a graph break
    name = resumed["function"] if resumed else function.strip()
    inside = directory != os.path.abspath(os.sep) and file.startswith(directory + os.sep)
    return Location(file[len(directory) + 1 :] if inside else file, line, name, code.strip())
