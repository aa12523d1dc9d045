"""Ranks that vote on capturing collectives: what they decide, they decide alike, and results stay those of eager.

On the host a replay calls collectives in any case: what is tested there is who votes for what, and what follows. Each
call takes as long as any other, by a clock of the tests, but where one says otherwise.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import _functional_collectives as functional

from pygraph.errors import ReplayError
from pygraph.runtime import compare, life, region, votes
from pygraph.runtime.contest import JointContest
from pygraph.runtime.cuda import executable
from pygraph.runtime.cuda.driver import CudaDriver
from pygraph.runtime.host.driver import HostDriver
from pygraph.runtime.votes import Ballot, Outcome
from tests.distributed import checks
from tests.distributed.checks import compiled, forget, fork, group, host_only, recorded, regions, sent, tensor
from tests.distributed.processes import Rank

CALLS = 90
"""More than ranks vote at, and time."""
AGREED = "all ranks have captured the collectives, and compared"
CAPTURED = "collectives are captured: "
SLOWER = "collectives are called by each replay, as not all ranks have measured captured ones as fast: "
LATE = "collectives are called by each replay: a rank did not vote on capturing them"
TOLERATED = "non-deterministic: compared within a tolerance"
NEVER = "collectives are called by each replay: ranks did not agree to capture them"


class Clock:
    """Times a call: so many seconds."""

    took = 1.0

    def stop(self) -> None:
        pass

    def seconds(self) -> float:
        return self.took

    def since(self, _earlier: Clock) -> float:
        return 0.0


def check(run: Callable[[Rank], None]) -> Callable[[Rank], None]:
    """Decorator: adds it to the checks. Collectives may be captured, and all calls take as long."""

    @functools.wraps(run)
    def made(rank: Rank) -> None:
        parts = {"timer": lambda *_: Clock(), "no_collectives": lambda _: None}
        with mock.patch.multiple(HostDriver, **parts), mock.patch.object(CudaDriver, "timer", parts["timer"]):
            run(rank)

    return checks.check(made)


def layer(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    cache.add_(torch.relu(x) + 1)
    y = functional.all_reduce(cache % 5, "sum", group())
    return torch.relu(functional.all_reduce(y - x, "max", group()))


def run(rank: Rank, ours: Callable[..., Any] | None = None) -> list[int]:
    """Calls of ``layer`` that have to be right, and how many collectives each sent."""
    ours = ours or recorded(rank, layer, collectives="measured")
    counts = []
    for call in range(CALLS):
        did = []
        for each in (layer, ours):
            cache, x = tensor(rank, call + 1), tensor(rank, call)
            before = sent()
            did.append((each(cache, x), cache))
        counts.append(sent() - before)
        assert all(torch.equal(one, other) for one, other in zip(*did, strict=True)), f"call {call}: {did}"
    return counts


def record() -> Any:
    (found,) = regions()
    return found


def sends(rank: Rank, counts: list[int], expected: list[int]) -> None:
    """How many collectives each call sent. A GPU counts those that are captured, and none that is replayed."""
    assert rank.device != "cpu" or counts == expected, counts


@contextlib.contextmanager
def only_on(rank: Rank, number: int, *arguments: Any) -> Iterator[None]:
    """A part is replaced on one rank."""
    with mock.patch.object(*arguments) if rank.number == number else mock.patch.object(votes, "SECONDS", 10.0):
        yield


@check
def all_agree(rank: Rank) -> None:
    """From the vote on, replays are those that all ranks compared; each sends what the program sends. Of the events
    that NCCL records behind its two kernels, the last one is left."""
    dropped = []
    real = executable.drop_superseded

    def counted(driver: Any, graph: int, nodes: Any) -> Any:
        found = real(driver, graph, nodes)
        if None not in nodes:  # one is of eager steps
            dropped.append(len(found))
        return found

    with mock.patch.object(executable, "drop_superseded", counted):
        counts = run(rank, compiled(layer, collectives="measured", inductor={}))
    agreed, captured = record().notes
    assert agreed == AGREED
    assert captured.startswith(CAPTURED)
    assert record().captures == 2
    sends(rank, counts, [2, 2, 2, 4, *[2] * (CALLS - 4)])  # the fourth call is a replay and an uncaptured run
    if rank.device == "cuda":
        assert (record().segments, record().eager) == (1, [])
        assert dropped == [1]
    assert record().replays == CALLS - 3, "one warm, one captured, one compared by all"


@check
def one_rank_measured_it_slower(rank: Rank) -> None:
    """All go on calling collectives. Whose turn it is, all know alike."""
    turns = list[str | None]()
    real = JointContest.enter

    def slower(self: JointContest) -> Any:
        turn = real(self)
        if turn is not None:
            turns.append(turn.order)
            turn.timer.took = 1.0 + 0.1 * (rank.number == 1 and turn.order == "dependences")  # type: ignore[attr-defined]
        return turn

    with mock.patch.object(JointContest, "enter", slower):
        counts = run(rank)
    agreed, slow = record().notes
    assert (agreed, record().captures) == (AGREED, 1)
    assert slow.startswith(SLOWER)
    sends(rank, counts, [2, 2, 2, 4, *[2] * (CALLS - 4)])
    everyones: list[Any] = [None] * rank.size
    torch.distributed.all_gather_object(everyones, turns)
    assert len(turns) == JointContest.TURNS
    assert everyones == [turns] * rank.size


@check
def one_rank_does_not_say_what_it_measured(rank: Rank) -> None:
    """It has left: the others wait for it once, and go on calling collectives."""
    real = Ballot.decide

    def silent(self: Ballot, question: str, answer: str | None) -> Outcome:
        return Outcome.LATE if question.startswith("times") and rank.number == 1 else real(self, question, answer)

    with mock.patch.object(votes, "SECONDS", 1.0), mock.patch.object(Ballot, "decide", silent):
        counts = run(rank)
    assert record().notes[-1].startswith(SLOWER)
    sends(rank, counts, [2, 2, 2, 4, *[2] * (CALLS - 4)])


def of_any_rows(x: torch.Tensor) -> torch.Tensor:
    """Sends as much whatever the number of rows."""
    return torch.relu(x - 1) + functional.all_reduce(torch.relu(x).sum(0) % 7, "sum", group())


@host_only
@check
def one_rank_runs_other_sizes_while_it_measures(rank: Rank) -> None:
    """It is in step again behind that, and timed other calls: all go on calling collectives."""
    ours = recorded(rank, of_any_rows, dynamic=True, collectives="measured")
    for call in range(CALLS):
        x = tensor(rank, call, rows=5 if rank.number == 1 and call in {40, 41, 60} else 3)
        before = sent()
        assert torch.equal(ours(x), of_any_rows(x)), call
        assert rank.device != "cpu" or sent() - before == (3 if call == 3 else 2), call
    everyones: list[Any] = [None] * rank.size
    torch.distributed.all_gather_object(everyones, [note.partition(":")[0] for note in record().notes])
    assert everyones == [everyones[0]] * rank.size
    assert record().notes[-1].startswith(SLOWER)


@check
def all_ranks_run_other_sizes_while_they_measure(rank: Rank) -> None:
    """They have timed the same calls."""
    ours = recorded(rank, of_any_rows, dynamic=True, collectives="measured")
    for call in range(CALLS):
        x = tensor(rank, call, rows=5 if call in {40, 41, 60} else 3)
        assert torch.equal(ours(x), of_any_rows(x)), call
    assert record().notes[-1].startswith(CAPTURED)


@check
def each_rank_captures_in_an_order_of_its_own(rank: Rank) -> None:
    """Launches of one rank run side by side; collectives come in turn on both."""
    ours = recorded(rank, fork, collectives="measured", order="program" if rank.number else "dependences")
    for call in range(CALLS):
        x = tensor(rank, call)
        assert torch.equal(ours(x), fork(x)), call
    assert (record().captures, record().notes.count(AGREED)) == (2, 1)
    assert bool(record().timeline) == (rank.number == 0)
    if rank.device == "cuda":
        assert (record().segments, record().eager) == (1, [])


@check
def calls_choose_the_order_of_captured_collectives(rank: Rank) -> None:
    """Between two captures that all ranks have compared. Where nothing is parallel, there is nothing to choose."""
    ours = recorded(rank, fork, collectives="measured", order="measured", ledger=True, cache_dir=None)
    for call in range(2 * CALLS):  # 160 of them in turns
        x = tensor(rank, call)
        assert torch.equal(ours(x), fork(x)), call
        assert (AGREED in record().notes) == (call >= 3), call
    assert (record().captures, record().contests) == (2, 0)
    if rank.device == "cuda":
        assert (len(record().orders), record().segments, record().eager) == (1, 1, [])
        assert record().timeline


@check
def one_rank_tries_no_other_order(rank: Rank) -> None:
    """Collectives that are captured on one rank are on all, in each call: also in that of the vote that fails."""

    def once(number: int) -> list[str]:
        forget()
        order = "program" if rank.number == number else "measured"
        ours = recorded(rank, fork, collectives="measured", order=order, ledger=True, cache_dir=None)
        done = []
        for call in range(CALLS + 10):
            before = record().replays if done else 0
            x = tensor(rank, call)
            assert torch.equal(ours(x), fork(x)), call
            done.append("replay" if record().replays > before else "uncaptured")
        return done

    start = ["uncaptured", "uncaptured", "replay", "uncaptured"]  # the last one is the first vote
    with mock.patch.object(HostDriver, "parallel", True):
        assert once(1) == [*start, *["replay"] * (CALLS + 6)]
        assert AGREED in record().notes
        assert ("ranks-differ" in record().refusals) == (rank.number != 1)
        assert once(-1) == [*start, *["replay"] * JointContest.TURNS, "uncaptured", *["replay"] * 15]
        assert record().timeline


@check
def one_rank_cannot_capture(rank: Rank) -> None:
    """It says no, at every vote, and all go on as before."""

    def refuses(*_: Any) -> None:
        return None

    with only_on(rank, 1, votes, "_capture_joint", refuses):
        counts = run(rank)
    assert AGREED not in record().notes
    assert record().notes.count(NEVER) == 1
    sends(rank, counts, [2] * CALLS)
    assert record().replays == CALLS - 2 - (0 if rank.number == 1 else len(votes.VOTES)), (
        "votes that failed are answered uncaptured"
    )


@check
def one_rank_has_no_memory_to_compare(rank: Rank) -> None:
    """It says no once its copies were to be made; the others have theirs, and do not replay."""
    real = compare._Trial.__init__

    def short(self: Any, *facts: Any) -> None:
        real(self, *facts)
        self.over_budget = None if self.together is None else "none"

    with only_on(rank, 1, compare._Trial, "__init__", short):
        counts = run(rank)
    assert AGREED not in record().notes
    sends(rank, counts, [2] * CALLS)
    assert record().state == "replay"


@check
def one_ranks_replay_is_wrong(rank: Rank) -> None:
    """All give the replay up, for good, since one of them found other values."""
    real = compare._Trial.judge

    def wrong(self: Any, first: Any, outputs: Any) -> Any:
        found = real(self, first, outputs)
        return (
            found
            if self.together is None
            else compare.Verdict(outputs, compare.Refusal("comparison-failed", "as asked"))
        )

    with only_on(rank, 1, compare._Trial, "judge", wrong):
        counts = run(rank)
    assert AGREED not in record().notes
    sends(rank, counts, [2, 2, 2, 4, *[2] * (CALLS - 4)])
    assert record().state == "replay"
    assert record().replays == CALLS - 3


@check
def results_that_vary_are_held_against_more_runs(rank: Rank) -> None:
    """All ranks make these, also one whose results are alike. A replay that is further off is used by none, nor is one
    that is refused before the call was answered."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = functional.all_reduce(x % 5, "sum", group())
        return torch.relu(y + 1 + torch.kthvalue(y, 2, 1, keepdim=True).values)  # known to vary

    numbers = torch.Generator().manual_seed(0)

    def vary(found: Any) -> Any:
        """By rounding errors, as such sums do where they are long."""
        return [
            one * (1 + torch.randint(-2, 3, one.shape, generator=numbers) * 2.0**-23).to(one.device) for one in found
        ]

    make, replay, prepared = (getattr(compare._Trial, name) for name in ("__init__", "_replay", "replay_prepared"))

    def varies(self: Any, fn: Any, *facts: Any) -> None:
        make(self, fn if facts[-1] is None else lambda args: vary(fn(args)), *facts)

    def near(self: Any, args: list[Any]) -> Any:
        outputs = replay(self, args)
        return outputs if self.together is None else vary(outputs)

    def far(self: Any, args: list[Any]) -> Any:
        outputs = replay(self, args)
        return outputs if self.together is None else [one + 1 for one in outputs]

    def refused(self: Any) -> Any:
        outcome = prepared(self)
        return outcome if self.together is None else compare.Refusal("random-state", "as asked")

    for agree, changed in ((True, {"_replay": near}), (False, {"_replay": far}), (False, {"replay_prepared": refused})):
        forget()
        ours, counts = recorded(rank, fn, collectives="measured"), []
        trial = mock.patch.multiple(compare._Trial, __init__=varies, **changed)
        with trial if rank.number else contextlib.nullcontext():
            for call in range(6):
                x, before = tensor(rank, call), sent()
                assert torch.equal(ours(x), fn(x))
                counts.append(sent() - before - 1)
        assert (AGREED in record().notes) == agree, (changed, record().notes, counts)
        assert (TOLERATED in record().notes) == (agree and rank.number > 0)
        sends(rank, counts, [1, 1, 1, 15, 1, 1])  # a replay, the answer, and 1 + 3 + 9 runs besides
        assert record().state == "replay"


