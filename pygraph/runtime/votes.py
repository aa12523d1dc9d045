"""Ranks of a process group decide together whether they capture a region's collectives.

NCCL requires that all ranks capture a collective, or none. So each rank publishes, under the number of a call, what it
is about to replay, and reads the answers of the others. Every rank reads the same recorded result: the first rank that
has read all answers, or has waited for SECONDS, decides for all.

    calls 1 to 3     as without votes: the second is captured, and replays call collectives
    call 4           vote: all ranks capture collectives too, replay, and compare with an uncaptured run
    calls 5 to 84    if each was right, calls are timed, with and without captured collectives, in turn on all ranks
                     alike; a question decides: they are used if each rank has measured them no slower
    call 85          vote: capture in another order of launches; if it was right, 80 more calls are timed, and a last
                     question decides

``joint`` is this life of one variant as a generator: each ``yield`` waits for a vote at one of its calls.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from pygraph.compat import absent, before_shutdown, resolve_process_group
from pygraph.program.program import Program
from pygraph.program.recording import is_functional_collective
from pygraph.program.steps import timeline
from pygraph.runtime.answers import in_flight
from pygraph.runtime.contest import DEPENDENCES, MARGIN, Decision, JointContest
from pygraph.runtime.contract import Executable
from pygraph.runtime.critical import capturing_turn
from pygraph.runtime.discover import Captured
from pygraph.runtime.events import counts
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.variants import Call, Life, Variant, go_on, is_alive

if TYPE_CHECKING:
    from pygraph.runtime.life import Lives

VOTES = (4, 8, 16, 32, 64)
"""Calls of a region at which its ranks vote. All ranks call a program that communicates in step."""

AGREED = "all ranks have captured the collectives, and compared"
"""A note on a region, before and after times have decided."""

TOLERATED = "non-deterministic: compared within a tolerance"
"""A note on a region whose results vary between runs."""

SECONDS = 30.0
"""Seconds to wait for a rank's answer; after that, the rank is assumed never to answer."""

_opened: Counter[tuple[str, str]] = Counter()
"""Number of regions of a name that have voted in a group."""

_captured: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Number of collectives of a process group that were captured, and not sent."""

_joined: WeakKeyDictionary[Any, WeakSet[Lives]] = WeakKeyDictionary()
"""Process groups whose captured collectives are sent by replays, with the regions of these."""


class Outcome(str, Enum):
    """Result of one vote."""

    YES = "yes"
    NO = "no"
    LATE = "late"  # a rank did not answer


@dataclass(slots=True)
class Ballot:
    """The votes of a region, which has the same ``name`` on each rank of the process group ``group``, and is the
    ``number``-th of this name there. ``held`` counts votes: each is held once, and its outcome is final. No vote is
    held at the calls up to ``busy``, which are timed."""

    name: str
    group: str
    number: int = 0
    held: int = 0
    busy: int = 0

    def due(self, call: int) -> bool:
        """True if ranks vote at the call with this number."""
        return not self.over and call >= VOTES[self.held] and call > self.busy

    @property
    def over(self) -> bool:
        """True after the last vote."""
        return self.held >= len(VOTES)

    def place(self, call: int) -> str:
        """Position of this rank in its program. Ranks at the same place pair their collectives alike: it consists of
        the number of the call, that of all regions' calls, and that of the group's collectives. The last one excludes
        captured collectives, which a group does not count when they are replayed."""
        calls = counts["replays"] + counts["uncaptured"]
        group = resolve_process_group(self.group)
        return f"{call} {calls} {_sent(group) - _captured.get(group, 0)}"

    @contextlib.contextmanager
    def vote(self, call: int) -> Iterator[Vote]:
        """The vote at a call of the region, by its number. A rank that leaves it without an answer votes no."""
        vote = Vote(self, call, self.place(call))
        try:
            yield vote
        finally:
            vote.end()
            self.held += 1

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Collectives are captured: they do not count as sent."""
        group = resolve_process_group(self.group)
        before = _sent(group)
        try:
            yield
        finally:
            _captured[group] = _captured.get(group, 0) + _sent(group) - before

    def join(self, region: Lives) -> None:
        """Note that replays of ``region`` send captured collectives from now on. The region is closed before the group
        is shut down: NCCL waits for graphs that hold collectives of a communicator before it destroys that."""
        _close_before_shutdown()
        _joined.setdefault(resolve_process_group(self.group), WeakSet()).add(region)

    def decide(self, question: str, answer: str | None) -> Outcome:
        """YES if every rank gives the same ``answer`` to ``question`` of this vote. The answer None means no, and does
        not wait for others."""
        group = resolve_process_group(self.group)
        store, prefix = group.get_group_store(), f"pygraph/{self.name}/{self.number}/{self.held}/{question}"
        said = [f"{prefix}/{rank}" for rank in range(group.size())]
        store.set(said[group.rank()], answer or "")
        found = Outcome.NO
        if answer:
            try:
                store.wait(said, timedelta(seconds=SECONDS))
                agreed = all(store.get(key).decode() == answer for key in said)
                found = Outcome.YES if agreed else Outcome.NO
            except RuntimeError:  # a DistStoreError, where the build of torch has it
                found = Outcome.LATE
        decided = Outcome(store.compare_set(prefix, "", found.value).decode())
        return Outcome.NO if decided is Outcome.YES and not answer else decided


