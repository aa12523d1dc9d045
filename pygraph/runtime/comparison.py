"""Holding a replay against an uncaptured run: before the first replay, and on every call where that is asked for.

Whatever happens here, the caller's tensors see exactly one run, random state advances once, and the call is answered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from pygraph.errors import ReplayError
from pygraph.runtime.compared_runs import First, Function, Scope, Trial, Verdict
from pygraph.runtime.driver import Driver, Executable, Transient
from pygraph.runtime.provenance import Refusal, is_out_of_memory

__all__ = ["Scope", "Verdict", "compare", "verify"]


def compare(fn: Function, driver: Driver, executable: Executable, args: list[Any], scope: Scope) -> Verdict:
    """Replay on copies of ``args``, then run ``fn`` on ``args`` themselves, and hold one against the other.

    Equal bits of outputs, written arguments and random state, and equal structure, accept the replay. Unequal values
    refuse it (``comparison-failed``, or ``stateful-operator`` where operators are written in Python), unless launches
    that are known to be non-deterministic decide them. Then ``fn`` runs RUNS times more on copies, and a replay is held
    to what uncaptured runs differ by. Another random state refuses the replay this time (``random-state``): another
    thread may have drawn.

    All but the run that answers the call uses the driver's transient memory, or, where that has no room beside what the
    allocator keeps for later, ordinary memory. Raises what ``fn`` raises on ``args``, and ReplayError if the replay
    damaged an argument that it should only read and that was too large to copy, or if the random state could not be
    brought back.
    """
    with driver.transient(args) as transient:
        verdict = _compare(fn, driver, executable, args, scope, transient)
    if isinstance(verdict, Refusal):
        verdict = _compare(fn, driver, executable, args, scope, contextlib.nullcontext)
    if not isinstance(verdict, Refusal):
        return verdict
    return Verdict(fn(list(args)), verdict)


def _compare(
    fn: Function, driver: Driver, executable: Executable, args: list[Any], scope: Scope, transient: Transient
) -> Verdict | Refusal:
    """The same with one kind of memory; a Refusal if there was too little, and then ``fn`` has not run on ``args``.

    Nothing refers to ``transient`` memory any more when this returns.
    """
    trial: Trial | None = None
    first: First | Refusal
    try:
        with transient():
            trial = Trial(fn, driver, executable, args, scope)
            first = trial.replay_on_copies()
    except ReplayError:
        raise
    except Exception as error:  # noqa: BLE001 - kernels and allocations raise anything; the uncaptured run answers the call
        if is_out_of_memory(error):
            return Refusal.of(error)
        first = _raised(error, replaying=trial is not None and trial.replaying)
    if trial is not None and isinstance(first, Refusal):
        first = trial.explained(Verdict((), first)).refusal or first
    outputs = fn(list(args))
    if trial is None or isinstance(first, Refusal):
        return Verdict(outputs, first if isinstance(first, Refusal) else None)
    return _judged(trial, first, outputs, transient)


def _judged(trial: Trial, first: First, outputs: Sequence[Any], transient: Transient) -> Verdict:
    """The verdict on a replay, and where it is wrong, the launch that is."""
    try:
        with transient():
            verdict = trial.judge(first, outputs)
    except ReplayError:
        raise
    except Exception as error:  # noqa: BLE001 - the same; the call has its answer already
        return Verdict(outputs, _raised(error, replaying=trial.replaying))
    return trial.explained(verdict)


def _raised(error: Exception, *, replaying: bool) -> Refusal:
    """Why a replay may not be used: memory was short, it raised, or what compares it did, which says nothing of it."""
    if is_out_of_memory(error):
        return Refusal.of(error)
    return Refusal("replay-raised" if replaying else "comparison-raised", f"{type(error).__name__}: {error}")


def verify(
    fn: Function,
    driver: Driver,
    executable: Executable,
    args: list[Any],
    scope: Scope,
    name: str,
    unverified: Callable[[str], None],
) -> Sequence[Any] | None:
    """Answer a call by a replay that was compared with a run of ``fn`` on copies made before.

    None, with nothing changed, when there is no room for copies, when ``fn`` raises, or when the executable declines.
    ``unverified`` is told why a call is answered without having been compared, or is not answered for that reason.
    Raises ReplayError, naming the region ``name``, the output, and the first launch that differs, when they differ.
    """
    trial = Trial(fn, driver, executable, args, scope)
    if trial.over_budget:
        unverified(f"copies of written arguments exceed {scope.budget} bytes")
        return None
    with driver.transient(args) as transient:
        return _verify(trial, name, transient, unverified)


def _verify(trial: Trial, name: str, transient: Transient, unverified: Callable[[str], None]) -> Sequence[Any] | None:
    try:
        with transient():
            expected = trial.run_on_copies()
    except ReplayError:
        raise
    except Exception as error:  # noqa: BLE001 - what the uncaptured run raises, it raises to the caller next
        unverified(f"an uncaptured run on copies raised {type(error).__name__}: {error}")
        return None
    if expected is None:
        unverified("another thread drew from the generator of the uncaptured run")
        return None
    outputs = trial.executable.replay(trial.args)
    if outputs is None:
        return None
    try:
        with transient():
            differs = trial.unlike(expected, outputs)
    except Exception as error:  # noqa: BLE001 - the replay has answered the call
        unverified(f"the comparison raised {type(error).__name__}: {error}")
        return outputs
    if differs is not None:
        found = trial.diagnosed()
        with transient():
            near = trial.scope.spread is not None and trial.near(expected, outputs)
        if near and found is not None and found.right:
            return outputs
        where = "" if found is None else f"; {found.text}"
        raise ReplayError(f"region {name}: a replay differs from an uncaptured run: {differs}{where}")
    return outputs