@check
def one_ranks_results_vary(rank: Rank) -> None:
    """It would make more runs than the others: none replays."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = functional.all_reduce(x % 5, "sum", group())
        return torch.relu(y + 1 + (torch.kthvalue(y, 2, 1, keepdim=True).values if rank.number else y.amax()))

    ours, counts = recorded(rank, fn, collectives="measured"), []
    for call in range(6):
        x, before = tensor(rank, call), sent()
        assert torch.equal(ours(x), fn(x))
        counts.append(sent() - before - 1)
    assert AGREED not in record().notes
    sends(rank, counts, [1] * 6)


@check
def one_rank_never_votes(rank: Rank) -> None:
    """The others wait for it once, and then no more."""
    asked = []
    real = Ballot.decide

    def counted(self: Ballot, question: str, answer: str | None) -> Outcome:
        asked.append(question)
        return real(self, question, answer)

    with mock.patch.object(votes, "SECONDS", 1.0), mock.patch.object(Ballot, "decide", counted):
        ours = {"collectives": "measured"} if rank.number == 0 else {"collectives": "eager"}
        fn = recorded(rank, layer, **ours)
        for call in range(CALLS):
            cache, x = tensor(rank, call + 1), tensor(rank, call)
            expected = layer(cache.clone(), x)
            assert torch.equal(fn(cache, x), expected)
    assert asked == (["replay"] if rank.number == 0 else [])
    assert record().notes == ([LATE] if rank.number == 0 else [])


@check
def ranks_send_other_sizes_of_work(rank: Rank) -> None:
    """Each rank's own sizes are no matter; what is sent is the same."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(torch.relu(x).sum(0) % 7, "sum", group())
        return torch.relu(x - 1) + total

    ours = recorded(rank, fn, collectives="measured")
    for call in range(CALLS):
        x = tensor(rank, call, rows=3 + rank.number)
        assert torch.equal(ours(x), fn(x))
    assert AGREED in record().notes


