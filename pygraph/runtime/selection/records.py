"""What a trial measured and decided, as plain data: a block of calls, a look at the rounds so far, the whole trial.

Everything here turns into JSON by ``TrialReport.as_dict``. Nothing here measures or decides.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

__all__ = ["TELLING", "Block", "Decided", "Grant", "Look", "Sample", "Standing", "TrialReport"]

TELLING = ("faster", "equivalent", "undecided", "budget")
"""Reasons of trials that were run to their end. The others say nothing of the candidates."""

_TAIL_DOUBT = 0.1
_TELLING_BLOCKS = ("round", "baseline", "probe")
"""Purposes of blocks, from what tells most of a candidate's time to what tells least."""


class Grant(NamedTuple):
    """Permission to make ``calls`` calls with ``candidate`` before asking again; at least one."""

    candidate: str
    calls: int


@dataclass(frozen=True, slots=True)
class Block:
    """Calls in a row under one candidate, begun and ended on a drained device.

    ``dropped`` calls (none or one) came before the window that is timed, ``calls`` in it. ``seconds``: the window,
    from the entry of its first call, through everything that the program did, until the device was drained.
    ``waited``: the part of it spent draining. ``lead``: seconds from the entry of the dropped call to the window, and
    ``tail``: what the device had left of that call then. ``start``: how many calls the trial had seen before.
    ``purpose``: ``baseline``, ``probe`` or ``round``.
    ``kept``: whether it counts; a block with a stray pause, or whose calls were not as granted, does not.
    ``per_call``: seconds per call as in the midst of many calls.
    """

    candidate: str
    purpose: str
    start: int
    dropped: int
    calls: int
    seconds: float
    waited: float
    lead: float = 0.0
    tail: float = 0.0
    kept: bool = True
    per_call: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "per_call", self._per_call())

    def _per_call(self) -> float:
        """The window less its ``tail``, by its calls.

        Host and device are a flow shop of two machines. With h and g seconds per call there, n calls from a drained
        start to a drained end take n·max(h, g) and a constant. A window that opens on the entry of the second call
        holds all but that first call's host part, so the constant is what the device has left of it. That is never more
        than two calls take, whatever a drain waited once. A single call that was never overlapped takes h + g, of which
        the smaller is taken off.
        """
        if not self.dropped:
            return max(self.waited, self.seconds - self.waited)
        return max((self.seconds - self.tail) / self.calls, self.seconds / (self.calls + 2))

    @property
    def doubt(self) -> float:
        """The fraction of ``per_call`` that the tail may make it wrong by: it was seen once, and noisily."""
        return _TAIL_DOUBT * self.tail / (self.calls * self.per_call)


@dataclass(frozen=True, slots=True)
class Standing:
    """A candidate against the leader, as log-ratios of time per call: the mean, and the bounds used by the look."""

    candidate: str
    ratio: float
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Sample:
    """Blocks of one candidate that counted: how many, and the median of their seconds per call; None of no blocks."""

    blocks: int
    median: float | None


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen after ``rounds`` rounds; ``alpha`` is what was spent on each side of each comparison."""

    rounds: int
    alpha: float
    leader: str
    standings: tuple[Standing, ...]
    eliminated: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TrialReport:
    """A trial from end to end.

    ``candidates`` in the model's order, so the first is the model's choice. ``decision`` is what is used from now on,
    ``reason`` why:

    - ``faster``: all others were slower, beyond chance
    - ``equivalent``: no other is faster by more than the margin; the model's choice
    - ``undecided``: no difference was seen in all rounds; the model's choice
    - ``budget``: the lost time was spent before anything was certain; the model's choice, or if that was eliminated
      what looked fastest of what was left
    - ``unchanged``: the program's pace had changed since the trial before, but not its time per call between drains;
      what was decided then
    - ``disturbed``: calls did not run as asked for; ``threads``: they came from several threads; ``stalled``: they
      stopped coming; ``drain-failed``; ``closed``, or whatever else stopped it from outside: the model's choice

    ``per_call`` is seconds per call of what was timed; ``lost`` and ``budget`` are seconds, and so is ``overhead``, the
    part of ``lost`` that the trial's own work took; ``calls`` are all that the trial saw. ``dropped`` candidates cost
    too much to be tried to the end.
    """

    candidates: tuple[str, ...]
    decision: str
    reason: str
    detail: str
    per_call: dict[str, float]
    lost: float
    budget: float
    calls: int
    seed: int
    dropped: tuple[str, ...]
    blocks: tuple[Block, ...]
    looks: tuple[Look, ...]
    overhead: float = 0.0

    @property
    def samples(self) -> dict[str, Sample]:
        """What counted, by candidate: blocks of rounds; where there is none, the baseline, and else single calls."""
        found = {}
        for name in self.candidates:
            kept = [block for block in self.blocks if block.candidate == name and block.kept]
            by_purpose = ([one.per_call for one in kept if one.purpose == purpose] for purpose in _TELLING_BLOCKS)
            times = next((found for found in by_purpose if found), [])
            found[name] = Sample(len(times), median(times) if times else None)
        return found

    def as_dict(self) -> dict[str, Any]:
        """This report in types that JSON has."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Decided:
    """What outlives a trial, and the process that it was in.

    ``candidates`` in the model's order, ``decision``, ``reason``, ``detail``, ``per_call`` and ``samples`` as in the
    report of the trial, the last of ``trials``. ``pace``: seconds per call of the whole program under the decision, as
    the watch sees it; None as long as that is not known.
    """

    candidates: tuple[str, ...]
    decision: str
    reason: str
    detail: str
    per_call: dict[str, float]
    samples: dict[str, Sample]
    trials: int
    pace: float | None = None
