"""Pipelines as text, and passes by name.

    "legality,partitioning{max-regions=4}"  ── parse ──►  (Legality(), Partitioning(max_regions=4))
                                            ◄── print ──

The fields of a pass are its options: ``max_regions`` is written ``max-regions``, and fields at their default are left
out. Names are those of the built-in passes, of installed packages (entry points ``pygraph.passes``), and of passes that
the process registered. Nothing is imported before its name is looked up.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import logging
import math
import re
import types
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from pygraph.errors import OptionError, ParseError, Span
from pygraph.ir import Stage
from pygraph.passes.base import Pass, PassFunction, as_pass

__all__ = [
    "BUILT_IN",
    "GROUP",
    "OptionValue",
    "PassInfo",
    "Registry",
    "default_registry",
    "nearest",
    "parse",
    "print_pass",
    "print_pipeline",
    "register",
]

P = TypeVar("P", bound="type[Pass] | PassFunction")

OptionValue: TypeAlias = "int | float | bool | str | tuple[OptionValue, ...] | None"
"""What an option may hold: what has a text. Lists are tuples, since passes are frozen."""

_BARE = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", re.ASCII)
_RESERVED = {"true": True, "false": False, "none": None, "inf": math.inf, "nan": math.nan}
_log = logging.getLogger("pygraph")


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint that names the closest known word, or lists all when none is close. Empty when nothing is known."""
    choices = list(known)
    close = difflib.get_close_matches(word, choices, n=1)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(choices)}" if choices else ""


def _option_name(field: str) -> str:
    return field.replace("_", "-")