class Vote:
    """One vote, at a ``call`` of the region: do all ranks replay it, and then, were all right?"""

    def __init__(self, ballot: Ballot, call: int, place: str) -> None:
        self._ballot, self.call, self._place = ballot, call, place
        self._number = ballot.held
        self.outcome: Outcome | None = None
        """The ranks' decision to replay; None until ``together``."""
        self._used = False

    def together(self, sends: str, runs: str | None) -> bool:
        """Ask whether all ranks replay this call, with the same further ``runs``; None: this rank cannot replay it."""
        said = None if runs is None else f"{self._place} {sends} {runs}"
        self.outcome = self._ballot.decide("replay", said)
        return self.outcome is Outcome.YES

    def keep(self, right: bool) -> bool:
        """Ask, once all have replayed, whether all were right."""
        self._used = True
        return self._ballot.decide("use", "right" if right else None) is Outcome.YES

    def won(self, calls: str | None) -> bool:
        """Ask, once all ranks have timed their joint capture, whether it has won on all, in the same ``calls``; None:
        it has not won here. A rank whose sizes change independently has timed other calls."""
        return self._ballot.decide(f"times {self._number}", calls) is Outcome.YES

    def end(self) -> None:
        """Answer open questions with no: other ranks wait for an answer."""
        if self.outcome is None:
            self.outcome = self._ballot.decide("replay", None)
        elif self.outcome is Outcome.YES and not self._used:
            self.keep(right=False)


@functools.cache
def _close_before_shutdown() -> None:
    """Close the regions of a process group before it is shut down. Has an effect once."""

    def close(group: Any) -> None:
        for region in list(_joined.pop(group, ())):
            region.close()

    before_shutdown(close)


def _sent(group: Any) -> int:
    """Collectives of a process group so far, by its own count."""
    return int(group._get_sequence_number_for_group())


def open_ballot(name: str, group: str) -> Ballot:
    """The votes of another region."""
    _opened[name, group] += 1
    return Ballot(name, group, _opened[name, group])


def only_collectives(program: Program) -> bool:
    """True if the eager calls of ``program`` are all collectives."""
    return all(is_functional_collective(launch.name) for launch in program.calls)


def collectives_of(program: Program) -> tuple[str, str] | None:
    """The group of the collectives that ``program`` calls, and a hash of them, equal on ranks that send the same ones.
    None if there are none, if they belong to several groups, or to one that does not count them, or if some may be
    under way when a replay begins or ends."""
    calls = [launch for launch in program.calls if is_functional_collective(launch.name)]
    groups = {launch.eager.group for launch in calls if launch.eager is not None and launch.eager.group is not None}
    if len(groups) != 1 or any(in_flight(program)) or absent(resolve_process_group):
        return None
    group = groups.pop()
    try:
        _sent(resolve_process_group(group))
    except RuntimeError:  # a backend that does not count them: the position of a rank would be unknown
        return None
    return group, hashlib.sha256(repr([launch.signature for launch in calls]).encode()).hexdigest()


# -- the life of a variant at votes ------------------------------------------------------------------------------------


def hold(lives: Lives, ballot: Ballot, args: list[Any]) -> Sequence[Any] | None:
    """Vote, if this is a call at which ranks vote. Returns the outputs of the call, or None, with nothing done, if it
    is to be answered as any other."""
    record, key = lives.record, lives.key
    number = record.replays + record.uncaptured + 1
    if not ballot.due(number):
        return None
    known = () if key is None else lives.table.under(key.of(args))
    variant = next((each for each in known if lives.fits(each, args)), None)
    call, life = Call(args), None if variant is None else variant.joint
    with capturing_turn() as mine, ballot.vote(number) as vote:
        if mine and is_alive(life):
            go_on(life, (vote, call))
    if vote.outcome is Outcome.LATE:
        lives.end_votes("a rank did not vote on capturing them")
    elif ballot.over:
        lives.end_votes("ranks did not agree to capture them")
    outputs = call.take()
    if variant is not None and outputs is not None:
        lives.prefer(variant)
    record.contests = lives.table.contests
    return outputs


