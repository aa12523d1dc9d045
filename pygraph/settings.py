"""What a user may set: the ``options`` of ``torch.compile`` and environment variables of the same names.

An option given in code wins over its variable. Names and types are checked here; meaning lives where it is used.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

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
        chosen = _from_environment(environ)
        for name, value in (options or {}).items():
            key = name.replace("-", "_")
            if key not in _CHECKS:
                raise OptionError(f"unknown option '{name}'{_nearest(key)}")
            chosen[key] = _CHECKS[key](name, value)
        return Settings(**chosen)


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, list(_CHECKS), n=1, cutoff=0.4)
    known = ", ".join(_CHECKS)
    return f"; did you mean '{near[0]}'?" if near else f"; known options are {known}"


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for field_ in fields(Settings):
        text = environ.get(_PREFIX + field_.name.upper())
        if text is None or field_.name == "inductor":
            continue
        chosen[field_.name] = _CHECKS[field_.name](_PREFIX + field_.name.upper(), _PARSERS[field_.name](text))
    return chosen


@functools.cache
def _warn_of_unknown(names: frozenset[str]) -> None:
    """Warn, once, of variables that look like PyGraph's and are none."""
    known = [_PREFIX + name.upper() for name in _PARSERS] + [VARIABLE]
    for name in sorted(names.difference(known)):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        _log.warning("the environment variable %s is ignored: %s", name, hint)


def _parse_bool(text: str) -> object:
    return {"": False, "0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}.get(
        text.lower(), text
    )


def _parse_int(text: str) -> object:
    return int(text) if text.strip().lstrip("-").isdigit() else text


def _parse_text(text: str) -> object:
    return text


def _parse_optional(text: str) -> object:
    return text or None


def _bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be true or false, not {value!r}")
    return value


def _positive(least: int) -> Callable[[str, object], int]:
    def check(name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise OptionError(f"{name} must be a whole number of at least {least}, not {value!r}")
        return value

    return check


def _path(name: str, value: object) -> str | None:
    if value is not None and not isinstance(value, (str, os.PathLike)):
        raise OptionError(f"{name} must be a path, not {value!r}")
    return None if value is None else os.fspath(value)


def _optional_path(name: str, value: object) -> str | None:
    """An empty path is none, as in the environment."""
    return _path(name, value) or None


def _verify(name: str, value: object) -> str:
    if value not in ("first", "always"):
        raise OptionError(f"{name} must be 'first' or 'always', not {value!r}")
    return str(value)


def _passes(name: str, value: object) -> object:
    if not isinstance(value, (str, list, tuple)):
        raise OptionError(f"{name} must be pipeline text or a sequence of passes, not {value!r}")
    return value if isinstance(value, str) else tuple(value)


def _mapping(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise OptionError(f"{name} must be a mapping of Inductor's options, not {value!r}")
    return dict(value)


_CHECKS: dict[str, Callable[[str, object], Any]] = {
    "passes": _passes,
    "dump_dir": _path,
    "strict": _bool,
    "disable": _bool,
    "verify": _verify,
    "capture_after": _positive(2),
    "max_captures": _positive(1),
    "measure": _bool,
    "cache_dir": _optional_path,
    "inductor": _mapping,
}
_PARSERS: dict[str, Callable[[str], object]] = {
    "passes": _parse_text,
    "dump_dir": _parse_optional,
    "strict": _parse_bool,
    "disable": _parse_bool,
    "verify": _parse_text,
    "capture_after": _parse_int,
    "max_captures": _parse_int,
    "measure": _parse_bool,
    "cache_dir": _parse_optional,
}
