"""Pipeline text and passes: ``legality,partitioning{max-regions=4}`` is parsed, checked against fields, printed back.

Which class a name stands for is the registry's business; running the passes is the manager's.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import types
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from pygraph.errors import OptionError, Span
from pygraph.passes.base import Pass
from pygraph.passes.grammar import PassSyntax, ValueSyntax, parse_syntax

__all__ = [
    "OptionValue",
    "field_name",
    "has_text",
    "nearest",
    "option_name",
    "parse_pipeline",
    "pass_options",
    "print_pass",
    "print_pipeline",
    "print_value",
]

OptionValue: TypeAlias = "int | float | bool | str | tuple[OptionValue, ...] | None"
"""What an option may hold: what has a text. Lists are tuples, since passes are frozen."""

_BARE = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", re.ASCII)
_RESERVED = {"true": True, "false": False, "none": None, "inf": math.inf, "nan": math.nan}
_MISMATCH = object()


def option_name(field: str) -> str:
    """The option that sets ``field``: ``max_regions`` is ``max-regions``."""
    return field.replace("_", "-")


def field_name(option: str) -> str:
    """The field that ``option`` sets."""
    return option.replace("-", "_")


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint that names the closest known word, or lists all when none is close. Empty when nothing is known."""
    choices = list(known)
    close = difflib.get_close_matches(word, choices, n=1)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(choices)}" if choices else ""


