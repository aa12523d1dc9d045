"""What a user may set: the ``options`` of ``torch.compile`` and environment variables of the same names.

An option given in code wins over its variable. Names and types are checked here; meaning lives where it is used.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pygraph.cache import user_dir
from pygraph.errors import OptionError
from pygraph.logs import VARIABLE

__all__ = ["Settings"]

_PREFIX = "PYGRAPH_"
_log = logging.getLogger("pygraph")


@dataclass(frozen=True)
class Settings:
    """Options of the backend.

    passes         pipeline text, or a sequence of passes and pipeline texts; None is the default pipeline
    dump_dir       where IR, programs and reports are written; nothing is written when None
    strict         raise when an operator or a region cannot be captured, or PyGraph failed
    disable        compile with plain Inductor
    verify         ``first``: a replay is compared once before it counts; ``always``: at every call
    capture_after  the occurrence of a set of sizes at which it is captured (2 or more)
    max_captures   captures that one region keeps
    measure        whether real calls try if a replay pays, and what does not is left uncaptured
    cache_dir      where native libraries and decisions of measured selection are kept for later processes; with
                   None, no decision is kept, and libraries are where they are by default
    inductor       patches to Inductor's configuration for this compilation
    """

    passes: Any = None
    dump_dir: str | None = None
    strict: bool = False
    disable: bool = False
    verify: str = "first"
    capture_after: int = 2
    max_captures: int = 64
    measure: bool = True
    cache_dir: str | None = field(default_factory=user_dir)
    inductor: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pipeline(self) -> Any:
        """The passes to run."""
        from pygraph.passes.manager import DEFAULT_PIPELINE  # takes a while, and a restored program needs none

        return DEFAULT_PIPELINE if self.passes is None else self.passes

    def check_passes(self) -> None:
        """Raises ParseError or OptionError for passes of the user's that cannot be run."""
        if self.passes is not None:
            from pygraph.passes.manager import PassManager

            PassManager(self.passes)

    @staticmethod
    def make(options: Mapping[str, Any] | None, environ: Mapping[str, str] | None = None) -> Settings:
        """Settings from ``options`` over the environment. Raises OptionError for an unknown name or a wrong value."""
        environ = os.environ if environ is None else environ
        _warn_of_unknown(frozenset(name for name in environ if name.startswith(_PREFIX)))
        chosen: dict[str, Any] = {}
        for name, (variable, parse, check) in _OPTIONS.items():
            if parse is not None and variable in environ:
                chosen[name] = check(variable, parse(environ[variable]))
        for name, value in (options or {}).items():
            key = name.replace("-", "_")
            if key not in _OPTIONS:
                raise OptionError(f"unknown option '{name}'{_nearest(key)}")
            chosen[key] = _OPTIONS[key].check(name, value)
        return Settings(**chosen)


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, list(_OPTIONS), n=1, cutoff=0.4)
    return f"; did you mean '{near[0]}'?" if near else f"; known options are {', '.join(_OPTIONS)}"


@functools.cache
def _warn_of_unknown(names: frozenset[str]) -> None:
    """Warn, once, of variables that look like PyGraph's and are none."""
    known = [option.variable for option in _OPTIONS.values() if option.parse is not None] + [VARIABLE]
    for name in sorted(names.difference(known)):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        _log.warning("the environment variable %s is ignored: %s", name, hint)


def _truth(text: str) -> object:
    words = {"": False, "0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}
    return words.get(text.lower(), text)


def _number(text: str) -> object:
    return int(text) if text.strip().lstrip("-").isdigit() else text


_Check = Callable[[str, object], Any]


def _is(what: str, holds: Callable[[Any], bool], convert: Callable[[Any], Any] = lambda value: value) -> _Check:
    """A check that a value is ``what``; returns it converted."""

    def check(name: str, value: object) -> Any:
        if not holds(value):
            raise OptionError(f"{name} must be {what}, not {value!r}")
        return convert(value)

    return check


def _at_least(least: int) -> _Check:
    what = f"a whole number of at least {least}"
    return _is(what, lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least)


_bool = _is("true or false", lambda value: isinstance(value, bool))
_path = _is(
    "a path",
    lambda value: value is None or isinstance(value, (str, os.PathLike)),
    lambda value: os.fspath(value) or None if value is not None else None,
)
_passes = _is(
    "pipeline text or a sequence of passes",
    lambda value: isinstance(value, (str, list, tuple)),
    lambda value: value if isinstance(value, str) else tuple(value),
)
_mapping = _is("a mapping of Inductor's options", lambda value: isinstance(value, Mapping), dict)


class _Option(NamedTuple):
    """Its environment variable, how that is read (None: there is none), and what checks and converts a value."""

    variable: str
    parse: Callable[[str], object] | None
    check: _Check


_OPTIONS = {
    name: _Option(_PREFIX + name.upper(), parse, check)
    for name, parse, check in (
        ("passes", str, _passes),
        ("dump_dir", str, _path),
        ("strict", _truth, _bool),
        ("disable", _truth, _bool),
        ("verify", str, _is("'first' or 'always'", lambda value: value in ("first", "always"))),
        ("capture_after", _number, _at_least(2)),
        ("max_captures", _number, _at_least(1)),
        ("measure", _truth, _bool),
        ("cache_dir", str, _path),
        ("inductor", None, _mapping),
    )
}
