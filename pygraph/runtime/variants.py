"""The variants of a region: how calls are distinguished, the states of a variant, and the table of all variants.

Calls differ by Python scalars (the key), then by sizes, strides, dtypes and devices (the signature).
"""

from __future__ import annotations

import inspect
import traceback
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias, TypeGuard, TypeVar

import torch

from pygraph.compat import check_of
from pygraph.program.program import Program
from pygraph.runtime.contest import Contest
from pygraph.runtime.contract import Executable
from pygraph.runtime.events import Sizes
from pygraph.runtime.forecast import Workspace
from pygraph.runtime.ledger import Account
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.reasons import Lasting, reason_of
from pygraph.runtime.tensors import bits

MAX_TRACKED = 1024
"""Maximum number of uncaptured variants of one region whose occurrences are remembered."""

LONGEST_WAIT = (64, 30.0)
"""Longest wait, in calls and in seconds, before a capture refused for a reason that may pass is tried again."""

_TRIES = 8
"""Captures in a row, refused for a reason that may or may not pass, before a variant is left uncaptured for good."""

LOOKS = 4
"""Maximum number of calls that are compared for bodies of a branch or loop that no compared call has run."""

_SCALARS = (int, float, bool)
_TENSORS = (torch.Tensor, torch.nn.Parameter)


class ScalarKey:
    """Reads the key of a call: the type and bits of every int, float and bool among its arguments, which a compiled
    program always passes at the same positions. ``plain``: all are ints or bools, whose equality is that of bits."""

    __slots__ = ("_positions", "plain")

    def __init__(self, args: Sequence[Any]) -> None:
        self._positions = tuple(i for i, arg in enumerate(args) if type(arg) in _SCALARS)
        self.plain = not any(type(args[i]) is float for i in self._positions)

    def of(self, args: Sequence[Any]) -> Hashable:
        """The key of a call."""
        return tuple([bits(args[i]) for i in self._positions])


