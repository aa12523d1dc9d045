"""Pipelines as text, and passes by name.

    "legality,partitioning{max-regions=4}"  ── parse ──►  (Legality(), Partitioning(max_regions=4))
                                            ◄── print ──

The fields of a pass are its options: ``max_regions`` is written ``max-regions``, and fields at their default are left
out. Passes are built in, come from installed packages (entry points ``pygraph.passes``), or are registered by the
process. Nothing is imported before its name is looked up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import importlib
import logging
import math
import re
import secrets
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from pygraph.errors import OptionError
from pygraph.passes.base import BasePass, LaunchPass, Pass, PassFunction, as_pass
from pygraph.text.reader import Lexeme, Reader, tokens
from pygraph.text.words import quote, unquote
from pygraph.version import digest

__all__ = [
    "BUILT_IN",
    "GROUP",
    "Registry",
    "default_registry",
    "nearest",
    "option_texts",
    "parse_pipeline",
    "path_of",
    "print_pass",
    "print_pipeline",
    "register",
    "sources",
]

P = TypeVar("P", bound="type[BasePass] | PassFunction")
T = TypeVar("T")

OptionValue: TypeAlias = "int | float | bool | str | tuple[OptionValue, ...] | None"
"""Value of an option; each has a text form. Lists are tuples, since passes are frozen."""

_BARE = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", re.ASCII)
_RESERVED = {"true": True, "false": False, "none": None, "inf": math.inf, "nan": math.nan}
_log = logging.getLogger("pygraph")


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint that names the closest known word, or lists all if none is close. Empty if there are no known words."""
    choices = list(known)
    close = difflib.get_close_matches(word, choices, n=1)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(choices)}" if choices else ""


# -- text to passes ----------------------------------------------------------------------------------------------------


class _Parser(Reader):
    """Parser of pipeline text. It builds each pass as soon as its options are read."""

    pattern = tokens(
        r"(?P<number>[+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|[+-]inf(?![A-Za-z0-9_-]))"
        r"|(?P<word>[A-Za-z_][A-Za-z0-9_]*(?:[-.:][A-Za-z0-9_]+)*)"
        r"|(?P<mark>[,{}=\[\]])"
    )
    names: ClassVar = {"word": "a name", "number": "a value"}

    def pipeline(self, lookup: Callable[[str], type[BasePass]]) -> tuple[BasePass, ...]:
        passes = [] if self.next.kind == "end" else [self._pass(lookup)]
        while passes and self.accept(","):
            passes.append(self._pass(lookup))
        return tuple(passes) if self.next.kind == "end" else self.refuse("','")

    def _pass(self, lookup: Callable[[str], type[BasePass]]) -> BasePass:
        name = self.kind("word")
        try:
            cls = lookup(name.text)
        except OptionError as error:
            raise self._refused(str(error), name) from error
        options: dict[str, OptionValue] = {}
        if self.next.text == "{":
            self.items(lambda: self._option(cls, options), "{}")
        try:
            return cls(**options)
        except (TypeError, ValueError) as error:  # a missing option, or a value that __post_init__ rejects
            raise self._refused(f"pass '{name.text}': {error}", name) from error

    def _option(self, cls: type[BasePass], options: dict[str, OptionValue]) -> None:
        word = self.kind("word")
        self.expect("=")
        start, value = self.next, self._value()
        known = {_option_name(field): (field, wanted) for field, wanted in _option_types(cls).items()}
        if word.text not in known:
            hint = nearest(_option_name(word.text), known) or "; it has no options"
            raise self._refused(f"pass '{cls.name}' has no option '{word.text}'{hint}", word)
        field, wanted = known[word.text]
        if field in options:
            raise self._refused(f"option '{word.text}' of pass '{cls.name}' is set twice", word)
        try:
            options[field] = _fit(value, wanted)
        except (TypeError, OverflowError):
            found = "a list" if isinstance(value, tuple) else start.text
            reason = f"option '{word.text}' of pass '{cls.name}' must be {_type_text(wanted)}, not {found}"
            raise self._refused(reason, start) from None

    def _value(self) -> OptionValue:
        if self.next.text == "[":
            return tuple(self.items(self._value, "[]"))
        token = self.kind("number", "word", "string")
        if token.kind == "number":
            return float(token.text) if any(mark in token.text for mark in ".eEi") else int(token.text)
        return _RESERVED.get(token.text, token.text) if token.kind == "word" else unquote(token.text)

    def _refused(self, reason: str, at: Lexeme) -> OptionError:
        span = self.span(at)
        return OptionError(f"{self.source}:{span.line}:{span.column}: {reason}\n{span.underline(self.text)}")


