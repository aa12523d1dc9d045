"""Ranks that decide otherwise: when to capture, what to keep, what fails, which sizes.

Values are small whole numbers: results are exact in any order of sums, and compared bit for bit with eager ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed
from torch.distributed import _functional_collectives as functional

import pygraph
from pygraph.runtime.host import HostDriver
from pygraph.runtime.region import Region
from tests.distributed.checks import (
    CALLS,
    captured,
    check,
    compiled,
    fork,
    group,
    recorded,
    regions,
    same,
    sent,
    tensor,
)
from tests.distributed.processes import Rank

failing: set[str] = set()
"""Operators whose fake kernel raises outside of a compilation: they can be neither captured nor recorded."""


# -- operators ---------------------------------------------------------------------------------------------------------


@torch.library.custom_op("quantized::pygraph_hazard", mutates_args=())
def hazard(x: torch.Tensor) -> torch.Tensor:
    """Fine by its schema; in a namespace of torch's own, so that it is tried in a capture."""
    return x * 2


@hazard.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    from pygraph import compat

    if "hazard" in failing and compat.TracingContext.try_get() is None:
        raise RuntimeError("not while capturing")
    return torch.empty_like(x)


@torch.library.custom_op("pygraph_hazards::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    """Raises ValueError for a negative number."""
    if bool((x < 0).any()):
        raise ValueError("negative")
    return x + 1


positive.register_fake(torch.empty_like)


@torch.library.custom_op("pygraph_hazards::partly", mutates_args=())
def partly(x: torch.Tensor, rows: int) -> torch.Tensor:
    """``x`` in its first ``rows``; the others are not initialised, and hold what memory held."""
    y = torch.full_like(x, float("nan") if next(_numbers) % 2 else 1e30)
    y[:rows] = x[:rows]
    return y


partly.register_fake(lambda x, rows: torch.empty_like(x))
_numbers = iter(range(1 << 30))


def layer(x: torch.Tensor) -> torch.Tensor:
    """Two segments around a collective, or more."""
    y = functional.all_reduce(torch.relu(x * 2 - 3) + 1, "sum", group())
    y = functional.all_reduce(torch.relu(y - x) % 5, "sum", group())
    return torch.relu(y - 2) * 2


# -- ranks that decide otherwise ---------------------------------------------------------------------------------------


@check
def captures_at_different_calls(rank: Rank) -> None:
    first = 2 + rank.number % 4
    ours = compiled(layer, capture_after=first)
    for call in range(CALLS):
        same(ours, layer, [tensor(rank, call)])
    captured(CALLS - first)


@check
def one_rank_evicts(rank: Rank) -> None:
    """Work of each rank's own size around a collective."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = functional.all_reduce((torch.relu(x * 2 - 3) + 1).sum(0), "sum", group())
        return torch.relu(x + y) - 2

    first = compiled(fn, dynamic=True)
    for call in range(3):
        same(first, fn, [tensor(rank, call)])
    (record,) = regions()
    ours = compiled(fn, dynamic=True, memory_limit=record.held_bytes * 3 // 2 if rank.number == 0 else None)
    for call in range(3 * CALLS):
        same(ours, fn, [tensor(rank, call, (2, 4, 4, 6)[call * (1 + rank.number) % 4])])
    _, record = regions()
    assert record.captures > 3 if rank.number == 0 else record.captures <= 3, record.captures


@check
def one_rank_cannot_capture_what_is_prepared(rank: Rank) -> None:
    """It tries again, and calls as often as the other all the same."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(functional.all_reduce(hazard(torch.relu(x * 2 - 3)), "sum", group()) - 1)

    ours = compiled(fn, dynamic=True)
    failing.update(["hazard"] * rank.number)
    prepared = pygraph.prepare(ours, {(0, 0): [4, 6, 8]}, args=(tensor(rank, 0),))
    failing.clear()
    assert len(prepared.captured) == (0 if rank.number else 3), prepared
    same(ours, fn, [tensor(rank, 1, 6)])


@check
def one_rank_fails_to_capture(rank: Rank) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(functional.all_reduce(hazard(layer(x) % 3), "sum", group()) - 1)

    ours = recorded(rank, fn)
    for call in range(CALLS):
        if call == 1 and rank.number == 1:
            failing.add("hazard")
        same(ours, fn, [tensor(rank, call)])
    states = [record.state for record in regions()]
    assert ("uncaptured" in states) == (rank.number == 1), states
    failing.clear()


@check
def one_rank_is_never_captured(rank: Rank) -> None:
    ours = compiled(layer, disable=rank.number == 1)
    for call in range(CALLS):
        same(ours, layer, [tensor(rank, call)])
    if rank.number != 1:
        captured()


@check
def one_rank_compares_each_call(rank: Rank) -> None:
    ours = compiled(layer, verify="always" if rank.number == 1 else "first")
    for call in range(CALLS):
        same(ours, layer, [tensor(rank, call)])
    captured()


@check
def one_rank_raises_in_the_middle(rank: Rank) -> None:
    """Between the issue of a collective and its wait."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x) + 1
        under_way = functional.all_reduce(y, "sum", group())
        z = positive(x * 2)
        return torch.relu(under_way + z)

    ours = recorded(rank, fn)
    for call in range(2 * CALLS):
        x = tensor(rank, call)
        same(ours, fn, [x - 10 if rank.number == 1 and call in (0, 1, 3, 6, 7) else x])
    captured()


@check
def sizes_are_each_ranks_own(rank: Rank) -> None:
    """Ragged splits: what a rank sends and receives differs by rank and call."""

    def fn(x: torch.Tensor, received: list[int], given: list[int]) -> torch.Tensor:
        y = functional.all_to_all_single(torch.relu(x * 2 - 3), received, given, group())
        return torch.relu(y - 1) * 2

    ours = compiled(fn, dynamic=True)
    for call in range(2 * CALLS):
        counts = [[2 + (a * b + a + call // 4) % 3 for b in range(rank.size)] for a in range(rank.size)]
        given, received = counts[rank.number], [row[rank.number] for row in counts]
        same(ours, fn, [tensor(rank, call, sum(given)), received, given])


@check
def memory_is_not_initialised(rank: Rank) -> None:
    """Rows that hold anything, NaN among it, are exchanged; what is returned of them is defined."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(x.shape[0]).unsqueeze(1) < 2
        y = functional.all_reduce(partly(torch.relu(x) + 1, 2), "sum", group())
        return torch.where(rows, torch.relu(y - 1), 0.0)

    ours = recorded(rank, fn)
    for call in range(CALLS):
        same(ours, fn, [tensor(rank, call)])
    captured()


@check
def one_rank_returns_what_is_not_initialised(rank: Rank) -> None:
    """A rank may refuse its region for that; the others go on with theirs."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = functional.all_reduce(torch.relu(x) + 1, "sum", group())
        return torch.relu(y - 1), torch.cat([torch.empty(64, 64), y.new_zeros(1, 64)]) + 0

    ours = recorded(rank, fn)
    for call in range(CALLS):
        hole = torch.full((64, 64), float("nan") if rank.number == 0 else float(call))
        del hole
        x = tensor(rank, call)
        assert torch.equal(ours(x)[0], fn(x)[0])


# -- what runs beside and in which order -------------------------------------------------------------------------------


@check
def work_between_issue_and_wait(rank: Rank) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        one = torch.ops._c10d_functional.all_reduce(torch.relu(x) + 1, "sum", group().group_name)
        two = torch.ops._c10d_functional.all_gather_into_tensor(x * 2, rank.size, group().group_name)
        y = torch.relu(x - 3) * 2  # beside both
        y = y + torch.ops._c10d_functional.wait_tensor(two).view(rank.size, *x.shape).sum(0)
        return torch.relu(y - torch.ops._c10d_functional.wait_tensor(one))

    ours = recorded(rank, fn)
    for call in range(CALLS):
        same(ours, fn, [tensor(rank, call)])
    captured()


@check
def groups_take_turns(rank: Rank) -> None:
    """Collectives of several groups, waited for in another order than they were issued in."""
    ranks = list(range(rank.size))
    other, half = distributed.new_group(ranks), None
    for first in range(0, rank.size, 2):
        made = distributed.new_group(ranks[first : first + 2])
        half = made if rank.number in ranks[first : first + 2] else half
    assert half is not None
    backends = [each._get_backend(torch.device(rank.device)) for each in (group(), other, half)]
    assert [each.options._threads for each in backends] == [1, 1, 1], "torch's threads of one group corrupt memory"

    def fn(x: torch.Tensor) -> torch.Tensor:
        a = functional.all_reduce(torch.relu(x) + 1, "sum", group())
        b = functional.all_reduce(x * 3, "sum", other)
        c = functional.all_reduce(x - 1, "max", half)
        y = torch.relu(c) + b
        d = functional.all_reduce(y % 4, "sum", group())
        return torch.relu(a - d) + functional.all_reduce(torch.relu(a) % 5, "sum", half)

    ours = recorded(rank, fn, capture_after=2 + rank.number % 2)
    for call in range(CALLS):
        same(ours, fn, [tensor(rank, call)])
    captured()


@check
def arguments_are_written(rank: Rank) -> None:
    """A cache is written in place on both sides of a collective."""

    def fn(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache[1:3] += torch.relu(x[:2]) + 1
        y = functional.all_reduce(cache % 5, "sum", group())
        cache.copy_(torch.relu(y - cache))
        return y * 2

    ours = recorded(rank, fn, capture_after=2 + rank.number % 4)
    for call in range(CALLS):
        same(ours, fn, [tensor(rank, call + 1), tensor(rank, call)])
    captured()


# -- collectives that are waited for at once ---------------------------------------------------------------------------

Send = Callable[..., Any]


def _sends(size: int) -> dict[str, tuple[str, Send]]:
    """By name, an operator and how it is called with a matrix of 4 x 4 that is the region's own."""
    ops, name, even = torch.ops._c10d_functional, group().group_name, [2, 2]
    uneven = ([1, 2], [2, 2]) if distributed.get_rank() else ([3, 2], [3, 1])  # rows that come, and that go
    return {
        **{f"{how} in place": ("all_reduce_", lambda x, how=how: ops.all_reduce_(x, how, name)) for how in REDUCTIONS},
        "a view in place": ("all_reduce_", lambda x: ops.all_reduce_(x[1:3], "sum", name)),
        "sum": ("all_reduce", lambda x: ops.all_reduce(x, "sum", name)),
        "maximum of rows": ("all_reduce", lambda x: ops.all_reduce(x[2:], "max", name)),
        "maximum of columns": ("all_reduce", lambda x: ops.all_reduce(x[:, 2:], "max", name)),
        "several in place": ("all_reduce_coalesced_", lambda x: ops.all_reduce_coalesced_([x[:1], x[2:]], "sum", name)),
        "several": ("all_reduce_coalesced", lambda x: ops.all_reduce_coalesced([x, x[2:]], "max", name)),
        "gather": ("all_gather_into_tensor", lambda x: ops.all_gather_into_tensor(x, size, name)),
        "gather several": (
            "all_gather_into_tensor_coalesced",
            lambda x: ops.all_gather_into_tensor_coalesced([x[1:], x[0]], size, name),
        ),
        "gather there": (
            "all_gather_into_tensor_out",
            lambda x: ops.all_gather_into_tensor_out(x, size, name, out=x.new_empty(4 * size, 4)),
        ),
        "scatter": ("reduce_scatter_tensor", lambda x: ops.reduce_scatter_tensor(x, "sum", size, name)),
        "scatter several": (
            "reduce_scatter_tensor_coalesced",
            lambda x: ops.reduce_scatter_tensor_coalesced([x, x[2:]], "max", size, name),
        ),
        "scatter there": (
            "reduce_scatter_tensor_out",
            lambda x: ops.reduce_scatter_tensor_out(x, "sum", size, name, out=x.new_empty(4 // size, 4)),
        ),
        "even parts": ("all_to_all_single", lambda x: ops.all_to_all_single(x, even, even, name)),
        "uneven parts": ("all_to_all_single", lambda x: ops.all_to_all_single(x, *uneven, name)),
    }


REDUCTIONS = ("sum", "max", "min", "product")
BOXED = {"maximum of columns": 1}
"""Waits of those that stay calls of the operator, which makes their operands contiguous."""


def _called(region: Callable[..., Any], args: list[Any]) -> tuple[Any, Counter[str]]:
    """The result of a call, and how often it calls each operator."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = region(args)
    return found, Counter(event.name for event in profile.events())


@check
def waits_stand_behind_their_collectives(rank: Rank) -> None:
    """Of each kind: results are eager's, so is what is sent, and no wait is called."""
    ops = torch.ops._c10d_functional
    for number, (name, (operator, send)) in enumerate(_sends(rank.size).items()):

        def fn(args: list[Any], send: Send = send) -> Sequence[Any]:
            (x,) = args
            args.clear()
            y = torch.relu(x) + 1
            found = send(y)
            waited = [ops.wait_tensor(each) for each in (found if isinstance(found, (list, tuple)) else [found])]
            return [torch.relu(each) for each in (*waited, y)]

        region = Region(fn, HostDriver(), name="toy")
        with torch.no_grad():
            for call in range(4):
                before = sent()
                expected = fn([tensor(rank, number + call)])
                count, before = sent() - before, sent()
                found, called = _called(region, [tensor(rank, number + call)])
                assert sent() - before == count, name
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (name, call, found)
            assert region.record.replays == 2, (name, region.record.refusals)
            assert called[f"_c10d_functional::{operator}"] == 1, name
            assert called["_c10d_functional::wait_tensor"] == BOXED.get(name, 0), name


# -- the order of launches ---------------------------------------------------------------------------------------------


@check
def each_rank_has_an_order_of_its_own(rank: Rank) -> None:
    """One keeps the program's. On another, launches run side by side, where they can; collectives come in turn."""

    ours = recorded(rank, fork, order="program" if rank.number else "dependences")
    for call in range(CALLS):
        same(ours, fork, [tensor(rank, call)])
    captured(CALLS - 2)
    (record,) = regions()
    assert bool(record.timeline) == (rank.number == 0)


@check
def calls_in_a_row_keep_their_bits(rank: Rank) -> None:
    """Launches run side by side between collectives, and nobody waits in between: a missing wait would show sooner or
    later. Numbers are whole and small, so that sums are exact in any order."""
    wide, depth, count = (64, 8, 400) if rank.device == "cuda" else (16, 2, 20)

    def numbers(rows: int, below: int, seed: int) -> torch.Tensor:
        drawn = torch.randint(below, (rows, wide), generator=torch.Generator().manual_seed(seed))
        return drawn.float().to(rank.device)

    weights = [[numbers(wide, 3, 4 * layer + each) for each in range(4)] for layer in range(depth)]

    def layers(x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        for (query, key, value, out), cache in zip(weights, kept, strict=True):
            a, b, c = (x @ query) % 5, (x @ key) % 3, (x @ value) % 4
            cache.add_(b).remainder_(7)
            y = functional.all_reduce(((a * cache + c) @ out) % 6, "sum", group())
            x = (x + y) % 5
        return x

    def results(fn: Any) -> list[torch.Tensor]:
        """Of all calls, and what these left behind."""
        kept = [numbers(8, 7, 100 + layer) for layer in range(depth)]
        return [*(fn(x, kept).clone() for x in xs), *kept]

    xs = [numbers(8, 5, 1000 + call) for call in range(count)]
    expected, found = results(layers), results(compiled(layers, order="dependences"))
    assert [n for n, pair in enumerate(zip(expected, found, strict=True)) if not torch.equal(*pair)] == []
    captured(count - 2)
    assert regions()[-1].timeline
