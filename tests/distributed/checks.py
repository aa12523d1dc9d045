"""Checks that the processes run: each is a function of a rank, and raises AssertionError for an error.

``same`` compares a call of a compiled function with one of the function itself; ``captured`` checks the state of its
regions. Most functions are ``recorded``, which compiles on GPUs alone: ranks vote on regions, however these are made.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed
from torch.distributed import _functional_collectives as functional
from torch.fx.experimental.proxy_tensor import make_fx

from pygraph.runtime.host import HostDriver
from pygraph.runtime.record import RegionOptions
from pygraph.runtime.region import Region
from tests.distributed.processes import Rank, attempt
from tests.small import UNFUSED

WIDTH = 4
CALLS = 8

PASSES = "legality,placement,partitioning,indirection"
"""Regions are captured though they are small."""

CHECKS: dict[str, Callable[[Rank], None]] = {}
"""By name."""

HOST_ONLY: set[str] = set()
"""Names of those that GPUs cannot make."""


def check(run: Callable[[Rank], None]) -> Callable[[Rank], None]:
    """Decorator: adds it to CHECKS."""
    CHECKS[run.__name__] = run
    return run


def host_only(run: Callable[[Rank], None]) -> Callable[[Rank], None]:
    """Decorator: a check that GPUs cannot make. Its docstring says why."""
    HOST_ONLY.add(run.__name__)
    return run


@functools.cache
def wrong(size: int, names: tuple[str, ...], device: str = "cpu", seconds: float = 600) -> dict[str, dict[int, str]]:
    """The errors of each of the checks ``names``, by rank; none for a rank that passes. Where a process ended, its
    current check has the stderr of all that failed, and later ones say that they were not made. If processes fail
    behind the last check, and nothing else is wrong, that one has their stderr, as of rank -1."""
    said, failure = attempt("tests.distributed", size, [",".join(names), device], seconds=seconds)
    found: dict[str, dict[int, str]] = {name: {} for name in names}
    for number, lines in enumerate(said):
        errors = {line["name"]: line["error"] for line in lines}
        missing = [name for name in names if name not in errors]
        for name in names:
            error = errors.get(name, f"not made: the process ended in {missing[0]}" if missing else None)
            if error is not None:
                found[name][number] = error
        if missing:
            found[missing[0]][number] = f"the process ended:\n{failure}"
    if failure and not any(found.values()):  # behind the last check
        found[names[-1]][-1] = failure
    return found


def passes(size: int, names: tuple[str, ...], name: str, device: str = "cpu", seconds: float = 600) -> None:
    """Nothing is wrong with the check ``name``, one of ``names`` that processes make together, once."""
    errors = wrong(size, names, device, seconds)[name]
    assert not errors, "\n".join(f"rank {number}: {error}" for number, error in errors.items())


def group() -> Any:
    return distributed.group.WORLD


def sent() -> int:
    """Collectives of the group so far, by the number that it gives to each."""
    return int(group()._get_sequence_number_for_group())


def tensor(rank: Rank, call: int, rows: int = 4) -> torch.Tensor:
    """Whole numbers between 0 and 6, others on each rank and call."""
    values = torch.arange(rows * WIDTH, dtype=torch.float32, device=rank.device) * 3 + 5 * call + rank.number
    return (values % 7).view(rows, WIDTH)


KERNELS: dict[str, Any] = {} if torch.cuda.is_available() else UNFUSED
"""Options of compiled functions: on the host, torch's operators are called one by one. ``all_agree`` has kernels."""


def compiled(fn: Callable[..., Any], dynamic: bool = False, **options: Any) -> Callable[..., Any]:
    given = {"passes": PASSES, "ledger": False, **KERNELS, **options}
    return torch.compile(fn, backend="pygraph", options=given, dynamic=dynamic or None)


_recorded: list[Region] = []
_names = (f"recorded{number}" for number in itertools.count())
"""Of all of the process: ranks vote by name."""


def recorded(rank: Rank, fn: Callable[..., Any], dynamic: bool = False, **options: Any) -> Callable[..., Any]:
    """On the host, one region of the operators that ``fn`` calls: Inductor would take seconds for each function. On a
    GPU as ``compiled``."""
    if rank.device != "cpu":
        return compiled(fn, dynamic, **options)
    traced: list[Callable[..., Any]] = []

    def run(args: list[Any]) -> list[torch.Tensor]:
        given = [*args]
        args.clear()
        found = traced[0](*given)
        return [found] if isinstance(found, torch.Tensor) else list(found)

    region = Region(run, HostDriver(), name=next(_names), options=RegionOptions(**options))
    _recorded.append(region)

    def call(*args: torch.Tensor) -> Any:
        if not traced:  # of fake tensors, which send nothing
            traced.append(make_fx(fn, tracing_mode="fake", _allow_non_fake_inputs=True)(*args))
        found = region([*args])
        return found[0] if len(found) == 1 else found

    return call


def forget() -> None:
    """Nothing was compiled or recorded yet."""
    import pygraph

    pygraph.reset()
    torch._dynamo.reset()
    for region in _recorded:
        region.close()
    _recorded.clear()


def fork(x: torch.Tensor) -> torch.Tensor:
    """Products side by side, before and between collectives."""
    one, other = (x @ x.T) % 7, (x.T @ x) % 5
    y = functional.all_reduce(one + other, "sum", group())
    return functional.all_reduce((y @ one) % 3 + (other @ y) % 3, "max", group())


def same(ours: Any, fn: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """One call of ``ours`` does what ``fn`` does: results and arguments bit by bit, what it raises, and how many
    collectives it sends."""
    did = []
    for each in (fn, ours):
        given = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        before, raised = sent(), None
        try:
            found = each(*given)
        except ValueError as error:
            found, raised = (), str(error)
        found = [found] if isinstance(found, torch.Tensor) else list(found)
        tensors = [t.clone() for t in [*found, *given] if isinstance(t, torch.Tensor)]
        did.append((tensors, raised, sent() - before))
    (expected, why, count), (found, ours_why, ours_count) = did
    assert ours_why == why
    assert ours_count == count, f"{ours_count} collectives instead of {count}"
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32)), f"{one} instead of {other}"


def regions() -> list[Any]:
    """The records of all regions so far."""
    import pygraph

    compiled = [r.record for report in pygraph.reports() for r in report.regions if r.record is not None]
    return [*compiled, *(region.record for region in _recorded)]


def captured(count: int | None = None) -> None:
    """There are regions, all replay, so often."""
    found = regions()
    assert found
    for record in found:
        assert record.state == "replay", (record.state, record.reason, record.refusals)
        assert record.replays > 0
        assert count is None or record.replays == count, record.replays


@check
def passes_everywhere(rank: Rank) -> None:
    """For tests of this file: nothing is wrong."""


@check
def fails_on_rank_0(rank: Rank) -> None:
    """For tests of this file: an error of one rank."""
    assert rank.number, "as asked"


@check
def ends_rank_1(rank: Rank) -> None:
    """For tests of this file: a process ends in the middle of a line."""
    if rank.number == 1:
        print('{"name": "half', end="", flush=True)
        print("ends as asked", file=sys.stderr, flush=True)
        os._exit(3)


@check
def never_made(rank: Rank) -> None:
    """For tests of this file: the check behind the one in which a process ends."""