class Signatures:
    """Reads the signatures of calls: all facts of a call for which a capture is made.

    Most tensors, such as parameters, have the same facts as in the call before: one native check confirms that, and
    their facts are not read again. Tensors that have changed once are read in each call.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: tuple[Callable[..., bool], Sequence[int], Sequence[int], Sequence[Any]] = _never, (), (), ()
        """The check, positions of the tensors that it takes, all other positions, and the facts of the last call."""

    def of(self, args: Sequence[Any], sensitive: Collection[int]) -> Hashable | Refusal:
        """Facts of each tensor, and every other argument itself.

        Storage offsets count for the ``sensitive`` arguments only. Returns a refusal (``argument-type``) if an argument
        is not a plain strided tensor, a Python scalar or None.
        """
        same, steady, others, last = self._last
        known = len(args) == len(last) and same(*[args[i] for i in steady])
        facts = list(last if known else args)
        for i in others if known else range(len(args)):
            facts[i] = _facts(args[i])
            if facts[i] is None:
                return Refusal("argument-type", f"argument {i} is a {type(args[i]).__name__}")
        if not known:
            self._learn(args, facts)
        for i in sensitive:
            if type(args[i]) in _TENSORS:
                facts[i] = (*facts[i], args[i].storage_offset())
        return tuple(facts)

    def _learn(self, args: Sequence[Any], facts: list[Any]) -> None:
        """Remember the ``facts`` of a call, which are not those of the last one."""
        _, steady, _, last = self._last
        if len(facts) != len(last):
            steady, last = range(len(facts)), facts
        same = [i for i in steady if type(args[i]) in _TENSORS and facts[i] == last[i]]
        steady = sorted({id(args[i]): i for i in same}.values())  # the check takes no tensor twice
        others = sorted(set(range(len(facts))).difference(steady))
        check = check_of([args[i] for i in steady]) if steady else _never
        self._last = check, steady, others, tuple(facts)


def _never(*_: object) -> bool:
    return False


def _facts(arg: Any) -> Hashable | None:
    """Facts of one argument, without its storage offset; None if it cannot be captured."""
    if type(arg) in _TENSORS and arg.layout is torch.strided and not (arg.is_conj() or arg.is_neg() or arg.is_nested):
        return arg.size(), arg.stride(), arg.dtype, arg.device
    return bits(arg) if type(arg) in _SCALARS or arg is None else None


def sizes_in(signature: Hashable, left_out: Collection[int] = ()) -> Sizes:
    """Sizes of the tensors of calls with a signature, except those at the positions ``left_out``."""
    facts = enumerate(signature if isinstance(signature, tuple) else ())
    return tuple(tuple(each[0]) for i, each in facts if isinstance(each[0], torch.Size) and i not in left_out)


class State(str, Enum):
    """The state of a region: REPLAY if any of its variants is captured.

    COLD ▸ WARM ▸ REPLAY, or UNCAPTURED. A capture that was evicted, or that failed for a reason which may pass, goes
    back to WARM. The state is still WARM while a variant is captured and compared, so nothing has to be undone.
    """

    COLD = "cold"  # never ran
    WARM = "warm"  # ran uncaptured; it is captured once it ran often enough, and the ledger consents
    REPLAY = "replay"  # captured
    UNCAPTURED = "uncaptured"  # a capture failed, for good

    __str__ = str.__str__


Replay: TypeAlias = Callable[[list[Any]], Sequence[Any] | None]
"""Answers a call and empties its arguments; returns None, with nothing done, if the call does not fit."""

Life: TypeAlias = Generator[None, Any, None]
"""Answers the calls of a variant that are more than replays: each ``yield`` waits for such a call."""


_Sent = TypeVar("_Sent")


class Call:
    """A call that a life answers. A waiting life keeps it, so it holds nothing once its ``outputs`` were taken."""

    __slots__ = ("args", "outputs")

    def __init__(self, args: list[Any]) -> None:
        self.args = args
        self.outputs: Sequence[Any] | None = None

    def take(self) -> Sequence[Any] | None:
        """Take the outputs, which belong to the caller from now on."""
        outputs, self.outputs = self.outputs, None
        return outputs


@dataclass(slots=True)
class Checked:
    """A capture with some replays compared with uncaptured runs.

    Args:
        program: program that it replays
        tolerant: it was accepted within a tolerance
        unverified: replays since the last one that was compared
        unseen: names of its bodies that no compared call has run
        looks: number of further calls to compare for these bodies
    """

    program: Program
    tolerant: bool
    unverified: int = 0
    unseen: set[str] = field(default_factory=set)
    looks: int = LOOKS


def is_alive(life: Life | None) -> TypeGuard[Life]:
    """True if a life is not over. An exception in it ends it, too."""
    return life is not None and inspect.getgeneratorstate(life) != inspect.GEN_CLOSED


def go_on(life: Generator[None, _Sent, None], sent: _Sent | None = None) -> None:
    """Begin a life, or have it answer what is ``sent``. Raises what the life raises: a StopIteration, too, which Python
    turns into a RuntimeError as it leaves a generator. Such a RuntimeError from a generator of the user stays one."""
    try:
        if sent is None:
            next(life)
        else:
            life.send(sent)
        return
    except StopIteration:
        return
    except RuntimeError as error:
        stopped, frames = error.__cause__, list(traceback.walk_tb(error.__traceback__))
        if not isinstance(stopped, StopIteration) or len(frames) > 2:  # raised deeper than in this frame and the life's
            raise
    raise stopped


class Variant:
    """One combination of key and signature.

    Args:
        key: the scalars of its calls
        signature: the tensors of its calls
        wanted: uncaptured runs after which it is due to be captured
        ran: uncaptured runs so far
        again: time from which on it is due in any case
        off: it is left uncaptured for good
        refusal: reason why its last capture failed
        refused: failed captures in a row
        seen: number of replays that the process had begun when it last ran uncaptured
        account: times of its calls
        like: positions of arguments whose offsets its capture depends on, and the signature of its calls with these
        replay: replays its calls, if it is captured
        held: executables that ``replay`` uses
        workspace: workspace of a replay, if its call was prepared
        checked: progress of comparisons, if some replays are compared
        order: order of its launches, once decided
        life: answers its next call that is more than a replay, until it is over
        joint: answers its next call at which ranks vote, until it is over
        contest: times its calls in two orders
        shared: its replays send captured collectives
        counted: the region's captures include the one by which it is replayed
        unseen: names of bodies of its last capture that were not run by the call that compared it
    """

    ran = 0
    again: float | None = None
    off = False
    refusal: Refusal | None = None
    refused = 0
    seen = 0
    like: tuple[frozenset[int], Hashable] = (frozenset(), None)
    replay: Replay | None = None
    held: tuple[Executable, ...] = ()
    workspace: Workspace | None = None
    checked: Checked | None = None
    order: str | None = None
    life: Life | None = None
    joint: Life | None = None
    contest: Contest | None = None
    shared = False
    counted = False
    unseen: frozenset[str] = frozenset()

    def __init__(self, key: Hashable, signature: Hashable, wanted: int) -> None:
        self.key, self.signature, self.wanted = key, signature, wanted
        self.account = Account()

    @property
    def used(self) -> int:
        """Number of its last replay, in the order of all replays of the process."""
        return max((executable.used for executable in self.held), default=0)

    @property
    def held_bytes(self) -> int:
        """Bytes of the device that its executables take."""
        return sum(executable.nbytes for executable in self.held)

    @property
    def contesting(self) -> bool:
        """True if it is captured, and the order of its launches is not decided yet."""
        waits = is_alive(self.life) or (self.shared and is_alive(self.joint))
        return self.replay is not None and (waits or self.contest is not None)

    @property
    def capturable(self) -> bool:
        """True if it is not captured, but may be."""
        return self.replay is None and not self.off

    def due(self, clock: Callable[[], float]) -> bool:
        """True if it should be captured now."""
        if not self.capturable:
            return False
        return self.ran >= self.wanted or (self.again is not None and clock() >= self.again)

    @property
    def due_next(self) -> bool:
        """True if one more uncaptured run makes it due."""
        return self.capturable and self.ran == self.wanted - 1

    def postpone(self) -> None:
        """Start to count anew, with twice as many runs until the next capture: it was evicted, as is every variant if
        more of them alternate than memory allows."""
        self.ran, self.wanted, self.again = 0, self.wanted * 2, None
        self.account.patience *= 2

    def wait(self, now: float) -> None:
        """Start to count anew, with twice as many runs until the next capture, up to LONGEST_WAIT."""
        calls, seconds = LONGEST_WAIT
        self.ran, self.wanted, self.again = 0, min(self.wanted * 2, calls), now + seconds

    def refuse(self, refusal: Refusal, now: float) -> None:
        """Record that a capture failed: it is tried again after a wait, or never."""
        self.refusal, self.refused = refusal, self.refused + 1
        lasting = reason_of(refusal.reason).lasting
        if lasting is Lasting.PASSES or (lasting is Lasting.DOUBTFUL and self.refused < _TRIES):
            self.wait(now)
        else:
            self.off = True

    def retry(self, *, every: bool) -> Refusal | None:
        """Make it due, if its last capture was refused for a reason that may pass, or with ``every``, for any reason.
        Returns the refusal, if it is due now."""
        refusal = None if self.replay is not None else self.refusal
        if refusal is None or not (every or reason_of(refusal.reason).may_pass):
            return None
        self.ran, self.refused, self.off = self.wanted, 0, False
        return refusal

    def free(self) -> None:
        """Close its captures. Another thread may do so at the same time."""
        if self.shared:
            self.order = None  # what was decided on captured collectives says nothing of eager calls
        held, self.held = self.held, ()
        self.replay = self.life = self.joint = self.contest = self.checked = None
        self.shared = self.counted = False
        for executable in held:
            executable.close()


class VariantTable:
    """Variants by key and signature: all captured ones, and up to MAX_TRACKED others, of which the least recently used
    are dropped.

    There is no lock: any allocation may collect garbage, and a finaliser may call the region of this table. Another
    region may also free captures of this table, on any thread, to make room. So every access to a dictionary may find
    it changed since the last one.
    """

    def __init__(self, wanted: int) -> None:
        self._wanted, self._max_tracked = wanted, MAX_TRACKED
        self._by_key: dict[Hashable, dict[Hashable, Variant]] = {}
        self._replayed: dict[Hashable, dict[Variant, None]] = {}
        """Captured variants by key, so that a look-up skips all others."""
        self._captured: dict[Variant, None] = {}
        self._tracked: OrderedDict[Variant, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._captured) + len(self._tracked)

    @property
    def captured(self) -> list[Variant]:
        """All captured variants."""
        return list(self._captured)

    @property
    def held_bytes(self) -> int:
        """Bytes of the device that the executables of all variants take."""
        return sum(variant.held_bytes for variant in self.captured)

    @property
    def contests(self) -> int:
        """Number of variants that are tried, or will be, in another order of their launches."""
        return sum(variant.contesting for variant in self.captured)

    def under(self, key: Hashable) -> tuple[Variant, ...]:
        """The captured variants of a key."""
        return tuple(self._replayed.get(key, ()))

    def only(self, key: Hashable) -> Variant | None:
        """The variant of a key, if exactly one is known."""
        known = self._by_key.get(key, _NONE)
        return next(iter(known.values()), None) if len(known) == 1 else None

    def find(self, key: Hashable, facts: Hashable) -> Variant:
        """The variant of a call, made if it is new. Under a new key, ``facts`` are hashed once, which takes a while."""
        known, first = self._by_key.get(key), None
        variant = None if known is None else known.get(facts)
        if variant is not None:
            if variant.replay is None:
                self.touch(variant)
            return variant
        variant = Variant(key, facts, self._wanted)
        if known is None:
            first = {facts: variant}
            known = self._by_key.setdefault(key, first)
        if known is not first:  # another thread may have been first
            variant = known.setdefault(facts, variant)
        self._track(variant)
        return variant

    def touch(self, variant: Variant) -> None:
        """Make ``variant``, which ran uncaptured, the most recently used."""
        try:  # noqa: SIM105 - contextlib.suppress takes a microsecond
            self._tracked.move_to_end(variant)
        except KeyError:  # it has gone meanwhile
            pass

    def install(self, variant: Variant, replay: Replay, executable: Executable) -> None:
        """Enter ``variant`` as captured."""
        variant.replay, variant.held = replay, (executable,)
        variant.again, variant.refusal, variant.refused = None, None, 0
        self._by_key.setdefault(variant.key, {})[variant.signature] = variant
        known: dict[Variant, None] | None = None
        while known is None or self._replayed.get(variant.key) is not known:  # or another thread took it away meanwhile
            known = self._replayed.setdefault(variant.key, {})
            known[variant] = None
        self._captured[variant] = None
        self._tracked.pop(variant, None)

    def replace(self, variant: Variant, replay: Replay, *held: Executable, contest: Contest | None = None) -> bool:
        """Replay ``variant`` by the executables ``held``, which ``contest`` times. Returns False if another thread has
        freed it. Closes executables that are no longer held: all of them if it was freed."""
        before = variant.held
        variant.held, variant.replay, variant.contest = held, replay, contest  # at once, whatever comes in between
        kept = variant in self._captured
        if not kept:  # now, or before
            variant.free()
        for executable in before if kept else (*before, *held):
            if executable not in variant.held:
                executable.close()
        return kept

    def free(self, variant: Variant) -> bool:
        """Free the capture of ``variant``, which stays known. Returns whether this thread did so."""
        try:
            del self._captured[variant]
        except KeyError:  # another one was first
            return False
        self._forget(variant)
        variant.free()
        self._track(variant)
        return True

    def settle(self, variant: Variant) -> bool:
        """Clean up after an exception in a capture of ``variant``, unless it is captured. Returns whether it is."""
        captured = variant in self._captured
        if not captured:
            self._forget(variant)
            variant.free()
        return captured

    def _forget(self, variant: Variant) -> None:
        """Remove ``variant`` from the captured variants of its key."""
        known = self._replayed.get(variant.key, {})
        known.pop(variant, None)
        if not known and (others := self._replayed.pop(variant.key, None)):
            self._replayed.setdefault(variant.key, {}).update(others)  # another variant was captured meanwhile

    def retry(self, *, every: bool) -> Refusal | None:
        """Make refused variants due again. Returns the refusal of one of them."""
        refusals = [variant.retry(every=every) for variant in list(self._tracked)]
        return next((refusal for refusal in refusals if refusal is not None), None)

    def clear(self) -> None:
        """Forget everything."""
        captured = self.captured
        for table in (self._by_key, self._replayed, self._captured, self._tracked):
            table.clear()
        for variant in captured:
            variant.free()

    def _track(self, variant: Variant) -> None:
        self._tracked[variant] = None
        while len(self._tracked) > self._max_tracked:
            try:
                oldest, _ = self._tracked.popitem(last=False)
            except KeyError:  # it is empty by now
                return
            if self.only(oldest.key) is oldest:
                self._by_key.pop(oldest.key, None)
                continue
            variants = self._by_key.get(oldest.key, _NONE)
            if variants.get(oldest.signature) is oldest:
                del variants[oldest.signature]


_NONE: dict[Hashable, Variant] = {}
