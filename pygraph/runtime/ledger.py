"""Does another capture pay? A region's ledger has what captures cost, and what replays saved.

    spent = Σ over captures of (the call that captured - an uncaptured call)
    saved = Σ over replays of (an uncaptured call of its variant - a replay)

All of it is time of the host in ordinary calls: nothing waits, nothing is run for it. A capture is taken to cost as
much as the cheapest so far, which loads nothing. A variant misses what its uncaptured calls would have saved as
replays. It is captured where

    (captures - 3) × cost + cost ≤ saved    captures have paid, or are the first three
    or missed ≥ cost                        its own calls would have paid for it
    or it came back 32 times                and missed ≥ cost / 4

A capture in another order of launches is one like any other. Its variant misses nothing, so captures have to have paid:
until then, it is replayed in the order of the program.

So sizes that never return cost three captures, however many there are. A size that does return is captured after the
calls that lose as much as its capture costs: whatever comes later, that is at most twice the least possible (ski
rental); some five times where captures are dear. Where hardly any call is replayed, a region tells one of eleven apart,
which counts for five: it waits twice as long. One that was evicted waits for twice as long each time. Where replays
save nothing, three captures are all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

CREDIT = 3
"""Captures of a region that need not have paid."""

RETURNS, DEAR = 32, 0.25
"""Calls of one variant after which it is captured, if they have lost that part of a capture's cost."""

TIMED = 8
"""Replays of a variant that are timed; all later ones are counted."""

_HOPED, _LEAST = 0.5, 0.02
"""Parts of an uncaptured call: that a replay is taken to save until one was timed, and at which saving begins."""


@dataclass(slots=True)
class Account:
    """Times of one variant.

    Args:
        uncaptured: µs, of its fastest uncaptured call, which loads no kernel and waits for no queue; unknown, so that
            its replays count for nothing, where it is captured by a first call of the process
        replayed: µs, of its fastest replay
        timed: replays that were timed
        patience: how much longer than others it waits: it was evicted
    """

    uncaptured: float = inf
    replayed: float = inf
    timed: int = 0
    patience: int = 1

    @property
    def saving(self) -> float:
        """µs that a replay saves, as far as both are known."""
        return self.uncaptured - self.replayed if max(self.uncaptured, self.replayed) < inf else 0.0


@dataclass(slots=True)
class Ledger:
    """The sum of a region.

    Args:
        attempts: captures that were tried
        spent_us: µs that they took on top of the calls that they were in
        cost_us: µs of the cheapest of them
        saved_us: µs that replays saved; below 0, what they lost
        replays: how many are in the sum
        declined: calls, of those told apart, that ran uncaptured because another capture would not have paid
    """

    attempts: int = 0
    spent_us: float = 0.0
    cost_us: float = 0.0
    saved_us: float = 0.0
    replays: int = 0
    declined: int = 0
    _replaying: Account = field(default_factory=Account)
    _seen: int = 0
    _whole: Ledger | None = None
    """The sum of all regions of one callable, which decides, if there is one."""

    def ran(self, account: Account, seconds: float) -> None:
        """An uncaptured call took so long."""
        account.uncaptured = min(account.uncaptured, 1e6 * seconds)

    def replayed(self, account: Account, seconds: float) -> None:
        """A replay took so long. ``settle`` counts it."""
        account.replayed = min(account.replayed, 1e6 * seconds)
        account.timed += 1

    def captured(self, account: Account, seconds: float, *, ran: bool) -> None:
        """A call that captured, or tried to, took so long. ``ran``: with an uncaptured call; else it was replayed."""
        cost = 1e6 * seconds - (min(account.uncaptured, 1e6 * seconds) if ran else 0.0)
        for each in self._sums:
            each.attempts += 1
            each.spent_us += cost
            each.cost_us = cost if each.attempts == 1 else min(each.cost_us, cost)

    @property
    def _sums(self) -> tuple[Ledger, ...]:
        return (self,) if self._whole is None else (self, self._whole)

    @property
    def owed_us(self) -> float:
        """µs that replays have to save until another capture is paid for; at most 0 where it is, or is on credit."""
        every = self._whole or self
        return (every.attempts + 1 - CREDIT) * every.cost_us - every.saved_us

    def settle(self, replays: int, account: Account | None = None) -> None:
        """Count those of so many ``replays`` of the region that are not counted yet, and take further ones for those of
        ``account``, if it is given."""
        new, self._seen = replays - self._seen, replays
        current = self._replaying
        if new > 0 and max(current.uncaptured, current.replayed) < inf:
            for each in self._sums:
                each.saved_us += new * current.saving
                each.replays += new
        if account is not None:
            self._replaying = account

    def forgive(self) -> None:
        """Begin anew: the user wants captures to be tried."""
        for each in self._sums:
            each.attempts, each.spent_us, each.cost_us = 0, 0.0, 0.0

    def consents(self, account: Account, calls: int) -> bool:
        """True if a variant may be captured that ran ``calls`` times uncaptured; counts a call where it may not."""
        agreed = self._pays(account, calls)
        self.declined += not agreed
        return agreed

    def _pays(self, account: Account, calls: int) -> bool:
        every = self._whole or self
        if not every.attempts or self.owed_us <= 0:
            return True
        cost = every.cost_us
        saving = every.saved_us / every.replays if every.replays else _HOPED * account.uncaptured
        if calls < 2 or saving < _LEAST * account.uncaptured:  # the only one may have loaded kernels
            return False
        needed = account.patience * cost * (DEAR if calls >= account.patience * RETURNS and every.replays else 1.0)
        return calls * min(saving, account.uncaptured) >= needed