def _fit(value: OptionValue, wanted: Any) -> Any:
    """``value`` as an option of type ``wanted``. An integer becomes a float if only a float fits. Raises TypeError."""
    origin, args = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        for choice in sorted(args, key=[float].count):
            with contextlib.suppress(TypeError):
                return _fit(value, choice)
    elif origin is Literal:
        if any(type(value) is type(choice) and value == choice for choice in args):
            return value
    elif origin is tuple and isinstance(value, tuple):
        items = args[:1] * len(value) if args[1:] == (...,) else args
        if len(items) == len(value):
            return tuple(map(_fit, value, items))
    elif type(value) is wanted:
        return value
    elif type(value) is int and wanted is float:
        return float(value)
    raise TypeError


# -- passes to text ----------------------------------------------------------------------------------------------------


def print_pipeline(passes: Iterable[BasePass]) -> str:
    """The canonical text of ``passes``, which parses back to them. Raises OptionError for a value without text."""
    return ",".join(print_pass(item) for item in passes)


def print_pass(item: BasePass) -> str:
    """The canonical text of one pass: fields at their default are left out."""
    options: list[str] = []
    for field in dataclasses.fields(item):
        value, default = getattr(item, field.name), _default(field)
        if not field.init or (type(value) is type(default) and value == default):
            continue
        try:
            options.append(f"{_option_name(field.name)}={_print_value(value)}")
        except TypeError as error:
            raise OptionError(f"option '{_option_name(field.name)}' of pass '{item.name}': {error}") from error
    return f"{item.name}{{{','.join(options)}}}" if options else item.name


def _print_value(value: object) -> str:
    """The text of one option value. Raises TypeError if it has none."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return value if _BARE.fullmatch(value) and value not in _RESERVED else quote(value)
    if isinstance(value, tuple):
        return f"[{','.join(_print_value(item) for item in value)}]"
    raise TypeError(f"a {type(value).__name__} has no text")


# -- options -----------------------------------------------------------------------------------------------------------


def option_texts(cls: type[BasePass]) -> Iterator[tuple[str, str, str | None]]:
    """Name, type and default of each option as users read them; the default is None if the option is required."""
    wanted = _option_types(cls)
    for field in dataclasses.fields(cls):
        if field.init:
            default = _default(field)
            text = None if default is dataclasses.MISSING else _print_value(default)
            yield _option_name(field.name), _type_text(wanted[field.name]), text


def _option_name(field: str) -> str:
    return field.replace("_", "-")


def _option_types(cls: type[BasePass]) -> dict[str, Any]:
    """The types of the options of ``cls`` by field name, in order of declaration."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def _default(field: dataclasses.Field[Any]) -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _type_text(wanted: Any) -> str:
    """A type as users read it: ``int or none``, ``a list of int``, ``auto or all``. Raises TypeError if its values
    cannot be written in a pipeline."""
    origin, args = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        return " or ".join(_type_text(choice) for choice in args)
    if origin is Literal:
        return " or ".join(_print_value(choice) for choice in args)
    if origin is tuple and args[1:] == (...,):
        return f"a list of {_type_text(args[0])}"
    if origin is tuple:
        return f"[{', '.join(map(_type_text, args))}]"
    if wanted not in (int, float, bool, str, type(None)):
        raise TypeError(f"a {wanted} cannot be written in a pipeline")
    return "string" if wanted is str else "none" if wanted is type(None) else str(wanted.__name__)


# -- passes by name ----------------------------------------------------------------------------------------------------

GROUP = "pygraph.passes"
"""The entry point group."""

BUILT_IN = {
    "legality": "pygraph.passes.legality:Legality",
    "placement": "pygraph.passes.placement:Placement",
    "partitioning": "pygraph.passes.partitioning:Partitioning",
    "indirection": "pygraph.passes.indirection:Indirection",
    "selection": "pygraph.passes.selection:Selection",
    "rename": "pygraph.passes.launches:Rename",
    "order": "pygraph.passes.launches:Order",
    "layout": "pygraph.passes.launches:Layout",
    "segments": "pygraph.passes.launches:Segments",
}
"""The built-in passes, over graphs and over launch programs."""


_OWN = "(a pass of yours is known once its module is imported: pygraph opt --load MODULE)"


