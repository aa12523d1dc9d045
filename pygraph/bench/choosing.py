"""Has Inductor take, wherever it would time kernels to choose among them, what was chosen before for the program.

Its own files of choices do not do: their keys hold the number in a kernel's name, entries with a reduction block that
was scaled are not found again (torch 2.11), and compiled graphs are kept with one configuration alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias
from unittest import mock

import torch

from pygraph.bench.choices import Choices, QuietGpu
from pygraph.compat import compile_callbacks, inductor_timing

__all__ = ["Chooser", "configuration", "kernel_key"]

_COMPILING = ("DYNAMO", "LAZY_BACKWARD")
"""What torch calls compiling that uses no GPU; recording CUDA graphs does, and is told in the same way."""

Autotuner: TypeAlias = Any
"""An Inductor kernel with launchers of one or several configurations."""


class Chooser:
    """Chooses for this process. With ``fresh``, kernels are timed even if it was decided before: then compiling is
    what is measured, and what is timed later takes what was decided first."""

    def __init__(self, choices: Choices, quiet: QuietGpu, *, fresh: bool = False) -> None:
        self._choices, self._quiet, self._fresh = choices, quiet, fresh
        self._timing = inductor_timing()  # imported here, where nobody waits for it
        self._used: dict[str, str] = {}

    def used(self) -> dict[str, str]:
        """The configuration of each kernel that had several to choose among, by the kernel's key."""
        return dict(self._used)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inductor chooses this way, and is alone on the GPU with whatever it times there."""
        timing, padding = self._timing, _PaddingCache(self._choices)
        original = timing.autotuner.benchmark_all_configs

        def benchmark_all_configs(autotuner: Autotuner, *args: Any, **kwargs: Any) -> dict[Any, float]:
            return self.choose(autotuner, lambda: original(autotuner, *args, **kwargs))

        with contextlib.ExitStack() as stack:
            for target, name, instead in (
                (timing.kernel, "inductor_meta_common", _without_caches(timing.kernel.inductor_meta_common.__func__)),
                (timing.autotuner, "benchmark_all_configs", benchmark_all_configs),
                (timing.benchmarker, "benchmark_gpu", self._alone(timing.benchmarker.benchmark_gpu)),
                (timing.padding, "get_pad_cache", lambda: padding),
                (timing.padding, "is_padded_faster", _decided(timing.padding.is_padded_faster, padding)),
            ):
                stack.enter_context(mock.patch.object(target, name, instead))
            stack.enter_context(self._giving_way())
            yield

    @contextlib.contextmanager
    def _giving_way(self) -> Iterator[None]:
        """While something is compiled, the GPU has nothing to do, even if these calls have it for themselves."""

        def start(compiling: Any) -> None:
            if compiling.callback_trigger.name in _COMPILING:
                self._quiet.pause()

        def end(compiling: Any) -> None:
            if compiling.callback_trigger.name in _COMPILING:
                self._quiet.resume()

        compile_callbacks.register_start_callback(start)
        compile_callbacks.register_end_callback(end)
        try:
            yield
        finally:
            compile_callbacks.remove_start_callback(start)
            compile_callbacks.remove_end_callback(end)

    def choose(self, autotuner: Autotuner, time: Callable[[], Mapping[Any, float]]) -> dict[Any, float]:
        """Times by launcher: those of ``time``, or made up so that the one chosen before is the shortest."""
        key, among = kernel_key(autotuner), {configuration(each.config) for each in autotuner.launchers}
        chosen = self._known(key)
        if chosen not in among:
            with self._quiet.held():
                chosen = self._known(key)  # by now, perhaps, by the process that held the GPU
                if chosen not in among:
                    timings = dict(time())
                    self._used[key] = configuration(min(timings, key=timings.__getitem__).config)
                    self._choices.put(key, self._used[key])
                    return timings
        self._used[key] = str(chosen)
        return {each: 1.0 if configuration(each.config) == chosen else 2.0 for each in autotuner.launchers}

    def _known(self, key: str) -> Any | None:
        return None if self._fresh else self._choices.get(key)

    def _alone(self, benchmark: Callable[..., Any]) -> Callable[..., Any]:
        def alone(*args: Any, **kwargs: Any) -> Any:
            with self._quiet.held():
                return benchmark(*args, **kwargs)

        return alone


class _PaddingCache:
    """In the place of Inductor's cache of which matrix products are faster when padded."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        self._prefix = f"padding {torch.__version__} {gpu} "

    def lookup(self, key: str) -> Any | None:
        return self._choices.get(self._prefix + key)

    def set_value(self, key: str, *, value: Any) -> Any:
        return self._choices.put(self._prefix + key, value)


def _decided(is_padded_faster: Callable[..., bool], padding: _PaddingCache) -> Callable[..., bool]:
    """Two processes may time the same product at the same time: what was written first goes for both."""

    def decided(key: str, *args: Any, **kwargs: Any) -> bool:
        return bool(padding.set_value(key, value=is_padded_faster(key, *args, **kwargs)))

    return decided


def _without_caches(inductor_meta_common: Callable[[Any], dict[str, Any]]) -> Any:
    """Kernels without Inductor's own caches of choices. Said in their source, it goes for the processes that compile
    them and for the thread of a backward too, where a setting of this thread's may be unknown."""

    def common(cls: Any) -> dict[str, Any]:
        return {**inductor_meta_common(cls), "autotune_local_cache": False, "autotune_remote_cache": False}

    return classmethod(common)


def configuration(config: Any) -> str:
    """What tells one configuration of a kernel from the others, in words."""
    blocks = [f"{name}={value}" for name, value in sorted(config.kwargs.items())]
    return " ".join([*blocks, f"num_warps={config.num_warps}", f"num_stages={config.num_stages}"])


def kernel_key(autotuner: Autotuner) -> str:
    """What two kernels have in common that do the same and may be configured alike, whatever their names.

    A name holds the number of the kernel in its program, which is another one as soon as a side compiles one kernel
    more. Kernels that share a key by mistake would be right all the same: each configuration is one of their own.
    """
    source = autotuner.fn.src
    named = re.match(r"def\s+(\w+)", source)
    if named:
        source = re.sub(rf"\b{named[1]}\b", "kernel", source)
    meta = autotuner.triton_meta
    facts = [str(meta.get(name)) for name in ("signature", "constants", "configs", "device")]
    among = sorted(configuration(each.config) for each in autotuner.launchers)
    grid = str(autotuner.inductor_meta.get("grid_type"))
    parts = [torch.__version__, source, str(autotuner.size_hints), grid, *facts, *among]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
