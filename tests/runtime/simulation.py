"""A discrete model of a program on a host and a device behind a finite queue, in virtual seconds.

It stands in for the clock, the device and the program around a region, so that rules of measurement can be judged
against a truth that is known.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from pygraph.runtime.selection.options import SelectionOptions
from pygraph.runtime.selection.records import TrialReport
from pygraph.runtime.selection.trial import Trial

__all__ = ["MICRO", "Cold", "Cost", "Machine", "Outcome", "Program", "on_trial", "steady"]

MICRO = 1e-6


@dataclass(frozen=True)
class Cost:
    """What one call of a candidate costs, in µs: the host's part and the device's, submitted in ``launches`` pieces."""

    host: float
    device: float
    launches: int = 1


@dataclass(frozen=True)
class Program:
    """A caller in a loop. Times in µs; ``noise`` is the standard deviation of the log of each call's times.

    ``odd_host`` and ``odd_device`` are added to every second call, ``sync_every`` is 0 for never. A pause of ``pause``
    comes with probability ``pauses`` and every ``pause_every`` calls (0: never). ``growth``: what all times of the
    user's own work are multiplied by over 1,000 calls. ``thought``: what a trial's own work takes from block to block.
    """

    candidates: Mapping[str, Cost]
    user_host: float = 5.0
    user_device: float = 0.0
    odd_host: float = 0.0
    odd_device: float = 0.0
    sync_every: int = 0
    depth: int = 64
    noise: float = 0.0
    pauses: float = 0.0
    pause: float = 0.0
    pause_every: int = 0
    growth: float = 1.0
    drain_cost: float = 4.0
    thought: float = 0.0


@dataclass
class Machine:
    """Runs calls of ``program``. The noise of call i depends on ``seed`` and i alone, not on the candidate."""

    program: Program
    seed: int = 0
    now: float = 0.0
    free: float = 0.0
    calls: int = 0
    queue: deque[float] = field(default_factory=deque)
    read: bool = False

    def clock(self) -> float:
        """Seconds; reading it takes 50 ns. Between two readings with nothing in between, a trial has done its sums."""
        self.now += 0.05 + self.program.thought * self.read
        self.read = True
        return self.now * MICRO

    def drain(self) -> None:
        """Wait for the device."""
        self.read = False
        self.now = max(self.now, self.free) + self.program.drain_cost
        self.queue.clear()

    def call(self, candidate: str) -> None:
        """One call under ``candidate``, and what the user does until the next one."""
        self.read = False
        program, random = self.program, Random(self.seed * 1_000_003 + self.calls)
        host, device = (math.exp(random.gauss(-(program.noise**2) / 2, program.noise)) for _ in range(2))
        grown = program.growth ** (self.calls / 1000)
        odd = self.calls % 2
        self._work(program.candidates[candidate], host, device)
        user_host = (program.user_host + odd * program.odd_host) * grown
        user_device = (program.user_device + odd * program.odd_device) * grown
        self._work(Cost(user_host, user_device), host, device)
        self.calls += 1
        if program.sync_every and self.calls % program.sync_every == 0:
            self.now = max(self.now, self.free)
        if random.random() < program.pauses or (program.pause_every and self.calls % program.pause_every == 0):
            self.now += program.pause

    def _work(self, cost: Cost, host: float, device: float) -> None:
        for _ in range(cost.launches):
            self.now += cost.host * host / cost.launches
            if cost.device:
                self._submit(cost.device * device / cost.launches)

    def _submit(self, duration: float) -> None:
        queue = self.queue
        while queue and queue[0] <= self.now:
            queue.popleft()
        if len(queue) >= self.program.depth:
            self.now = max(self.now, queue.popleft())
        self.free = max(self.free, self.now) + duration
        queue.append(self.free)


@dataclass
class Cold(Machine):
    """A machine on which the first calls take long, and the first ones of what runs uncaptured after something else."""

    last: str = ""
    row: int = 0

    def call(self, candidate: str) -> None:
        """One call, colder than the next one of the same candidate."""
        self.row = self.row + 1 if candidate == self.last else 0
        self.last = candidate
        self.now += (6000, 3000, 2000, 1000)[self.calls] if self.calls < 4 else 0
        program, cost = self.program, self.program.candidates[candidate]
        if candidate == "uncaptured" and self.row < 2:
            colder = replace(cost, host=cost.host * (1.5, 1.2)[self.row])
            self.program = replace(program, candidates={**program.candidates, candidate: colder})
        super().call(candidate)
        self.program = program


def steady(program: Program, candidate: str, calls: int = 2000) -> float:
    """Seconds per call of ``candidate`` in the long run, without noise and pauses."""
    calm = replace(program, noise=0.0, pauses=0.0, pause_every=0, growth=1.0)
    machine = Machine(calm)
    for _ in range(calls // 2):
        machine.call(candidate)
    machine.drain()
    start = machine.now
    for _ in range(calls):
        machine.call(candidate)
    machine.drain()
    return (machine.now - start) * MICRO / calls


@dataclass(frozen=True)
class Outcome:
    """A trial, and what it lost in truth: ``lost`` in calls of the incumbent, under the same noise, against a program
    without a trial, which runs the best candidate from the first call on in which the trial runs another one.
    ``slower``: how much slower than the best one the decision is."""

    report: TrialReport
    lost: float
    slower: float


_WARM_UP = 50


def on_trial(
    program: Program,
    order: Sequence[str],
    seed: int,
    truth: Mapping[str, float],
    machine: Machine | None = None,
    **more: Any,
) -> Outcome:
    """Run a trial of the candidates in ``order``; ``truth`` is the steady time of each, in seconds per call. It begins
    with the first call of ``machine``, or after some calls of one that is made."""
    warm_up = _WARM_UP if machine is None else 0
    machine = machine or Machine(program, seed)
    for _ in range(warm_up):
        machine.call(order[0])
    twin = copy.deepcopy(machine)
    trial = Trial(order, machine.clock, machine.drain, options=SelectionOptions(), seed=seed, **more)
    others = None
    grant = trial.step()
    while grant is not None:
        if others is None and grant.candidate != order[0]:
            others = machine.calls
        for _ in range(grant.calls):
            machine.call(grant.candidate)
        grant = trial.step()
    best = min(truth, key=lambda name: truth[name])
    while twin.calls < machine.calls:
        twin.call(order[0] if others is None or twin.calls < others else best)
    lost = max(machine.now, machine.free) - max(twin.now, twin.free)
    assert trial.report is not None
    slower = truth[trial.report.decision] / truth[best] - 1
    return Outcome(trial.report, lost * MICRO / truth[order[0]], slower)