class Registry:
    """Finds the class of a pass by its name. ``points`` replaces the installed entry points."""

    def __init__(self, points: Iterable[EntryPoint] | None = None) -> None:
        self._points = points
        self._classes: dict[str, type[BasePass]] = {}

    @cached_property
    def _paths(self) -> dict[str, list[str]]:
        """Paths of passes by name, as ``module:class``: built in, installed, registered. A name should have one."""
        found = {name: [path] for name, path in BUILT_IN.items()}
        for point in entry_points(group=GROUP) if self._points is None else self._points:
            paths = found.setdefault(point.name, [])
            if point.name in BUILT_IN and point.value not in paths:
                _log.warning("entry point %s = %s is ignored: the pass is built in", point.name, point.value)
            elif point.value not in paths:
                paths.append(point.value)
        return found

    def register(self, given: P) -> P:
        """Register a pass class, or a function (see ``as_pass``), under its name. Also a decorator.

        A class replaces an earlier one of the same module and name, as when a notebook cell runs again. Raises
        OptionError if the class is not a frozen dataclass or has no kebab-case name, or if the name is taken.
        """
        cls: Any = given if isinstance(given, type) else as_pass(given)
        problem = _problem_of(cls)
        if problem:
            raise OptionError(problem)
        path = path_of(cls)
        taken = self._paths.setdefault(cls.name, [path])
        if taken != [path]:
            raise OptionError(f"cannot register {path}: the name '{cls.name}' is taken by {', '.join(taken)}")
        self._classes[cls.name] = cls
        return given

    def names(self) -> tuple[str, ...]:
        """All known names: built-in passes in pipeline order, then others by name."""
        return (*BUILT_IN, *sorted(self._paths.keys() - BUILT_IN.keys()))

    def lookup(self, name: str) -> type[BasePass]:
        """The class called ``name``. Raises OptionError if there is none or several, or if it does not load."""
        if name not in self._classes:
            paths = self._paths.get(name)
            if not paths:
                raise OptionError(f"no pass is called '{name}'{nearest(name, self.names())} {_OWN}")
            if len(paths) > 1:
                raise OptionError(f"several passes are called '{name}': {', '.join(paths)}")
            self._classes[name] = _load(name, paths[0])
        return self._classes[name]


def _load(name: str, path: str) -> type[BasePass]:
    module, _, attribute = path.partition(":")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing a stranger's module may raise anything, and others must still load
        raise OptionError(f"pass '{name}' ({path}) does not load: {type(error).__name__}: {error}") from error
    if isinstance(cls, types.FunctionType):
        cls = as_pass(cls)
    problem = _problem_of(cls) or ("" if cls.name == name else f"{path} calls itself '{cls.name}'")
    if problem:
        raise OptionError(f"pass '{name}' does not load: {problem}")
    return cls  # type: ignore[no-any-return]  # _problem_of has checked that it is a Pass


def _problem_of(cls: Any) -> str | None:
    """Reason why ``cls`` cannot be used as a pass, or None."""
    if not (isinstance(cls, type) and issubclass(cls, Pass | LaunchPass)):
        return f"{cls!r} is no subclass of pygraph.passes.Pass or LaunchPass"
    params = cls.__dict__.get("__dataclass_params__")
    if params is None or not params.frozen:
        return f"{path_of(cls)} is no frozen dataclass"
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not _BARE.fullmatch(name):
        return f"{path_of(cls)} needs a kebab-case 'name', not {name!r}"
    for field, wanted in _option_types(cls).items():
        try:
            _type_text(wanted)
        except TypeError as error:
            return f"option '{_option_name(field)}' of {path_of(cls)}: {error}"
    return None


def path_of(cls: type) -> str:
    """The path of a pass class, as ``module:class``."""
    return f"{cls.__module__}:{cls.__qualname__}"


def is_built_in(item: BasePass) -> bool:
    """True if a pass is PyGraph's own."""
    return BUILT_IN.get(item.name) == path_of(type(item))


def sources(passes: Iterable[BasePass]) -> Iterator[str]:
    """Hashes of the modules that define passes outside of this package, and their base classes; helper code in these
    modules counts. A class without a file (from a notebook) has another hash in each process."""
    return (_source(cls) for item in passes for cls in type(item).__mro__)


@functools.cache
def _source(cls: type) -> str:
    if cls is object or cls.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return ""
    path = Path(getattr(sys.modules.get(cls.__module__), "__file__", None) or "")
    return digest(path) if path.is_file() else secrets.token_hex()


default_registry = Registry()
"""The default registry for reading pipelines."""

register = default_registry.register
"""Register a pass, or a function of a graph and a context, for all pipelines of this process. Also a decorator."""


def parse_pipeline(
    text: str, source: str = "<pipeline>", registry: Registry = default_registry
) -> tuple[BasePass, ...]:
    """The passes that ``text`` names, with their options.

    Raises ParseError for malformed text, OptionError for a name that does not exist or a value of the wrong type;
    both state line and column and underline the place.
    """
    return _Parser(text, source).pipeline(registry.lookup)
