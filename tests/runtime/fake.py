"""A driver in plain Python: it records one launch for whatever the region is, and replays by calling a function.

Tests script it: what a capture says or raises, what a replay computes, when it declines.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from threading import Lock
from typing import Any

import torch

from pygraph.errors import CaptureError
from pygraph.program.program import Program
from pygraph.program.recording import Origin, PythonCall, Recording, Use
from pygraph.runtime.contract import Executable, ScratchPool, uses
from pygraph.runtime.host import HostDriver
from pygraph.runtime.provenance import ran
from pygraph.runtime.region import Region, RegionOptions
from pygraph.runtime.tensors import extent
from pygraph.runtime.variants import Signatures
from tests.runtime.captures import Capture

__all__ = ["BYTES", "EvenDriver", "FakeDriver", "FakeExecutable", "Function", "accumulate", "double", "make", "noisy"]

Function = Callable[[list[Any]], Sequence[Any]]

_codes = itertools.count()

BYTES = 1000
"""Bytes of each executable."""


class FakeExecutable:
    """A native region that replays by calling a function on a copy of its arguments, if these are as captured."""

    def __init__(self, driver: FakeDriver, fn: Function, expected: object) -> None:
        self.driver = driver
        self.fn = fn
        self.expected = expected
        self.replays = self.used = 0
        self.closed = False
        self._busy = Lock()

    def replay(self, args: list[Any]) -> list[Any] | None:
        fits = self.driver.signatures.of(args, self.driver.sensitive) == self.expected
        if self.closed or not fits or not self._busy.acquire(blocking=False):
            return None
        try:
            if self.driver.declines(args):
                return None
            self.replays += 1
            uses.value += 1
            self.used = uses.value
            outputs = list((self.driver.kernel or self.fn)(list(args)))
            args.clear()
            return outputs
        finally:
            self._busy.release()

    def close(self) -> None:
        self.closed = True


class FakeDriver(HostDriver):
    """``written``: arguments that the recorded launch writes (None: unknown). ``edits``, one per capture to come,
    change a Capture before it is handed out, or raise. ``kernel``: what replays compute instead of the region.
    ``drains`` waits for the device, and says whether it could. ``nondeterministic``: of how many outputs the launch is
    known to come out otherwise each time; None: it is not, and nobody knows the outputs. ``random``: whether it draws.
    ``python``: operators written in Python that a capture calls. ``within``: whether transient memory is in use now;
    ``eager``: what each capture was told that replays call. ``given_back``: how often it was given back.
    ``nbytes``: what the next executable takes. ``code``: of the launch, the same in all captures; None: another one in
    each, so that all are compared."""

    def __init__(self, kernel: Function | None = None, written: Sequence[int] | None = ()) -> None:
        super().__init__()
        self.kernel = kernel
        self.written = written
        self.sensitive: frozenset[int] = frozenset()
        self.edits: list[Callable[[Capture], None]] = []
        self.declines: Callable[[list[Any]], bool] = lambda args: False
        self.drains: Callable[[], bool] = lambda: True
        self.refuses: Exception | None = None
        self.captures = 0
        self.nbytes = BYTES
        self.executables: list[FakeExecutable] = []
        self.signatures = Signatures()
        self.within = False
        self.given_back = 0
        self.nondeterministic: int | None = None
        self.random = True
        self.spare = 1 << 30
        self.python: tuple[PythonCall, ...] = ()
        self.eager: list[tuple[str, ...]] = []
        self.code: str | None = None

    def capture(self, fn: Function, args: Sequence[Any], eager: Collection[str] = (), **_: Any) -> Recording:
        self.captures += 1
        self.eager.append(tuple(eager))
        capture = Capture(0x7000_0000_0000 + (self.captures << 32), gap=4096 + 64 * self.captures)
        sizes = {i: extent(a) for i, a in enumerate(args) if isinstance(a, torch.Tensor)}
        words = [capture.input(nbytes, index=i) for i, nbytes in sizes.items()]
        pool = capture.pool(64)
        uses = None
        if self.written is not None:
            uses = [Use(w, 0, n, True, i in self.written) for w, (i, n) in enumerate(sizes.items())]
            uses.append(Use(len(words), 0, 64, False, True))
        unsteady = self.nondeterministic is not None
        facts: dict[str, Any] = {"origin": Origin(locs=("toy.py:1",)), "nondeterministic": unsteady}
        if any(call.name.startswith(f"{name}.") for call in self.python for name in eager):
            raise CaptureError("no-calls", "this driver's replays call no operators")
        for call in self.python:
            ran(call.name)
            facts.update(call=call.name, origin=Origin(call.nodes, ("toy.py:1",)))
        code = self.code or next(_codes)
        capture.launch(*words, pool, name="toy", uses=uses, code=code, **facts)
        for _ in range(self.nondeterministic or 0):
            capture.fresh(0)
        if self.edits:
            self.edits.pop(0)(capture)
        payload = (fn, self.signatures.of(args, self.sensitive))
        return capture.recording(payload=payload, offset_sensitive=self.sensitive, python=self.python)

    def instantiate(self, program: Program) -> Executable:
        if self.refuses is not None:
            raise self.refuses
        payload: Any = program.recording.payload
        fn, expected = payload
        self.executables.append(FakeExecutable(self, fn, expected))
        return Executable(self.executables[-1], nbytes=self.nbytes)

    def generator(self, program: Program) -> torch.Generator | None:
        return torch.default_generator if self.random else None

    def spare_bytes(self) -> int:
        return self.spare

    def synchronise(self, device: torch.device | None) -> bool:
        return self.drains()

    @contextlib.contextmanager
    def scratch_pool(self, args: Sequence[Any]) -> Iterator[ScratchPool]:
        try:
            yield self._inside
        finally:
            assert not self.within
            self.given_back += 1

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        assert not self.within
        self.within = True
        try:
            yield
        finally:
            self.within = False


class EvenDriver(HostDriver):
    """The host driver, as though each of its executables took BYTES."""

    def instantiate(self, program: Program) -> Executable:
        made = super().instantiate(program)
        made.nbytes = BYTES
        return made


def double(args: list[Any]) -> Sequence[Any]:
    """Twice the first argument, plus the scalars."""
    x, *rest = args
    args.clear()
    return [x * 2 + sum(rest)]


def accumulate(args: list[Any]) -> Sequence[Any]:
    """Adds the first argument to the second; returns a fresh tensor, and the second itself."""
    x, total = args
    args.clear()
    total.add_(x)
    return [total * 3, total]


def noisy(args: list[Any]) -> Sequence[Any]:
    """Adds random numbers to its argument of four elements."""
    (x,) = args
    args.clear()
    return [x + torch.rand(4)]


def make(fn: Function = double, driver: FakeDriver | None = None, **options: Any) -> tuple[Region, FakeDriver]:
    """A region around ``fn`` with some options, and its driver."""
    chosen = driver or FakeDriver()
    return Region(fn, chosen, name="toy", options=RegionOptions(**options)), chosen