def _option_types(cls: type[Pass]) -> dict[str, Any]:
    """The types of the options of ``cls`` by field name, in order of declaration."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


# -- text to passes ----------------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"(?P<number>[+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|[+-]inf(?![A-Za-z0-9_-]))"
    r"|(?P<word>[A-Za-z_][A-Za-z0-9_]*(?:[-.:][A-Za-z0-9_]+)*)"
    r'|(?P<string>"(?:[^"\\\n\r]|\\.)*")'
    r"|(?P<mark>[,{}=\[\]])",
)


class _Token(NamedTuple):
    """``kind`` is number, word, string, mark or end."""

    kind: str
    text: str
    span: Span


class _Value(NamedTuple):
    """A value as written: ``kind`` is number, word, string or list."""

    kind: str
    text: str
    span: Span
    items: tuple[_Value, ...] = ()


class _Parser:
    """Reads a pipeline by recursive descent and builds each pass as soon as its options are read."""

    def __init__(self, text: str, source: str, lookup: Callable[[str], type[Pass]]) -> None:
        self.text, self.source, self.lookup = text, source, lookup
        self.tokens = list(self._scan())
        self.at = 0

    def _scan(self) -> Iterable[_Token]:
        at = 0
        while at < len(self.text):
            line, column = self.text.count("\n", 0, at) + 1, at - self.text.rfind("\n", 0, at)
            if self.text[at] in " \t\n\r":
                at += 1
                continue
            match = _TOKEN.match(self.text, at)
            if match is None:
                raise self._unreadable(f"unexpected character {self.text[at]!r}", Span(line, column))
            at = match.end()
            yield _Token(str(match.lastgroup), match.group(), Span(line, column, len(match.group())))
        kept = self.text.rstrip(" \t\n\r")
        yield _Token("end", "", Span(kept.count("\n") + 1, len(kept) - kept.rfind("\n")))

    def pipeline(self) -> tuple[Pass, ...]:
        passes: list[Pass] = []
        if self._next.kind != "end":
            passes.append(self._pass())
            while self._next.kind != "end":
                self._expect("mark", "',' or '{'" if self._before.kind == "word" else "','", ",")
                passes.append(self._pass())
        return tuple(passes)

    def _pass(self) -> Pass:
        name = self._expect("word", "a name")
        try:
            cls = self.lookup(name.text)
        except OptionError as error:
            raise self._refused(str(error), name.span) from error
        options: dict[str, OptionValue] = {}
        if self._accept("{") and not self._accept("}"):
            self._option(cls, options)
            while not self._accept("}"):
                self._expect("mark", "',' or '}'", ",")
                self._option(cls, options)
        try:
            return cls(**options)
        except (TypeError, ValueError) as error:  # a missing option, or a value that __post_init__ rejects
            raise self._refused(f"pass '{name.text}': {error}", name.span) from error

    def _option(self, cls: type[Pass], options: dict[str, OptionValue]) -> None:
        word = self._expect("word", "a name")
        self._expect("mark", "'='", "=")
        value = self._value()
        known = _option_types(cls)
        field = word.text.replace("-", "_")
        if field not in known or word.text != _option_name(field):
            hint = nearest(_option_name(field), map(_option_name, known)) or "; it has no options"
            raise self._refused(f"pass '{cls.name}' has no option '{word.text}'{hint}", word.span)
        if field in options:
            raise self._refused(f"option '{word.text}' of pass '{cls.name}' is set twice", word.span)
        try:
            options[field] = _coerce(value, known[field])
        except _MismatchError:
            found = "a list" if value.kind == "list" else value.text
            wanted = f"must be {_type_text(known[field])}, not {found}"
            raise self._refused(f"option '{word.text}' of pass '{cls.name}' {wanted}", value.span) from None

    def _value(self) -> _Value:
        start = self._next
        if not self._accept("["):
            if start.kind == "mark" or start.kind == "end":
                self._expect("word", "a value")
            self.at += 1
            self._check_string(start)
            return _Value(start.kind, start.text, start.span)
        items: list[_Value] = []
        if not self._accept("]"):
            items.append(self._value())
            while not self._accept("]"):
                self._expect("mark", "',' or ']'", ",")
                items.append(self._value())
        return _Value("list", "", items[0].span if items else start.span, tuple(items))

    def _check_string(self, token: _Token) -> None:
        try:
            if token.kind == "string":
                json.loads(token.text)
        except json.JSONDecodeError as error:
            raise self._unreadable(f"malformed string: {error.msg}", token.span) from None

    @property
    def _next(self) -> _Token:
        return self.tokens[self.at]

    @property
    def _before(self) -> _Token:
        return self.tokens[self.at - 1]

    def _accept(self, mark: str) -> bool:
        accepted = self._next.kind == "mark" and self._next.text == mark
        self.at += accepted
        return accepted

    def _expect(self, kind: str, wanted: str, text: str | None = None) -> _Token:
        token = self._next
        if token.kind == "end":
            raise self._unreadable(f"the text ends where {wanted} is expected", token.span)
        if token.kind != kind or text not in (None, token.text):
            raise self._unreadable(f"expected {wanted}, found '{token.text}'", token.span)
        self.at += 1
        return token

    def _unreadable(self, reason: str, span: Span) -> ParseError:
        return ParseError(reason, span, self.text, self.source)

    def _refused(self, reason: str, span: Span) -> OptionError:
        return OptionError(f"{self.source}:{span.line}:{span.column}: {reason}\n{span.underline(self.text)}")


class _MismatchError(Exception):
    """A value that is not of the type of its option."""


def _coerce(value: _Value, wanted: Any) -> Any:
    """What ``value`` spells as the type ``wanted``. Raises _MismatchError."""
    origin, args = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        return _coerce_first(value, sorted(args, key=[float, str].count))  # these two also accept what others do
    if origin is Literal:
        found = _coerce_first(value, [type(choice) for choice in args])
        if not any(type(found) is type(choice) and found == choice for choice in args):
            raise _MismatchError
        return found
    if origin is tuple:
        items = args[:1] * len(value.items) if args[1:] == (...,) else args
        if value.kind != "list" or len(items) != len(value.items):
            raise _MismatchError
        return tuple(_coerce(item, type_) for item, type_ in zip(value.items, items, strict=True))
    if value.kind == "number" and wanted is float:
        return float(value.text)
    if value.kind == "number" and wanted is int and not any(mark in value.text for mark in ".eEi"):
        return int(value.text)
    if value.kind == "string" and wanted is str:
        return json.loads(value.text)
    found = _RESERVED.get(value.text, value.text)
    if value.kind != "word" or type(found) is not wanted:
        raise _MismatchError
    return found


def _coerce_first(value: _Value, choices: Sequence[Any]) -> Any:
    for choice in choices:
        try:
            return _coerce(value, choice)
        except _MismatchError:
            continue
    raise _MismatchError


# -- passes to text ----------------------------------------------------------------------------------------------------


def print_pipeline(passes: Iterable[Pass]) -> str:
    """The canonical text of ``passes``, which parses back to them. Raises OptionError for a value without text."""
    return ",".join(print_pass(item) for item in passes)


def print_pass(item: Pass) -> str:
    """The canonical text of one pass: fields at their default are left out."""
    options: list[str] = []
    for field in dataclasses.fields(item):
        value = getattr(item, field.name)
        default = _default(field)
        if not field.init or (type(value) is type(default) and value == default):
            continue
        try:
            options.append(f"{_option_name(field.name)}={_print_value(value)}")
        except TypeError as error:
            raise OptionError(f"option '{_option_name(field.name)}' of pass '{item.name}': {error}") from error
    return f"{item.name}{{{','.join(options)}}}" if options else item.name


def _default(field: dataclasses.Field[Any]) -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _print_value(value: object) -> str:
    """The text of one option value. Raises TypeError when it has none."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return value if _BARE.fullmatch(value) and value not in _RESERVED else json.dumps(value)
    if isinstance(value, tuple):
        return f"[{','.join(_print_value(item) for item in value)}]"
    raise TypeError(f"a {type(value).__name__} has no text")


