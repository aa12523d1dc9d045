"""A region under measured selection in virtual time, which checks every call that it makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import pytest
import torch

from pygraph.runtime import comparison, measuring
from pygraph.runtime.driver import CopyCost
from pygraph.runtime.options import RegionOptions
from pygraph.runtime.region import Region
from tests.runtime.fake import FakeDriver
from tests.runtime.simulation import Cost, Machine, Program

__all__ = ["ENOUGH", "FAST", "SLOW", "Case", "set_clock"]

FAST, SLOW = Cost(50, 20), Cost(65, 20, 4)
ENOUGH = 700
"""Calls within which each of these trials ends."""


def set_clock(monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float]) -> None:
    """What a region's calls are timed by, in seconds."""
    for module in (measuring, comparison):
        monkeypatch.setattr(module, "perf_counter", clock)


class Case:
    """A region that adds its first argument to its second, in virtual time: what a call costs is known.

    Its first argument, which moves, can be copied if it is said what a call costs then. ``asked`` are those that are to
    be, whatever it costs.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        patched: Cost = FAST,
        uncaptured: Cost = SLOW,
        copied: Cost | None = None,
        asked: Sequence[int] = (),
        **options: Any,
    ) -> None:
        costs = {"patched": patched, "uncaptured": uncaptured, "copied": copied or SLOW}
        self.machine = Machine(Program(costs, user_host=10, noise=0.03))
        self.lock = Lock()
        set_clock(monkeypatch, self._alone(self.machine.clock))
        self.driver = FakeDriver(self._replay, written=[1])
        self.driver.drains = self._drain
        if copied is not None:
            self.driver.copy_cost = CopyCost(patch_us=1.0, copy_us=0.5, most_bytes=1 << 20)
            self.driver.moving = frozenset([0])
        self.ran: list[str] = []
        self.fails: dict[str, int] = {}
        chosen = RegionOptions(**{"measure": True, **options})
        self.region = Region(self._function, self.driver, name="toy", options=chosen, copied=asked)

    @property
    def trials(self) -> list[dict[str, Any]]:
        return self.region.record.trials

    def _alone(self, act: Callable[..., Any]) -> Callable[..., Any]:
        """``act`` for several threads."""

        def locked(*args: Any) -> Any:
            with self.lock:
                return act(*args)

        return locked

    def _drain(self) -> bool:
        self._alone(self.machine.drain)()
        return True

    def _function(self, args: list[Any]) -> Sequence[Any]:
        return self._run("uncaptured", args)

    def _replay(self, args: list[Any]) -> Sequence[Any]:
        return self._run("copied" if any(each.staged for each in self.driver.executables) else "patched", args)

    def _run(self, name: str, args: list[Any]) -> Sequence[Any]:
        x, total, *rest = args
        args.clear()
        self.fails[name] = self.fails.get(name, 0) - 1
        if self.fails[name] == 0:
            raise ArithmeticError(name)
        self._alone(self.machine.call)(name)
        self.ran.append(name)
        total.add_(x)
        return [total * 3 + sum(rest), total]

    def call(self, size: int = 2, *rest: Any) -> None:
        """One call, whose results and whose mutation are checked."""
        x, total = torch.ones(size), torch.full((size,), 4.0)
        outputs = self.region([x, total, *rest])
        assert total.tolist() == [5.0] * size, "mutated once"
        assert outputs[1] is total
        assert outputs[0].tolist() == [15.0 + sum(rest)] * size

    def calls(self, count: int, size: int = 2, *rest: Any) -> None:
        for _ in range(count):
            self.call(size, *rest)
