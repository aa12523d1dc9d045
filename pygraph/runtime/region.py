"""A region: a compiled function whose calls are replayed, or run uncaptured.

Most calls end in ``try_replay``: the most recently used variant is replayed if it fits. Otherwise ``_look_up`` finds
the variant of the call by its scalars (the key) and tensors (the signature):

    a captured variant fits             it is replayed
    the variant is due for capture      its life answers the call: see ``life``, which has all that can happen to it
    anything else                       the call runs uncaptured, and is counted

If hardly any call is replayed, only one in eleven is looked up: a look-up takes as long as a short kernel.

One thread captures at a time. Others do not wait for it: meanwhile, they use existing captures or run uncaptured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from threading import get_ident
from time import perf_counter
from typing import Any
from weakref import ref

import torch

from pygraph.compat import dispatch_mode_depth, functorch_level
from pygraph.program.program import Program
from pygraph.program.recording import Origin
from pygraph.runtime import asked, live
from pygraph.runtime.contract import Driver
from pygraph.runtime.critical import capturing, capturing_turn
from pygraph.runtime.eager import base_of
from pygraph.runtime.ledger import Ledger
from pygraph.runtime.life import Lives, Subject
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.reasons import BUILDING, CLOSED, FROZEN, reason_of
from pygraph.runtime.record import RegionOptions, RegionRecord
from pygraph.runtime.variants import State, Variant, VariantTable, is_alive
from pygraph.runtime.votes import hold

__all__ = ["Region", "RegionOptions", "RegionRecord"]

_VAIN, _GLANCE = 128, 11
"""Calls looked up in vain, after which only one in eleven is. Eleven is prime, so that calls that alternate between a
usual number of sizes do not always hit the same one."""

_REPLAY = 16
"""Calls looked up in vain that one replay makes up for."""


class Region:
    """A callable with the calling convention of Inductor's partitions: ``region(args) -> outputs``, and ``args`` is
    emptied. Its ``owner`` is the current one when it is made.

    Nothing of a call is kept after it. Calling raises what ``fn`` or a replayed kernel raises, and ReplayError if a
    replay broke its contract. A failed capture shows only in ``record``.

    Args:
        fn: function to capture
        driver: captures and replays
        name: name of the region in reports
        label: name of a replay in profilers (default: ``name``)
        options: options of the region
        held: positions of arguments that outlive the call, such as parameters
        lent: positions of arguments that may outlive it
        on_capture: called with each program that will be replayed; must not raise
        origins: origin of each line of ``fn``, or a callable that returns that of the current line
        eager: operators (without overloads) that replays call, in addition to those that fail in a capture
        clock: returns seconds
        uncaptured: runs calls that are not replayed; new captures are compared with it (default: ``fn``)
        whole: shared ledger of the regions whose captures have to pay together, if any
    """

    def __init__(
        self,
        fn: Callable[[list[Any]], Sequence[Any]],
        driver: Driver,
        *,
        name: str,
        label: str = "",
        options: RegionOptions | None = None,
        held: Iterable[int] = (),
        lent: Iterable[int] = (),
        on_capture: Callable[[Program], None] | None = None,
        origins: Mapping[int, Origin] | Callable[[], Origin] | None = None,
        eager: Iterable[str] = (),
        clock: Callable[[], float] = perf_counter,
        uncaptured: Callable[[list[Any]], Sequence[Any]] | None = None,
        whole: Ledger | None = None,
    ) -> None:
        options = options or RegionOptions()
        facts = {"held": frozenset(held), "lent": frozenset(lent), "name": label or name}
        self.owner = live.owner()
        subject = Subject(fn, uncaptured or fn, driver, facts, options, self.owner, origins or {}, on_capture, clock)
        self._ledger = Ledger(_whole=whole) if options.ledger else None
        table = VariantTable(options.capture_after - 1)
        self.record = RegionRecord(name, ledger=self._ledger, _table=ref(table))
        self._driver, self._clock = driver, clock
        self._lives = Lives(subject, self.record, table, dict.fromkeys(map(base_of, eager)))
        self._vain = self._passed = self._replays = 0
        """Calls looked up in vain, calls since the last look-up, and replays counted when ``_vain`` was last set."""
        self._unready: Refusal | None = None
        """Reason why the driver could not capture when last asked, if any."""
        live.enter(self)
        if self.owner.closed:
            self.close()

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        outputs = self.try_replay(args)
        return self._look_up(args) if outputs is None else outputs

    def __del__(self) -> None:
        lives = getattr(self, "_lives", None)
        if lives is not None:  # lives that wait refer to each other: what they hold goes at once all the same
            lives.table.clear()

    def expects_replay(self) -> bool:
        """True if a call made now would be replayed, provided that it fits."""
        return self._lives.latest is not None and not dispatch_mode_depth()

    def try_replay(self, args: list[Any]) -> Sequence[Any] | None:
        """Replay the most recently used variant. Returns None, with ``args`` unchanged, if it does not fit."""
        replay = self._lives.latest
        if replay is None or capturing or dispatch_mode_depth() or functorch_level() is not None:
            return None
        try:
            outputs = replay(args)
        except BaseException as error:
            self._lives.raised(args, error)
            raise
        if outputs is not None:
            self.record.count_replay()
        return outputs

    # -- other calls ---------------------------------------------------------------------------------------------------

    def _look_up(self, args: list[Any]) -> Sequence[Any]:
        """Answer a call that ``try_replay`` did not."""
        lives = self._lives
        if get_ident() in capturing:
            return lives.inside(args)
        if functorch_level() is not None:
            return lives.uncaptured(args)
        self.record.settle()
        watched = dispatch_mode_depth() > 0  # a mode has to see each operator, as AOTAutograd's does in the first call
        if lives.ballot is not None and not watched:
            outputs = hold(lives, lives.ballot, args)
            if outputs is not None:
                return outputs
        if lives.left is not None:
            asked.note(lives.left)
            return lives.uncaptured(args)
        if self._vain >= _VAIN and self._passes_by():
            return lives.uncaptured(args)
        key = (lives.key or lives.meet(args)).of(args)
        if not watched:
            for variant in lives.table.under(key):
                outputs = self._use(variant, args)
                if outputs is not None:
                    return outputs
            only = None if self._ledger is None else lives.table.only(key)
            if only is not None and self._waits(only):
                lives.table.touch(only)
                return self._count(only, args)  # most likely: a look at each tensor takes time
        facts = lives.signatures.of(args, lives.sensitive)
        if isinstance(facts, Refusal):
            return self._refuse(facts, args)
        variant = lives.table.find(key, facts)
        known = lives.is_known(variant, args)  # the mode sees the run that comes first
        if (known or not watched) and self._is_due(variant, known) and self._is_ready():
            with capturing_turn() as mine:
                if mine and self._is_due(variant, known):
                    asked.note(variant)
                    self._vain = 0
                    return lives.go_on(variant, args)
        return self._count(variant, args)

    def _passes_by(self) -> bool:
        """True if a call is to run uncaptured without a look-up, since most likely no capture fits."""
        self._passed = (self._passed + 1) % _GLANCE
        return self._passed > 0 and not asked.is_asked()

    def _use(self, variant: Variant, args: list[Any]) -> Sequence[Any] | None:
        """Answer a call by the capture of ``variant``. Returns None, with nothing done, if none fits."""
        lives = self._lives
        if lives.may_go_on(variant, args):
            with capturing_turn() as mine:
                if mine and is_alive(variant.life):
                    return lives.go_on(variant, args)
        replay, checked = variant.replay, variant.checked
        if replay is None:
            return None
        try:
            if checked is not None and lives.is_to_be_verified(checked):
                return lives.verify(variant, checked, args)
            outputs = replay(args)
        except BaseException as error:
            lives.raised(args, error)
            raise
        if outputs is not None:
            if checked is not None:
                checked.unverified += 1
            lives.prefer(variant)  # first: the ledger counts replays of the variant that was used until now
            self.record.count_replay()
        return outputs

    def _count(self, variant: Variant, args: list[Any]) -> Sequence[Any]:
        """Run a call of ``variant`` uncaptured. Such calls come in a row, so the next one skips ``try_replay``."""
        self._lives.latest = None
        asked.note(self._unready or variant)
        told = _GLANCE // 2 if self._vain >= _VAIN and variant.ran else 1  # half: chance must not pay for a capture
        replays = self.record.replays
        made_up = _REPLAY * (replays - self._replays)
        in_vain = not variant.ran or variant.ran >= variant.wanted  # it is new, or due and not captured
        self._vain, self._replays = min(max(0, self._vain - made_up) + in_vain, _VAIN), replays
        return self._lives.count(variant, args, told)

    def _refuse(self, refusal: Refusal, args: list[Any]) -> Sequence[Any]:
        """Run a call that has no signature uncaptured."""
        lives = self._lives
        asked.note(refusal)
        if refusal.reason not in self.record.refusals:
            lives.note(refusal)
            lives.journal.left(refusal)
        if not lives.table.captured:
            self.record.reason = str(refusal)
        return lives.uncaptured(args)

    def _waits(self, variant: Variant) -> bool:
        """True if a variant is not captured and not due now, but may be captured later."""
        return variant.replay is None and not variant.off and not self._is_due(variant)

    def _is_due(self, variant: Variant, known: bool = False) -> bool:
        """True if a variant is to be captured now: it has enough calls (one less if ``known``) and the ledger consents,
        or the user asks; and its owner is not frozen."""
        due = self._would_be_due(variant, known)
        if not due or not self.owner.frozen:
            return due
        if variant.refusal is None:
            variant.refusal = Refusal(FROZEN)
            self._lives.note(variant.refusal, variant)
        return False

    def _would_be_due(self, variant: Variant, known: bool) -> bool:
        if asked.is_asked():  # its kernels are loaded, or most likely those of another size are its own
            return variant.capturable and (known or variant.ran > 0 or self.record.captures > 0)
        if not variant.due(self._clock) and not (known and variant.due_next):
            return False
        return self._ledger is None or self._ledger.consents(variant.account, variant.ran)

    def _is_ready(self) -> bool:
        """True if the driver can capture now. If it cannot, the report says why."""
        refusal, before = self._driver.unready(), self._unready
        self._unready, record = refusal, self.record
        if refusal is not None and (before is None or before.reason != refusal.reason):
            self._lives.journal.refused(refusal, ())
        if (refusal or before) is not None and not self._lives.table.captured:
            passing = refusal is None or refusal.reason == BUILDING
            record.state = State.WARM if passing else State.UNCAPTURED
            record.reason = None if refusal is None else str(refusal)
        return refusal is None

    # -- services ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free everything that was captured; later calls run uncaptured."""
        self._lives.close()

    def rehearse(self, args: list[Any]) -> Refusal | None:
        """Record ``fn`` on stand-ins for ``args`` again, as in a capture, and drop the recording. Nothing executes.
        Returns the refusal if that failed."""
        return self._lives.rehearse(args)

    def refuse(self, refusal: Refusal) -> None:
        """Free all captures and make no more, for a reason that was found elsewhere."""
        self._lives.note(refusal)
        self._lives.retire(refusal)

    @property
    def counters(self) -> tuple[str, dict[str, int]]:
        """Name of the region, and its counters so far."""
        record = self.record
        calls = {"captures": record.captures, "replays": record.replays, "uncaptured": record.uncaptured}
        return record.name, {**calls, **dict(record.events)}

    def retry(self, *, every: bool) -> bool:
        """Make calls eligible for captures again if they were refused for a reason that may pass; with ``every``, for
        any reason. Returns whether there were any."""
        lives = self._lives
        left = lives.left
        if left is not None and (left.reason == CLOSED or not (every or reason_of(left.reason).may_pass)):
            return False
        refusal = lives.table.retry(every=every) or left or self._unready
        if refusal is None:
            return False
        self._unready, self._vain = None, 0
        lives.forgive()
        lives.journal.retried(refusal.reason)
        return True

    def release(self) -> int:
        """Free all captures; later calls are captured again. Returns how many there were."""
        freed = sum(self._lives.free(variant) for variant in self._lives.table.captured)
        if freed:
            self._lives.journal.released()
        return freed

    @property
    def device(self) -> torch.device:
        """Device on which it is captured, known after the first call."""
        return self._lives.device

    def captures(self) -> list[live.Capture]:
        """All captures except those on which ranks have agreed."""
        lives = self._lives
        return [
            live.Capture(variant, partial(lives.evict, variant))
            for variant in lives.table.captured
            if not variant.shared and variant.held
        ]