def _has_text(wanted: object) -> bool:
    """Whether values of this type can be written in a pipeline."""
    if get_origin(wanted) in (Union, types.UnionType, tuple):
        return all(_has_text(part) for part in get_args(wanted) if part is not ...)
    return get_origin(wanted) is Literal or wanted in (int, float, bool, str, type(None), OptionValue)


def _type_text(wanted: object) -> str:
    """A type as users read it: ``int or none``, ``a list of int``, ``auto or all``."""
    origin, args = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        return " or ".join(_type_text(choice) for choice in args)
    if origin is Literal:
        return " or ".join(_print_value(choice) for choice in args)
    if origin is tuple and args[1:] == (...,):
        return f"a list of {_type_text(args[0])}"
    if origin is tuple:
        return f"[{', '.join(map(_type_text, args))}]"
    if wanted in (str, type(None)):
        return "string" if wanted is str else "none"
    return wanted.__name__ if isinstance(wanted, type) else str(wanted)


# -- passes by name ----------------------------------------------------------------------------------------------------

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


@dataclasses.dataclass(frozen=True, slots=True)
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

    def register(self, given: P) -> P:
        """Make a pass class, or a function (see ``as_pass``), known under its name; also a decorator.

        A class of the same module and name takes the place of the one before it, as in a notebook's cell that runs
        again. Raises OptionError when it is no frozen dataclass, has no kebab-case name, or its name is taken.
        """
        cls: Any = given if isinstance(given, type) else as_pass(given)
        problem = _problem_of(cls)
        if problem:
            raise OptionError(problem)
        taken = self._origin_of(cls.name)
        if taken not in (None, _path_of(cls)):
            raise OptionError(f"cannot register {_path_of(cls)}: the name '{cls.name}' is taken by {taken}")
        self._classes[cls.name] = cls
        return given

    def names(self) -> tuple[str, ...]:
        """Every known name: built-in passes in pipeline order, then others by name."""
        others = {*self._classes, *(point.name for point in self._installed())}
        return (*BUILT_IN, *sorted(others - BUILT_IN.keys()))

    def lookup(self, name: str) -> type[Pass]:
        """The class called ``name``. Raises OptionError when there is none, several, or it does not load."""
        if name in self._classes:
            return self._classes[name]
        paths = [BUILT_IN[name]] if name in BUILT_IN else self._paths_of(name)
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
        wanted = _option_types(cls)
        defaults = {field.name: _default(field) for field in dataclasses.fields(cls) if field.init}
        texts = {n: None if value is dataclasses.MISSING else _print_value(value) for n, value in defaults.items()}
        options = tuple((_option_name(n), _type_text(wanted[n]), text) for n, text in texts.items())
        summary = (cls.__doc__ or "").strip().partition("\n")[0]
        return PassInfo(name, origin, summary, options, cls.requires, cls.ensures)

    def _load(self, name: str, path: str) -> type[Pass]:
        module, _, attribute = path.partition(":")
        try:
            cls = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # importing a stranger's module may raise anything, and others must still load
            raise OptionError(f"pass '{name}' ({path}) does not load: {type(error).__name__}: {error}") from error
        if isinstance(cls, types.FunctionType):
            cls = as_pass(cls)
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
        clashes = [point for point in self._points if BUILT_IN.get(point.name, point.value) != point.value]
        for point in () if self._reported else clashes:
            _log.warning("entry point %s = %s is ignored: the pass is built in", point.name, point.value)
        self._reported = True
        return self._points


def _problem_of(cls: Any) -> str | None:
    """Why ``cls`` cannot be used as a pass, or None."""
    if not (isinstance(cls, type) and issubclass(cls, Pass)):
        return f"{cls!r} is no subclass of pygraph.passes.Pass"
    params = cls.__dict__.get("__dataclass_params__")
    if params is None or not params.frozen:
        return f"{_path_of(cls)} is no frozen dataclass"
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not _BARE.fullmatch(name):
        return f"{_path_of(cls)} needs a kebab-case 'name', not {name!r}"
    for field, wanted in _option_types(cls).items():
        if not _has_text(wanted):
            kind = _type_text(wanted)
            return f"option '{_option_name(field)}' of {_path_of(cls)} is a {kind}, which pipelines cannot write"
    return None


def _path_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


default_registry = Registry()
"""The registry that pipelines are read with unless another is given."""


def register(given: P) -> P:
    """Make a pass, or a function of a graph and a context, known to every pipeline of this process; also a decorator.

    Raises OptionError.
    """
    return default_registry.register(given)


def parse(text: str, source: str = "<pipeline>", registry: Registry = default_registry) -> tuple[Pass, ...]:
    """The passes that ``text`` names, with their options.

    Raises ParseError for malformed text, OptionError for a name that does not exist or a value of the wrong type;
    both say line and column and underline the place.
    """
    return _Parser(text, source, registry.lookup).pipeline()
