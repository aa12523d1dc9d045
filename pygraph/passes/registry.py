"""Passes by name: the built-in ones, those of installed packages (entry points ``pygraph.passes``), registered ones.

Option text is read in ``options``. Nothing is imported before its name is looked up.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from pygraph.errors import OptionError
from pygraph.ir import Stage
from pygraph.passes.base import Pass
from pygraph.passes.options import has_text, nearest, option_name, parse_pipeline, pass_options, print_value, type_text

__all__ = ["BUILT_IN", "GROUP", "PassInfo", "Registry", "default_registry", "parse", "register"]

P = TypeVar("P", bound=type[Pass])

GROUP = "pygraph.passes"
"""The entry point group."""

BUILT_IN = {
    "legality": "pygraph.passes.legality:Legality",
    "placement": "pygraph.passes.placement:Placement",
    "partitioning": "pygraph.passes.partitioning:Partitioning",
    "indirection": "pygraph.passes.indirection:Indirection",
    "selection": "pygraph.passes.selection:Selection",
}
"""The passes of PyGraph itself, which a plain checkout must find too; the same are entry points once installed."""

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", re.ASCII)
_log = logging.getLogger("pygraph")


@dataclass(frozen=True, slots=True)
class PassInfo:
    """What can be told of a pass by name. ``error`` says why it cannot be used; the rest is then empty.

    ``options`` holds (option, type, default) as text; the default is None where the option must be given.
    """

    name: str
    origin: str
    summary: str = ""
    options: tuple[tuple[str, str, str | None], ...] = ()
    requires: Stage | None = None
    ensures: Stage | None = None
    error: str | None = None


class Registry:
    """Finds the class of a pass by its name. ``points`` replaces the installed entry points."""

    def __init__(self, points: Sequence[EntryPoint] | None = None) -> None:
        self._points = points
        self._reported = False
        self._classes: dict[str, type[Pass]] = {}

    def register(self, cls: P) -> P:
        """Make ``cls`` known under its name; also a class decorator.

        A class of the same module and name takes the place of the one before it, as in a notebook's cell that runs
        again. Raises OptionError when it is no frozen dataclass, has no kebab-case name, or its name is taken.
        """
        problem = _problem_of(cls)
        if problem:
            raise OptionError(problem)
        taken = self._origin_of(cls.name)
        if taken not in (None, _path_of(cls)):
            raise OptionError(f"cannot register {_path_of(cls)}: the name '{cls.name}' is taken by {taken}")
        self._classes[cls.name] = cls
        return cls

    def names(self) -> tuple[str, ...]:
        """Every known name: built-in passes in pipeline order, then others by name."""
        others = {*self._classes, *(point.name for point in self._installed())}
        return (*BUILT_IN, *sorted(others - BUILT_IN.keys()))

    def lookup(self, name: str) -> type[Pass]:
        """The class called ``name``. Raises OptionError when there is none, several, or it does not load."""
        if name in self._classes:
            return self._classes[name]
        if name in BUILT_IN:
            return self._load(name, BUILT_IN[name])
        paths = self._paths_of(name)
        if not paths:
            raise OptionError(f"no pass is called '{name}'{nearest(name, self.names())}")
        if len(paths) > 1:
            raise OptionError(f"several passes are called '{name}': {', '.join(paths)}")
        return self._load(name, paths[0])

    def describe(self) -> tuple[PassInfo, ...]:
        """One entry per known name, also for those that do not load."""
        return tuple(self._describe(name) for name in self.names())

    def _describe(self, name: str) -> PassInfo:
        origin = self._origin_of(name) or ""
        try:
            cls = self.lookup(name)
        except OptionError as error:
            return PassInfo(name, origin, error=str(error))
        summary = (cls.__doc__ or "").strip().partition("\n")[0]
        return PassInfo(name, origin, summary, _options_of(cls), cls.requires, cls.ensures)

    def _load(self, name: str, path: str) -> type[Pass]:
        module, _, attribute = path.partition(":")
        try:
            cls = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # importing a stranger's module may raise anything, and others must still load
            raise OptionError(f"pass '{name}' ({path}) does not load: {type(error).__name__}: {error}") from error
        problem = _problem_of(cls)
        if problem is None and cls.name != name:
            problem = f"{path} calls itself '{cls.name}'"
        if problem:
            raise OptionError(f"pass '{name}' does not load: {problem}")
        self._classes[name] = cls
        return cls  # type: ignore[no-any-return]  # _problem_of has checked that it is a Pass

    def _origin_of(self, name: str) -> str | None:
        if name in BUILT_IN:
            return BUILT_IN[name]
        if name in self._classes:
            return _path_of(self._classes[name])
        return ", ".join(self._paths_of(name)) or None

    def _paths_of(self, name: str) -> list[str]:
        return list(dict.fromkeys(point.value for point in self._installed() if point.name == name))

    def _installed(self) -> Sequence[EntryPoint]:
        if self._points is None:
            self._points = tuple(entry_points(group=GROUP))
        if not self._reported:
            self._reported = True
            _report_clashes(self._points)
        return self._points


def _report_clashes(points: Iterable[EntryPoint]) -> None:
    for point in points:
        if BUILT_IN.get(point.name, point.value) != point.value:
            _log.warning("entry point %s = %s is ignored: the pass is built in", point.name, point.value)


def _problem_of(cls: object) -> str | None:
    """Why ``cls`` cannot be used as a pass, or None."""
    if not (isinstance(cls, type) and issubclass(cls, Pass)):
        return f"{cls!r} is no subclass of pygraph.passes.Pass"
    params = cls.__dict__.get("__dataclass_params__")
    if params is None or not params.frozen:
        return f"{_path_of(cls)} is no frozen dataclass"
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return f"{_path_of(cls)} needs a kebab-case 'name', not {name!r}"
    for field, wanted in pass_options(cls).items():
        if not has_text(wanted):
            kind = type_text(wanted)
            return f"option '{option_name(field)}' of {_path_of(cls)} is a {kind}, which pipelines cannot write"
    return None


def _path_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _options_of(cls: type[Pass]) -> tuple[tuple[str, str, str | None], ...]:
    types = pass_options(cls)
    fields = [field for field in dataclasses.fields(cls) if field.init]
    return tuple((option_name(f.name), type_text(types[f.name]), _default_text(f)) for f in fields)


def _default_text(field: dataclasses.Field[object]) -> str | None:
    if field.default is not dataclasses.MISSING:
        return print_value(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return print_value(field.default_factory())
    return None


default_registry = Registry()
"""The registry that pipelines are read with unless another is given."""


def register(cls: P) -> P:
    """Make a pass known to every pipeline of this process; also a class decorator. Raises OptionError."""
    return default_registry.register(cls)


def parse(text: str, source: str = "<pipeline>") -> tuple[Pass, ...]:
    """The passes that a pipeline text names, looked up in the default registry. Raises ParseError or OptionError."""
    return parse_pipeline(text, default_registry.lookup, source)