@check
def several_groups_stay_eager(rank: Rank) -> None:
    """One group's ranks cannot speak for another's."""
    other = torch.distributed.new_group(list(range(rank.size)))

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(functional.all_reduce(torch.relu(x), "sum", group()) + functional.all_reduce(x, "max", other))

    ours = recorded(rank, fn, collectives="measured")
    for call in range(10):
        x = tensor(rank, call)
        assert torch.equal(ours(x), fn(x))
    assert record().notes == []


@check
def a_question_is_answered_once(rank: Rank) -> None:
    """Whoever asks first, and however late the others are: one result for all."""
    ballot = Ballot("ballot", group().group_name)
    with mock.patch.object(votes, "SECONDS", 0.5):
        assert ballot.decide("same", "a") is Outcome.YES
        assert ballot.decide("different", f"{rank.number}") is Outcome.NO
        assert ballot.decide("one no", None if rank.number else "a") is Outcome.NO
        if rank.number == 0:
            assert ballot.decide("late", "a") is Outcome.LATE
        torch.distributed.barrier()
        assert ballot.decide("late", "a") is Outcome.LATE
        torch.distributed.barrier()


@check
def compiled_again_ranks_vote_again(rank: Rank) -> None:
    """A decision on a region does not hold for the next region of its name."""
    for again in range(2):
        forget()
        refuses = mock.patch.object(votes, "_capture_joint", return_value=None)
        with refuses if again and rank.number else mock.patch.object(votes, "SECONDS", 10.0):
            run(rank, compiled(layer, collectives="measured"))
        assert (AGREED in record().notes) == (not again)


