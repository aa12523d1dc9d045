"""Settings of a user: the ``options`` of ``torch.compile`` and environment variables of the same names.

An option given in code wins over its variable. Names and types are checked here; meaning lives where it is used.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from pygraph.cache import SIZE, user_dir
from pygraph.errors import OptionError
from pygraph.logs import VARIABLE
from pygraph.program.default import ORDER_MEMORY, DefaultPasses, LaunchPasses

_PREFIX = "PYGRAPH_"
_log = logging.getLogger("pygraph")


@dataclass(frozen=True)
class Settings:
    """Options of the backend.

    Args:
        passes: pipeline text, or a sequence of passes and pipeline texts; None: the default pipeline
        launch_passes: pipeline over the launches of each capture, in the same forms; None: the default pipeline
        dump_dir: folder for IR, programs and reports; None: no dumps
        dump_inputs: also dump the arguments of each graph's first call, up to 1 GiB, for ``pygraph run``
        frames: record, for each operator in dumps and reports, the user's call stack
        strict: raise CaptureError if an operator or a region cannot be captured; raise PyGraph's own errors, too
        disable: compile with plain Inductor; run a callable of ``pygraph.graph`` as it is
        verify: replays to compare with an uncaptured run: ``first``, the first of each capture, unless its kernels are
            proven; ``sample``, the first of each capture and one in 1,000 later ones; ``always``, all
        capture_after: occurrence of a set of sizes at which it is captured, at least 2
        memory_limit: bytes of a device that the captures of all regions may take, as a number or text such as
            ``"2GiB"``; the least recently used are freed. None: a tenth of the device's memory. A session counts its
            own captures only
        ledger: capture only sizes that return often enough for captures to pay; false: capture each at its
            ``capture_after``-th occurrence
        order: launches for which each launch of a replay waits: ``program``, all earlier ones; ``dependences``, those
            on which it depends; ``measured``, the faster of both in real calls
        order_memory: fraction of the uncaptured program's peak memory that the order ``dependences`` may add, where
            2 MiB are always allowed: the option ``memory`` of the default pass ``order``
        collectives: ``eager``: each replay calls collectives; ``measured``: they are captured with the launches around
            them, once all ranks have found that correct and no slower
        cache_dir: folder of native libraries, order decisions, proven kernels and choices of products, for later
            processes. None: keep only libraries, in the default folder
        inductor: patches to Inductor's configuration for this compilation
    """

    passes: Any = None
    launch_passes: Any = None
    dump_dir: str | None = None
    dump_inputs: bool = False
    frames: bool = False
    strict: bool = False
    disable: bool = False
    verify: str = "first"
    capture_after: int = 2
    memory_limit: int | None = None
    ledger: bool = True
    order: str = "measured"
    order_memory: float = ORDER_MEMORY
    collectives: str = "eager"
    cache_dir: str | None = field(default_factory=user_dir)
    inductor: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verify_every(self) -> int:
        """Replays per comparison with an uncaptured run; 0: only the first replay of a capture is compared."""
        return {"first": 0, "sample": 1000, "always": 1}[self.verify]

    @property
    def pipeline(self) -> Any:
        """Passes to run: ``passes``, or the default pipeline."""
        from pygraph.passes.manager import DEFAULT_PIPELINE  # takes a while, and a restored program needs none

        return DEFAULT_PIPELINE if self.passes is None else self.passes

    def check_passes(self) -> None:
        """Raise ParseError or OptionError if the user's passes cannot run, or not in their order."""
        if self.passes is not None:
            from pygraph.passes.manager import PassManager

            PassManager(self.passes).check_order()
        self.check_launch_passes()

    def check_launch_passes(self) -> None:
        """Raise ParseError or OptionError if the user's launch passes cannot run, or not in their order."""
        if self.launch_passes is not None:
            from pygraph.passes.manager import PassManager

            PassManager(self.launch_passes).check_order(None)

    def launches(self, folder: Path | None = None) -> LaunchPasses:
        """Passes over captured launches; dumps go to ``folder``, if given."""
        if self.launch_passes is None and folder is None:
            return DefaultPasses(self.order_memory)
        from pygraph.passes.launches import DEFAULT_LAUNCH_PIPELINE, LaunchPipeline
        from pygraph.passes.manager import PassManager

        default = DEFAULT_LAUNCH_PIPELINE.replace("order", f"order{{memory={self.order_memory!r}}}")
        chosen = default if self.launch_passes is None else self.launch_passes
        return LaunchPipeline(PassManager(chosen, dump_dir=folder))

    @staticmethod
    def make(options: Mapping[str, Any] | None, environ: Mapping[str, str] | None = None) -> Settings:
        """Settings from ``options`` over the environment. Raises OptionError for an unknown name or invalid value."""
        environ = os.environ if environ is None else environ
        _warn_of_unknown(frozenset(name for name in environ if name.startswith(_PREFIX)))
        chosen = {
            name: _checked(name, variable, _read(name, environ[variable]))
            for variable, name in _VARIABLES.items()
            if variable in environ
        }
        for name, value in (options or {}).items():
            key = name.replace("-", "_")
            if key not in _KINDS:
                from pygraph import compat
                from pygraph.passes.pipeline import nearest

                known = compat.inductor_config.get_config_copy()
                hint = f"; it is Inductor's: {{'inductor': {{'{name}': …}}}}" if name in known else nearest(key, _KINDS)
                raise OptionError(f"unknown option '{name}'{hint}")
            chosen[key] = _checked(key, name, value)
        return Settings(**chosen)

    @staticmethod
    def of_callable(options: Mapping[str, Any] | None) -> Settings:
        """Settings of a captured callable, as by ``make``. Raises OptionError also for options of compiled programs,
        and OptionError or ParseError for launch passes that cannot run."""
        for name in options or {}:
            if name.replace("-", "_") in COMPILED:
                raise OptionError(f"the option '{name}' is one of compiled programs, not of captured callables")
        settings = Settings.make(options)
        settings.check_launch_passes()
        return settings