def joint(lives: Lives, ballot: Ballot, variant: Variant, sends: str) -> Generator[None, tuple[Vote, Call], None]:
    """Life of a variant from the first vote on. ``sends``: hash by which ranks compare its collectives."""
    kept: Captured | None = None
    while kept is None:
        vote, call = yield
        contest = _contest(lives, vote, call, -MARGIN)
        kept = _capture(lives, ballot, variant, vote, call, sends, lives.order_of(variant))
        if kept is None and vote.outcome is Outcome.YES:
            return  # a replay was wrong, on this rank or another
    ballot.busy = vote.call + JointContest.TURNS
    waiting = variant.life if is_alive(variant.life) else None
    variant.life, variant.shared = None, True
    executable = kept.executable
    begun = lives.begin_contest(variant, contest, executable, partial(_chosen, lives, [kept.program], waiting))
    lives.add_notes(*[AGREED] * begun)
    if waiting is None or not begun:
        return
    del kept, contest, waiting  # a waiting life holds nothing of a capture

    vote, call = yield
    if variant.held != (executable,):
        return
    contest = _contest(lives, vote, call, MARGIN)
    kept = _capture(lives, ballot, variant, vote, call, sends, DEPENDENCES, executable)
    if kept is not None:
        lives.record.timeline = timeline(kept.program)
        lives.begin_contest(variant, contest, kept.executable, lives.order_chosen)


def _contest(lives: Lives, vote: Vote, call: Call, margin: float) -> JointContest:
    """The contest that times the calls after ``call``."""
    record = lives.record

    def place() -> int:
        return record.replays + record.uncaptured - vote.call

    return JointContest(lives.subject.driver, call.args, place, vote.won, margin)


def _chosen(
    lives: Lives,
    untold: list[Program],
    waiting: Life | None,
    variant: Variant,
    decision: Decision,
) -> None:
    """Record the decision on captured collectives, and on the first call, report the ``untold`` program if it won. If
    replays go on calling collectives, the life that was ``waiting`` goes on, too."""
    captured = decision.order == DEPENDENCES
    if not captured:
        variant.life, variant.shared, variant.joint = waiting, False, None
    elif untold:
        variant.counted = False
        lives.tell(variant, untold.pop())
    times = f"{decision.dependences_us:,.1f} captured, {decision.program_us:,.1f} called"
    verdict = "captured" if captured else "called by each replay, as not all ranks have measured captured ones as fast"
    lives.add_notes(f"collectives are {verdict}: µs of the device per call: {times} ({decision.calls} calls)")


def _capture_joint(
    lives: Lives, ballot: Ballot, args: list[Any], order: str, joined: Executable | None
) -> Captured | None:
    """A capture with collectives, if replays have no other operators to call. ``joined``: replays send captured
    collectives already, and another ``order`` is tried, if it does not take too much memory."""
    with ballot.capturing():
        made = lives.try_capture(args, order, collectives=True)
    if isinstance(made, Refusal):
        lives.note(made)
    elif not only_collectives(made.program):
        lives.note(Refusal("eager-calls", "replays call other operators than collectives"))
        made.executable.close()
    elif joined is not None and made.program.order is None:
        made.executable.close()
    else:
        return made
    return None


def _capture(
    lives: Lives,
    ballot: Ballot,
    variant: Variant,
    vote: Vote,
    call: Call,
    sends: str,
    order: str,
    joined: Executable | None = None,
) -> Captured | None:
    """Capture with collectives, and compare with all ranks; None unless it was right on each.

    Once ranks have agreed to replay, anything that keeps this rank from its part is raised: others would mistake its
    next messages for that part. A call that this rank cannot replay is left as it was."""
    made = _capture_joint(lives, ballot, call.args, order, joined)
    if made is None:
        return None

    def answer(args: list[Any]) -> Sequence[Any]:
        """Run uncaptured, or by ``joined`` if all ranks go on with collectives that are captured already."""
        goes_on = joined is not None and vote.outcome is not Outcome.YES
        outputs: Sequence[Any] | None = joined.replay(args) if joined is not None and goes_on else None
        if outputs is None:
            outputs = lives.subject.run(args)
            lives.record.count_uncaptured()
        else:
            lives.record.count_replay()
        return outputs

    verdict = lives.compare(variant, made, call, partial(vote.together, sends), answer)
    right = verdict.refusal is None and lives.left is None and variant.replay is not None
    if vote.outcome is Outcome.YES and vote.keep(right):
        ballot.join(lives)
        lives.make_room(variant, made)  # as far as possible: a capture that all ranks use is kept
        lives.add_notes(*[TOLERATED] * verdict.tolerant)
        return made
    made.executable.close()
    lives.note(verdict.refusal or Refusal("ranks-differ", "another rank's replay was not right"))
    return None
