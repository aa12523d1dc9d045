"""One configuration of each Triton kernel for all sides of a program.

Inductor times the configurations of a kernel and takes the fastest. On a noisy machine, the choice may be half as fast
as the best, and two sides may choose differently. So the first process that times a kernel decides for all::

    choices.json   {"<hash of source, sizes, types, candidates>": "XBLOCK=128 num_warps=4 num_stages=1", …}

Inductor's own files of choices do not work here: their keys include the number of a kernel in its program, and compiled
graphs in its cache have only one configuration.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import torch

from pygraph.cache import locked, write_atomically
from pygraph.compat import inductor_timing

__all__ = ["Choices", "configuration", "kernel_key", "sharing"]

Autotuner: TypeAlias = Any
"""An Inductor kernel with launchers of one or several configurations."""


class Choices:
    """Decisions by key in a JSON file. The first decision of any process stays; each is written immediately."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def get(self, key: str) -> Any | None:
        """The stored decision, or None."""
        return self._read().get(key)

    def put(self, key: str, value: Any) -> Any:
        """Store a decision, unless there is one already; returns the stored one. Raises OSError."""
        with locked(self._path.with_suffix(".lock")):
            known = self._read()
            if key not in known:
                write_atomically(self._path, json.dumps({**known, key: value}, indent=1) + "\n")
            return known.get(key, value)

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Lock the GPU: no other process of this program times kernels meanwhile. Raises OSError."""
        return locked(self._path.with_suffix(".gpu"))

    def _read(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return found


@contextlib.contextmanager
def sharing(path: Path) -> Iterator[None]:
    """In this context, Inductor takes the decisions in the file at ``path``, and adds those that it makes itself."""
    timing, choices = inductor_timing(), Choices(path)
    time_all, pads = timing.autotuner.benchmark_all_configs, timing.padding.is_padded_faster
    common = timing.kernel.inductor_meta_common.__func__

    def benchmark_all_configs(kernel: Autotuner, *args: Any, **kwargs: Any) -> dict[Any, float]:
        key, among = kernel_key(kernel), {configuration(each.config) for each in kernel.launchers}
        if choices.get(key) not in among:
            with choices.alone():
                if choices.get(key) not in among:  # no other process decided meanwhile
                    times = dict(time_all(kernel, *args, **kwargs))
                    choices.put(key, configuration(min(times, key=times.__getitem__).config))
                    return times
        chosen = choices.get(key)
        return {each: 1.0 if configuration(each.config) == chosen else 2.0 for each in kernel.launchers}

    def is_padded_faster(key: str, *args: Any, **kwargs: Any) -> bool:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        padded = bool(choices.put(f"padding {torch.__version__} {gpu} {key}", pads(key, *args, **kwargs)))
        timing.padding.set_cached_should_pad(key, padded)
        return padded

    def without_caches(cls: Any) -> dict[str, Any]:
        """Set the options in the kernel's source, so that compile processes and the thread of a backward obey, too."""
        return {**common(cls), "autotune_local_cache": False, "autotune_remote_cache": False}

    with (
        mock.patch.object(timing.autotuner, "benchmark_all_configs", benchmark_all_configs),
        mock.patch.object(timing.padding, "is_padded_faster", is_padded_faster),
        mock.patch.object(timing.kernel, "inductor_meta_common", classmethod(without_caches)),
    ):
        yield


def configuration(config: Any) -> str:
    """One configuration of a kernel, as text."""
    blocks = [f"{name}={value}" for name, value in sorted(config.kwargs.items())]
    return " ".join([*blocks, f"num_warps={config.num_warps}", f"num_stages={config.num_stages}"])


def kernel_key(kernel: Autotuner) -> str:
    """A hash of a kernel's code and its candidate configurations, without its name, which differs between sides."""
    source = kernel.fn.src
    if named := re.match(r"def\s+(\w+)", source):
        source = re.sub(rf"\b{named[1]}\b", "kernel", source)
    facts = [str(kernel.triton_meta.get(name)) for name in ("signature", "constants", "configs", "device")]
    among = sorted(configuration(each.config) for each in kernel.launchers)
    grid = str(kernel.inductor_meta.get("grid_type"))
    parts = [torch.__version__, source, str(kernel.size_hints), grid, *facts, *among]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
