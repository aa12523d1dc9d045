"""Does another capture pay? A region's ledger holds the cost of its captures and the savings of its replays.

    spent = Σ over captures of (the call that captured - an uncaptured call)
    saved = Σ over replays of (an uncaptured call of its variant - a replay)

All times are host times of ordinary calls: nothing runs only to be timed. A capture is assumed to cost as much as the
cheapest so far, which loads nothing. The ``missed`` time of a variant is what its uncaptured calls would have saved as
replays. It is captured if

    (captures - 3) × cost + cost ≤ saved    captures have paid, or are the first three
    or missed ≥ cost                        its own calls would have paid for it
    or it came back 32 times                and missed ≥ cost / 4

A capture in another order of launches counts like any other. Its variant misses nothing, so it has to wait until
captures have paid: until then, it is replayed in the order of the program.

So sizes that never return cost three captures, however many there are. A size that does return is captured once its
calls have lost as much as its capture costs: whatever comes later, the total is at most twice the least possible (ski
rental), or some five times if captures are dear. If hardly any call is replayed, a region looks up one call in eleven,
which counts for five: a size waits twice as long. With each eviction, its wait doubles. If replays save nothing, there
are three captures only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

CREDIT = 3
"""Captures of a region that need not have paid."""

RETURNS, DEAR = 32, 0.25
"""Calls of one variant after which it is captured, if they have lost that fraction of a capture's cost."""

TIMED = 8
"""Replays of a variant that are timed; all later ones are only counted."""

_HOPED, _LEAST = 0.5, 0.02
"""Fractions of an uncaptured call: the assumed saving of a replay until one was timed, and the least that counts."""


@dataclass(slots=True)
class Account:
    """Times of one variant.

    Args:
        uncaptured: µs of its fastest uncaptured call, which loads no kernel and waits for no queue; infinite (unknown),
            so that its replays count for nothing, if it is captured by a first call of the process
        replayed: µs of its fastest replay
        timed: replays that were timed
        patience: factor by which it waits longer than others, after evictions
    """

    uncaptured: float = inf
    replayed: float = inf
    timed: int = 0
    patience: int = 1

    @property
    def saving(self) -> float:
        """µs that a replay saves; 0 unless both times are known."""
        return self.uncaptured - self.replayed if max(self.uncaptured, self.replayed) < inf else 0.0


@dataclass(slots=True)
class Ledger:
    """Costs and savings of a region.

    Args:
        attempts: captures that were tried
        spent_us: µs that they added to the calls that made them
        cost_us: µs of the cheapest of them
        saved_us: µs that replays saved; negative if they lost time
        replays: number of replays in ``saved_us``
        declined: calls, of those looked up, that ran uncaptured because another capture would not have paid
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
    """Shared ledger of all regions of one callable, if any: its sums then decide."""

    def ran(self, account: Account, seconds: float) -> None:
        """Record the time of an uncaptured call."""
        account.uncaptured = min(account.uncaptured, 1e6 * seconds)

    def replayed(self, account: Account, seconds: float) -> None:
        """Record the time of a replay. ``settle`` counts it."""
        account.replayed = min(account.replayed, 1e6 * seconds)
        account.timed += 1

    def captured(self, account: Account, seconds: float, *, ran: bool) -> None:
        """Record the time of a call that captured, or tried to. ``ran``: it ran uncaptured; else it was replayed."""
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
        """µs that replays have to save until another capture is paid for; at most 0 if it is, or is on credit."""
        every = self._whole or self
        return (every.attempts + 1 - CREDIT) * every.cost_us - every.saved_us

    def settle(self, replays: int, account: Account | None = None) -> None:
        """Count those of the region's ``replays`` that are not counted yet, and attribute later ones to ``account``, if
        given."""
        new, self._seen = replays - self._seen, replays
        current = self._replaying
        if new > 0 and max(current.uncaptured, current.replayed) < inf:
            for each in self._sums:
                each.saved_us += new * current.saving
                each.replays += new
        if account is not None:
            self._replaying = account

    def forgive(self) -> None:
        """Forget all costs: the user wants captures to be tried."""
        for each in self._sums:
            each.attempts, each.spent_us, each.cost_us = 0, 0.0, 0.0

    def consents(self, account: Account, calls: int) -> bool:
        """True if a variant that ran uncaptured ``calls`` times may be captured; else the call counts as declined."""
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