@check
def ranks_are_at_different_places(rank: Rank) -> None:
    """The host of a rank may be ahead of another one's, and a graph's fourth call be another call of the program: ranks
    that have made or sent another number of calls do not agree, whatever they agreed on before. What was captured was
    not sent."""
    ballot = Ballot("places", group().group_name)
    x = torch.ones(2, device=rank.device)

    def agreed() -> bool:
        ballot.held += 1
        return ballot.decide("replay", ballot.place(4)) is Outcome.YES

    with mock.patch.object(votes, "SECONDS", 5.0), mock.patch.dict(votes.counts, uncaptured=7):
        assert agreed()
        votes.counts["uncaptured"] += rank.number
        assert not agreed()
        votes.counts["uncaptured"] = 7
        before = ballot.place(4)
        with ballot.capturing():
            torch.distributed.all_reduce(x)
        assert ballot.place(4) == before
        torch.distributed.all_reduce(x)
        assert ballot.place(4) != before
        assert ballot.place(5) != ballot.place(4)
        before = ballot.place(4)
        with mock.patch.object(votes, "_joined", {group(): ()}):
            assert ballot.place(4) == before


@check
def one_ranks_call_raises(rank: Rank) -> None:
    """Behind its collectives, after all agreed: it says that it has found nothing right, and nobody uses the replay.
    Out of memory, it evicts the capture that was replayed longest ago, another one."""
    real = compare.compare

    def raises(*facts: Any, together: Any, **options: Any) -> Any:
        if together is None:
            return real(*facts, **options)
        *others, answer = facts

        def late(args: list[Any]) -> Any:
            answer(args)
            raise torch.OutOfMemoryError("as asked")

        return real(*others, late, together=together, **options)

    def varies(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.kthvalue(layer(cache, x), 2, 1).values

    for fn in (layer, varies):
        forget()
        other = recorded(rank, torch.relu)
        for call in range(4):
            other(tensor(rank, call))
        ours = recorded(rank, fn, collectives="measured")
        raised = 0
        with only_on(rank, 1, life, "compare", raises):
            for call in range(CALLS):
                cache, x = tensor(rank, call + 1), tensor(rank, call)
                expected = fn(cache.clone(), x)
                try:
                    assert torch.equal(ours(cache, x), expected), call
                except torch.OutOfMemoryError:
                    raised += 1
        assert raised == (rank.number == 1)
        assert AGREED not in regions()[-1].notes


@host_only
@check
def one_rank_cannot_do_what_it_agreed_to(rank: Rank) -> None:
    """It sends nothing where the others replay: that ends its program, and no other rank gets a wrong result. Gloo
    raises on the others, when its time is up: what Dynamo traced keeps the group of this rank alive. With NCCL they are
    inside a kernel, until a watchdog ends their processes."""
    rank.begin("a group that waits for five seconds", 10)
    faulthandler.dump_traceback_later(60, exit=True)  # it has to be compiled, too
    real = compare._Trial._replay

    def short(self: Any, args: list[Any]) -> Any:
        if self.together is not None:
            raise torch.OutOfMemoryError("as asked")
        return real(self, args)

    ours = compiled(layer, collectives="measured")
    with only_on(rank, 1, compare._Trial, "_replay", short):
        for call in range(3):
            cache, x = tensor(rank, call + 1), tensor(rank, call)
            expected = layer(cache.clone(), x)
            assert torch.equal(ours(cache, x), expected)
        try:
            with pytest.raises(
                ReplayError, match="as asked" if rank.number == 1 else "this one could not: replay-raised"
            ):
                ours(tensor(rank, 4), tensor(rank, 3))
        finally:
            rank.end()


@check
def a_region_is_closed_during_the_vote(rank: Rank) -> None:
    """Nothing that was captured stays, nor is replayed."""
    import gc

    real, closed = Ballot.decide, list[Any]()

    def closes(self: Ballot, question: str, answer: str | None) -> Outcome:
        outcome = real(self, question, answer)
        if question == "use":
            closed.extend(each for each in gc.get_objects() if type(each) is region.Region)
            for each in closed:
                each.close()
        return outcome

    ours = recorded(rank, layer, collectives="measured")
    with mock.patch.object(Ballot, "decide", closes):
        for call in range(6):
            cache, x = tensor(rank, call + 1), tensor(rank, call)
            expected = layer(cache.clone(), x)
            assert torch.equal(ours(cache, x), expected), call
    assert closed
    assert (record().state, record().replays, record().notes) == ("uncaptured", 1, [])


@check
def a_group_that_ends_takes_its_captures_along(rank: Rank) -> None:
    """NCCL waits for all graphs that hold a collective of a communicator before it destroys it. Nobody has to close
    regions before."""
    run(rank)
    assert AGREED in record().notes
    assert record().state == "replay"
    rank.end()
    assert record().state == "uncaptured"