_KINDS = {
    "passes": "pipeline text or a sequence of passes",
    "launch_passes": "pipeline text or a sequence of passes",
    "dump_dir": "a path",
    "dump_inputs": "true or false",
    "frames": "true or false",
    "strict": "true or false",
    "disable": "true or false",
    "verify": "'first', 'sample' or 'always'",
    "capture_after": "a whole number of at least 2",
    "memory_limit": "a count of bytes, such as 2000000000 or '2GiB'",
    "ledger": "true or false",
    "order": "'measured', 'program' or 'dependences'",
    "order_memory": "a number of at least 0",
    "collectives": "'eager' or 'measured'",
    "cache_dir": "a path",
    "inductor": "a mapping of Inductor's options",
}
"""The values that each option takes."""
COMPILED = frozenset({"passes", "dump_dir", "dump_inputs", "frames", "collectives", "cache_dir", "inductor"})
"""Options of compiled programs only, which captured callables do not use."""
_VARIABLES = {_PREFIX + name.upper(): name for name in _KINDS if name != "inductor"}


@functools.cache
def _warn_of_unknown(names: frozenset[str]) -> None:
    """Warn, once, of environment variables with PyGraph's prefix that PyGraph does not have."""
    known = [*_VARIABLES, VARIABLE, SIZE]
    for name in sorted(names.difference(known)):
        from pygraph.passes.pipeline import nearest  # takes a while

        _log.warning("the environment variable %s is ignored%s", name, nearest(name, known))


def _read(option: str, text: str) -> object:
    """The value of an environment variable; its text if the option does not take such a value."""
    if _KINDS[option] == "true or false":
        words = {"": False, "0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}
        return words.get(text.lower(), text)
    if _KINDS[option].startswith("a whole number"):
        return int(text) if text.strip().lstrip("-").isdigit() else text
    if _KINDS[option].startswith("a number"):
        with contextlib.suppress(ValueError):
            return float(text)
    return text


_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def bytes_of(name: str, value: int | str) -> int:
    """A number of bytes, given as a number or as text such as ``2GiB``. Raises OptionError, which calls it ``name``,
    for other values."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]*)", str(value).strip().lower())
    nbytes = int(Decimal(found[1]) * _UNITS.get(found[2], 0)) if found else 0
    if nbytes < 1:  # no bool is a number here
        raise OptionError(f"{name} must be {_KINDS['memory_limit']}, not {value!r}")
    return nbytes


def _checked(option: str, name: str, value: Any) -> Any:
    """``value`` in the form of the settings. Raises OptionError, which calls it ``name``, for an invalid value."""
    match option, value:
        case "dump_inputs" | "frames" | "strict" | "disable" | "ledger", bool():
            return value
        case "capture_after", int() if not isinstance(value, bool) and value >= 2:
            return value
        case "memory_limit", None:
            return None
        case "memory_limit", int() | str():
            return bytes_of(name, value)
        case "order_memory", int() | float() if not isinstance(value, bool) and 0 <= value <= sys.float_info.max:
            return float(value)
        case "verify", "first" | "sample" | "always":
            return value
        case "order", "measured" | "program" | "dependences":
            return value
        case "collectives", "eager" | "measured":
            return value
        case "dump_dir" | "cache_dir", None | str() | os.PathLike():
            return (os.fspath(value) or None) if value is not None else None
        case "passes" | "launch_passes", str():
            return value
        case "passes" | "launch_passes", list() | tuple():
            return tuple(value)
        case "inductor", Mapping():
            return dict(value)
    raise OptionError(f"{name} must be {_KINDS[option]}, not {value!r}")