def pass_options(cls: type[Pass]) -> dict[str, object]:
    """The types of the options of ``cls`` by field name, in order of declaration."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


# -- text to passes ----------------------------------------------------------------------------------------------------


def parse_pipeline(text: str, lookup: Callable[[str], type[Pass]], source: str = "<pipeline>") -> tuple[Pass, ...]:
    """The passes that ``text`` names, with their options. ``lookup`` finds the class of a name.

    Raises ParseError for malformed text, OptionError for a name that does not exist or a value of the wrong type;
    both say line and column and underline the place.
    """
    return tuple(_Builder(text, source, lookup).build(syntax) for syntax in parse_syntax(text, source))


@dataclasses.dataclass(frozen=True)
class _Builder:
    text: str
    source: str
    lookup: Callable[[str], type[Pass]]

    def build(self, syntax: PassSyntax) -> Pass:
        try:
            cls = self.lookup(syntax.name)
        except OptionError as error:
            raise self.error(str(error), syntax.span) from error
        options = self.options(cls, syntax)
        try:
            return cls(**options)
        except (TypeError, ValueError) as error:  # a missing option, or a value that __post_init__ rejects
            raise self.error(f"pass '{syntax.name}': {error}", syntax.span) from error

    def options(self, cls: type[Pass], syntax: PassSyntax) -> dict[str, OptionValue]:
        known = pass_options(cls)
        chosen: dict[str, OptionValue] = {}
        for option in syntax.options:
            field = field_name(option.name)
            if field not in known or option.name != option_name(field):
                hint = nearest(option_name(field), map(option_name, known)) or "; it has no options"
                raise self.error(f"pass '{syntax.name}' has no option '{option.name}'{hint}", option.span)
            if field in chosen:
                raise self.error(f"option '{option.name}' of pass '{syntax.name}' is set twice", option.span)
            value = _coerce(option.value, known[field])
            if value is _MISMATCH:
                wanted, found = type_text(known[field]), self.spelled(option.value)
                raise self.error(
                    f"option '{option.name}' of pass '{syntax.name}' must be {wanted}, not {found}", option.value.span
                )
            chosen[field] = value  # type: ignore[assignment]  # the one value that is no option was excluded
        return chosen

    def spelled(self, value: ValueSyntax) -> str:
        return "a list" if value.kind == "list" else value.text

    def error(self, reason: str, span: Span) -> OptionError:
        return OptionError(f"{self.source}:{span.line}:{span.column}: {reason}\n{span.underline(self.text)}")


def _coerce(syntax: ValueSyntax, wanted: object) -> object:
    """The value that ``syntax`` spells as the type ``wanted``, or _MISMATCH."""
    origin = get_origin(wanted)
    if origin in (Union, types.UnionType):
        found = (_coerce(syntax, choice) for choice in _strictest_first(get_args(wanted)))
        return next((value for value in found if value is not _MISMATCH), _MISMATCH)
    if origin is Literal:
        return next((v for v in get_args(wanted) if _matches(_coerce(syntax, type(v)), v)), _MISMATCH)
    if origin is tuple:
        return _coerce_list(syntax, get_args(wanted))
    return _coerce_atom(syntax, wanted)


def _matches(value: object, choice: object) -> bool:
    return type(value) is type(choice) and value == choice


def _strictest_first(choices: tuple[object, ...]) -> list[object]:
    """A float accepts an int and a string accepts any bare word, so they are tried last."""
    last = {float: 1, str: 2}
    return sorted(choices, key=lambda choice: last.get(choice, 0) if isinstance(choice, type) else 0)


def _coerce_list(syntax: ValueSyntax, items: tuple[object, ...]) -> object:
    if syntax.kind != "list":
        return _MISMATCH
    wanted = items[:1] * len(syntax.items) if items[1:] == (...,) else items
    if len(wanted) != len(syntax.items):
        return _MISMATCH
    values = tuple(_coerce(item, type_) for item, type_ in zip(syntax.items, wanted, strict=True))
    return _MISMATCH if _MISMATCH in values else values


def _coerce_atom(syntax: ValueSyntax, wanted: object) -> object:
    if syntax.kind == "string":
        return json.loads(syntax.text) if wanted is str else _MISMATCH
    if syntax.kind == "number":
        return _coerce_number(syntax.text, wanted)
    if syntax.kind != "word":
        return _MISMATCH
    value = _RESERVED.get(syntax.text, syntax.text)
    return value if type(value) is wanted else _MISMATCH


def _coerce_number(text: str, wanted: object) -> object:
    if wanted is float:
        return float(text)
    whole = not any(mark in text for mark in ".eEi")
    return int(text) if wanted is int and whole else _MISMATCH


# -- passes to text ----------------------------------------------------------------------------------------------------


def print_pipeline(passes: Iterable[Pass]) -> str:
    """The canonical text of ``passes``, which parses back to them. Raises OptionError for a value without text."""
    return ",".join(print_pass(item) for item in passes)


def print_pass(item: Pass) -> str:
    """The canonical text of one pass: fields at their default are left out."""
    shown = [field for field in dataclasses.fields(item) if field.init and not _at_default(item, field)]
    if not shown:
        return item.name
    options = (f"{option_name(field.name)}={_print_field(item, field)}" for field in shown)
    return f"{item.name}{{{','.join(options)}}}"


def _print_field(item: Pass, field: dataclasses.Field[object]) -> str:
    try:
        return print_value(getattr(item, field.name))
    except TypeError as error:
        raise OptionError(f"option '{option_name(field.name)}' of pass '{item.name}': {error}") from error


def print_value(value: object) -> str:
    """The text of one option value. Raises TypeError when it has none."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return value if _BARE.fullmatch(value) and value not in _RESERVED else json.dumps(value)
    if isinstance(value, tuple):
        return f"[{','.join(print_value(item) for item in value)}]"
    raise TypeError(f"a {type(value).__name__} has no text")


def _at_default(item: Pass, field: dataclasses.Field[object]) -> bool:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    value = getattr(item, field.name)
    return type(value) is type(default) and value == default


def has_text(wanted: object) -> bool:
    """Whether values of this type can be written in a pipeline."""
    if get_origin(wanted) in (Union, types.UnionType, tuple):
        return all(has_text(part) for part in get_args(wanted) if part is not ...)
    return get_origin(wanted) is Literal or wanted in (int, float, bool, str, type(None), OptionValue)


def type_text(wanted: object) -> str:
    """A type as users read it: ``int or none``, ``a list of int``, ``'auto' or 'all'``."""
    origin, args = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(choice) for choice in args)
    if origin is Literal:
        return " or ".join(print_value(choice) for choice in args)
    if origin is tuple and args[1:] == (...,):
        return f"a list of {type_text(args[0])}"
    if origin is tuple:
        return f"[{', '.join(map(type_text, args))}]"
    if wanted is type(None):
        return "none"
    if wanted is str:
        return "string"
    return wanted.__name__ if isinstance(wanted, type) else str(wanted)
