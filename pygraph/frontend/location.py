"""Origins of FX nodes: the user's source line, the module, and the user's names of inputs.

The line is the innermost frame of the stack trace that is not torch's own. Paths of files in the working directory are
relative to it, so that dumps of one program agree across checkouts. Names are the steps of Dynamo's sources:

    L['self']._modules['layers']._modules['0']._parameters['weight']   ▸   layers.0.weight

Also the origin of Dynamo's graph: function, first line, and the graph break that ended it.
"""

from __future__ import annotations

import itertools
import linecache
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
_VARIABLE = re.compile(r"[LG]\['(?!\w*\d{12})([^']*)'\]")  # not one that Dynamo named after an address
_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['")
_STEP = re.compile(
    r"\.__self__\b|\.__closure__\[\d+\]\.cell_contents|\._pygraph(?:_(?P<own>\w+)|\b)"
    r"|(?:\._(?:modules|parameters|buffers))?\['(?P<key>[^']*)'\]|\[(?P<index>-?\d+)\]|\.(?P<attribute>\w+)"
)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def location_of(meta: Mapping[str, Any], *, frames: bool = False) -> Location | None:
    """The user's line of a node with that ``meta``, or None if it has no user frame. With ``frames``, the location
    includes the user's call stack."""
    found = _user_frames(meta.get("stack_trace") or "", os.getcwd())
    if not found or not frames:
        return found[-1] if found else None
    return replace(found[-1], frames=tuple(f"{frame} {frame.function}".rstrip() for frame in found))


def location_of_code(code: CodeType) -> Location:
    """The first line of a function's code."""
    file, line = code.co_filename, code.co_firstlineno
    return _location(file, line, code.co_name, linecache.getline(file, line), os.getcwd())


@dataclass(frozen=True, slots=True)
class GraphOrigin:
    """Start of a graph of Dynamo, reasons of its end, and the user's names of its inputs.

    Args:
        function: compiled function; the class of the module if its code is torch's own
        start: first user line in the graph; None if it has no user line
        breaks: reasons of graph breaks, by line: the break that ended the graph, and neighbours without a graph in
            between; at the last graph of an explanation, also breaks in functions without a graph
        inputs: the user's names of inputs, by position; parameters of the graph's own module, by their name in that
            module
        several: true if several variables hold modules: paths of modules then begin with the variable
    """

    function: str = ""
    start: Location | None = None
    breaks: dict[Location, str] = field(default_factory=dict)
    inputs: Mapping[int | str, str] = field(default_factory=dict)
    several: bool = False

    def module(self, path: str) -> str:
        """The module at a ``path`` of FX metadata, as the user writes it: ``layers.3.mlp``."""
        return ".".join(_steps(path)[0 if self.several else 1 :])


UNKNOWN = GraphOrigin()
"""The origin of a graph without a known origin."""


_latest: list[Any] = [UNKNOWN, None]
"""Origin of the last graph from Dynamo, and the reason why it ended."""
_noted: list[Any] = [None, None]
"""The last noted entries of Dynamo's lists: of breaks, and of compilations."""
_unplaced: deque[tuple[tuple[str, str], Location, str]] = deque(maxlen=1024)
"""Breaks that belong to no graph yet: function, line, reason. (Dynamo's lists include breaks of all backends.)"""


def origin_of(gm: torch.fx.GraphModule) -> GraphOrigin:
    """The origin of ``gm``, the module that Dynamo hands to a backend."""
    # A placeholder has the line of its first use.
    traces = [node.meta.get("stack_trace") or "" for node in gm.graph.nodes if node.op != "placeholder"]
    start = next((frame for trace in traces for frame in _user_frames(trace, os.getcwd())[:1]), None)
    inputs, several = _names_of_inputs(gm)
    origin = GraphOrigin(
        start.function if start is not None else _outer_module(gm), start, inputs=inputs, several=several
    )
    _latest[:] = origin, compat.compile_reason(gm)
    note_breaks()
    return origin


def note_breaks() -> None:
    """Record the new breaks of Dynamo. Breaks in the function of Dynamo's last graph go to that graph; others wait for
    a graph of their function."""
    _unplaced.extend(_new_breaks())
    origin, ended = _latest
    if ended is None or not ended.user_stack:
        return
    function = _function(ended.user_stack[0].filename, ended.user_stack[0].name)
    for each in [each for each in _unplaced if each[0] == function]:
        _unplaced.remove(each)
        origin.breaks[each[1]] = each[2]


@contextmanager
def noting_all_breaks() -> Iterator[None]:
    """Record all breaks that occur in the context, if Dynamo hands over a graph in it. Breaks in functions without a
    graph, which run uncompiled, go to the last graph."""
    note_breaks()
    known, (before, _) = list(_unplaced), _latest
    try:
        yield
    finally:
        note_breaks()
        origin, _ = _latest
        for each in [each for each in _unplaced if origin is not before and each not in known]:
            _unplaced.remove(each)
            origin.breaks[each[1]] = each[2]


def _new_breaks() -> Iterator[tuple[tuple[str, str], Location, str]]:
    """New entries of Dynamo's lists: lines at which it split a function, and functions that it skipped."""
    for reason in _added(0, compat.graph_break_reasons):
        if reason.graph_break and reason.user_stack:
            first = reason.user_stack[0]
            last = next((f for f in reversed(reason.user_stack) if _is_user_file(f.filename)), reason.user_stack[-1])
            line = _location(last.filename, last.lineno or 0, last.name, last.line or "", os.getcwd())
            yield _function(first.filename, first.name), line, _first_line(reason.reason)
    for tried in _added(1, compat.compilations):
        if tried.fail_type is not None:
            yield _skipped(tried)


def _skipped(tried: Any) -> tuple[tuple[str, str], Location, str]:
    """A function, or the rest of one after a graph break, that Dynamo failed to compile. ``tried`` is its record."""
    whole = tried
    if tried.co_filename is None:  # too many recompilations: an earlier one has the function
        frame = str(tried.compile_id).partition("/")[0]
        same = (each for each in compat.compilations() if str(each.compile_id).partition("/")[0] == frame)
        whole = next((each for each in same if each.co_filename is not None), tried)
    name = whole.co_name or "a function"
    file = tried.fail_user_frame_filename or whole.co_filename or "unknown file"
    number = tried.fail_user_frame_lineno or whole.co_firstlineno or 0
    line = _location(file, number, name, linecache.getline(file, number), os.getcwd())
    part = f"the rest of {line.function}" if _RESUMED.fullmatch(name) else line.function
    why = f"{_first_line(tried.fail_reason or tried.fail_type)}; {part} runs uncompiled"
    return _function(whole.co_filename or file, name), line, why


def _added(which: int, entries: Any) -> list[Any]:
    """The new entries of one of Dynamo's lists, which may have been cleared meanwhile."""
    met = [] if compat.absent(entries) else list(entries() if callable(entries) else entries)
    new = met[next((i + 1 for i, entry in enumerate(met) if entry is _noted[which]), 0) :]
    _noted[which] = met[-1] if met else None
    return new


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _function(file: str, name: str) -> tuple[str, str]:
    """Key of a function that Dynamo compiles: file and name."""
    return file, _location("", 0, name, "", "").function


def _outer_module(gm: torch.fx.GraphModule) -> str:
    """The class of the compiled module, if metadata of nodes has it; else empty."""
    stacks = (list((node.meta.get("nn_module_stack") or {}).values()) for node in gm.graph.nodes)
    path, module = next((stack[0] for stack in stacks if stack), (".", ""))
    return "" if "." in path else str(getattr(module, "__name__", module)).rpartition(".")[2]


def module_path(meta: Mapping[str, Any]) -> str:
    """The path of the module that contains the code of a node with that ``meta``, as torch writes it; else empty.

    A node of a backward graph belongs to the module whose gradient it computes.
    """
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    return next((str(path) for path, _ in reversed(list(stack.values()))), "")


def common_module(paths: Iterable[str]) -> str:
    """The innermost module that contains all of ``paths``; empty if that is the whole model."""
    columns = (set(column) for column in zip(*(path.split(".") for path in paths), strict=False))
    return ".".join(column.pop() for column in itertools.takewhile(lambda column: len(column) == 1, columns))


def _names_of_inputs(gm: torch.fx.GraphModule) -> tuple[dict[int | str, str], bool]:
    """The user's names of the inputs of ``gm``, and true if several variables hold modules. If only one does, its name
    is left out, so that names are those of ``named_parameters``."""
    sources = compat.input_sources(gm)
    stacks = (list((node.meta.get("nn_module_stack") or {}).values())[:1] for node in gm.graph.nodes)
    through_modules = [text for text in sources.values() if _MEMBER.search(text)]
    holders = {_steps(text)[:1] for text in (*through_modules, *(str(path) for stack in stacks for path, _ in stack))}
    several = len(holders - {()}) > 1
    paths = {key: _steps(text) for key, text in sources.items()}
    names = {key: ".".join(path[1:] if path[:1] in holders and not several else path) for key, path in paths.items()}
    return {key: name for key, name in names.items() if name}, several


@lru_cache(maxsize=8192)
def _steps(text: str) -> tuple[str, ...]:
    """A Dynamo source as the user writes it: a variable, then attributes and keys. Empty for computed sources. Cells of
    closures and positions of stand-ins are left out, since the user did not write them."""
    variable = _VARIABLE.match(text)
    found, at = ([variable[1]], variable.end()) if variable else ([], len(text))
    while at < len(text):
        step = _STEP.match(text, at)
        if step is None:
            return ()
        found += [name for group in ("own", "key", "index", "attribute") if (name := step[group]) is not None]
        at = step.end()
    return tuple(found)


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
    resumed = _RESUMED.fullmatch(function.strip())  # Dynamo's name for the rest of a function after a graph break
    name = resumed["function"] if resumed else function.strip()
    inside = directory != os.path.abspath(os.sep) and file.startswith(directory + os.sep)
    return Location(file[len(directory) + 1 :] if inside else file, line, name, code.strip())
