"""Regions that call operators between segments: once a call, with the memory, the draws, the effects and the errors of
the uncaptured program."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed._functional_collectives
from torch import distributed
from torch.multiprocessing.reductions import StorageWeakRef

from pygraph.errors import ReplayError
from pygraph.program.program import EagerStep, GraphSegment, Program
from pygraph.program.steps import with_steps
from pygraph.runtime.contract import Executable
from pygraph.runtime.host import HostDriver
from pygraph.runtime.region import Region, RegionOptions

Function = Callable[[list[Any]], Sequence[Any]]

CALLS = 6

seen: list[Any] = []
"""What operators note."""
hooks: list[Callable[[torch.Tensor], Any]] = []
"""What ``probe`` calls, in order."""


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    seen.clear()
    hooks.clear()
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    seen.clear()
    hooks.clear()


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """An operator ``pygraph_eager::…`` whose kernel is Python."""
    _library.define(schema)
    name = schema.partition("(")[0]
    _library.impl(name, run, "CPU")
    _library.impl(name, fake, "Meta")


_library = torch.library.Library("pygraph_eager", "DEF")


def _counter(x: torch.Tensor) -> torch.Tensor:
    seen.append("counter")
    return x + len(seen)


def _probe(x: torch.Tensor) -> torch.Tensor:
    for hook in hooks:
        hook(x)
    return x + 1


def _fails(x: torch.Tensor) -> torch.Tensor:
    if bool((x < 0).any()):
        raise ValueError("negative")
    return x * 2


def _odd(x: torch.Tensor) -> torch.Tensor:
    """Other strides at every other call."""
    seen.append("odd")
    return x * 3 if len(seen) % 2 else (x * 3).t().contiguous().t()


def _resized(x: torch.Tensor) -> torch.Tensor:
    seen.append("resized")
    return x + 1 if len(seen) < 4 else torch.ones(len(seen), 4)


def _grown(x: torch.Tensor) -> torch.Tensor:
    x.untyped_storage().resize_(1 << 16)
    return x + 1


define("grown(Tensor x) -> Tensor", _grown, torch.empty_like)
define("sparse(Tensor x) -> Tensor", lambda x: x.to_sparse(), torch.empty_like)
define("wider(Tensor x) -> Tensor", lambda x: x.double(), torch.empty_like)
define("counter(Tensor x) -> Tensor", _counter, torch.empty_like)
define("probe(Tensor x) -> Tensor", _probe, torch.empty_like)
define("fails(Tensor x) -> Tensor", _fails, torch.empty_like)
define("odd(Tensor x) -> Tensor", _odd, torch.empty_like)
define("resized(Tensor x) -> Tensor", _resized, torch.empty_like)
define("noise(Tensor x) -> Tensor", lambda x: x + torch.rand_like(x), torch.empty_like)
define("identity(Tensor x) -> Tensor", lambda x: x, torch.empty_like)
define("add_into(Tensor(a!) x, Tensor y) -> ()", lambda x, y: [x.add_(y)].clear(), lambda x, y: None)
define("fill(Tensor(a!) out, Tensor x) -> ()", lambda out, x: [out.copy_(x)].clear(), lambda out, x: None)
define("scaled_(Tensor(a!) x, float by) -> Tensor(a!)", lambda x, by: x.mul_(by), lambda x, by: x)
define("rows(Tensor(a) x, int n) -> Tensor(a)", lambda x, n: x[n:], lambda x, n: x[n:])
define(
    "parts(Tensor[] xs, Tensor? y, *, int scale=1) -> (Tensor[], Tensor)",
    lambda xs, y, scale=1: ([x * scale for x in xs], xs[0] + (0 if y is None else y)),
    lambda xs, y, scale=1: ([torch.empty_like(x) for x in xs], torch.empty_like(xs[0])),
)
define("long(Tensor x) -> Tensor", lambda x: torch.ones(int(x.sum())), torch.empty_like)
ops = torch.ops.pygraph_eager


def _add_into(x: torch.Tensor, y: torch.Tensor) -> None:
    ops.add_into(x, y)


def region_of(fn: Function, driver: HostDriver | None = None, eager: Sequence[str] = (), **options: Any) -> Region:
    return Region(fn, driver or HostDriver(), name="toy", eager=eager, options=RegionOptions(**options))


def randn(*size: int) -> torch.Tensor:
    return torch.randn(*size)


def check(fn: Function, make: Callable[[int], list[Any]], **options: Any) -> Region:
    """A region around ``fn`` does what ``fn`` does, call by call: outputs, arguments, draws, and how often operators
    ran."""
    found: list[list[Any]] = []
    region = region_of(fn, **options)
    for run in (fn, region):
        torch.manual_seed(1)
        seen.clear()
        results: list[Any] = []
        for call in range(CALLS):
            args = make(call)
            outputs = run(list(args))
            kept = [*outputs, *args]
            shared = [[a.data_ptr() == b.data_ptr() for a in kept if a.numel()] for b in kept]
            results.append(([t.clone() for t in kept], [t.stride() for t in kept], shared, torch.get_rng_state()))
            assert len(seen) in (0, call + 1)
        found.append(results)
    for call, (expected, ours) in enumerate(zip(*found, strict=True)):
        assert [t.tolist() for t in ours[0]] == [t.tolist() for t in expected[0]], call
        assert ours[1:3] == expected[1:3], call
        assert torch.equal(ours[3], expected[3]), call
    return region


# -- what is called, and how often -------------------------------------------------------------------------------------


def counted(args: list[Any]) -> Sequence[Any]:
    x, w = args
    args.clear()
    hidden = ops.counter(torch.mm(x, w))
    return [torch.mm(hidden, w), hidden]


@pytest.mark.parametrize("options", [{}, {"verify_every": 1}, {"capture_after": 3}])
def test_an_operator_runs_once_a_call_also_where_calls_are_compared(options: dict[str, Any]) -> None:
    region = check(counted, lambda call: [randn(4, 4), randn(4, 4)], **options)
    after = options.get("capture_after", 2)
    assert (region.record.state, region.record.replays, region.record.captures) == ("replay", CALLS - after, 1)
    assert [(call.operator, call.count) for call in region.record.eager] == [("pygraph_eager.counter.default", 1)]


def test_steps_are_segments_and_calls_in_program_order() -> None:
    programs: list[Program] = []
    region = Region(counted, HostDriver(), name="toy", on_capture=programs.append)
    for _ in range(2):
        region([randn(4, 4), randn(4, 4)])
    first, call, last = programs[0].steps
    assert isinstance(first, GraphSegment)
    assert isinstance(call, EagerStep)
    assert isinstance(last, GraphSegment)
    assert [(step.begin, step.end) for step in programs[0].steps] == [(0, 1), (1, 2), (2, 3)]
    assert call.call.name == "pygraph_eager.counter.default"


def test_operators_of_torchs_own_are_called_where_that_is_asked_for() -> None:
    def fn(args: list[Any]) -> Sequence[Any]:
        (x,) = args
        args.clear()
        return [torch.relu(torch.cumsum(torch.mm(x, x), 0)), torch.mm(x, x)]

    region = check(fn, lambda call: [randn(4, 4)], eager=["aten.cumsum", "aten.mm"])
    assert [call.operator for call in region.record.eager] == ["aten.mm.default", "aten.cumsum.default"]
    assert region.record.segments == 1
    assert region.record.state == "replay"


def test_lists_numbers_and_absent_tensors() -> None:
    def fn(args: list[Any]) -> Sequence[Any]:
        x, y = args
        args.clear()
        (a, b), c = ops.parts([torch.relu(x), y], None, scale=3)
        (d,), e = ops.parts([torch.mm(a, b)], c)
        return [torch.mm(d, e), b]

    assert check(fn, lambda call: [randn(4, 4), randn(4, 4)]).record.state == "replay"


def test_empty_tensors() -> None:
    def fn(args: list[Any]) -> Sequence[Any]:
        x, y = args
        args.clear()
        nothing = ops.identity(torch.relu(x))
        _add_into(nothing, x)
        return [torch.cat([ops.counter(nothing), torch.relu(y)]), nothing]

    assert check(fn, lambda call: [randn(0, 4), randn(2, 4)]).record.state == "replay"


def test_each_size_is_captured_and_the_second_one_is_proven() -> None:
    region = check(counted, lambda call: [randn(2 + call % 2, 4), randn(4, 4)])
    assert (region.record.captures, region.record.proven, region.record.replays) == (2, 1, CALLS - 3)


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda args: [ops.counter(args[0])], "only-eager"),
        (lambda args: [torch.relu(args[0]), torch.ops.aten.nonzero(args[0])], "dynamic-output"),
    ],
)
def test_what_is_no_region(fn: Function, reason: str) -> None:
    region = region_of(fn, eager=["aten.nonzero"])
    for _ in range(4):
        region([torch.ones(3)])
    assert str(region.record.reason).startswith(reason)
    assert region.record.replays == 0


# -- effects -----------------------------------------------------------------------------------------------------------


def test_mutation_of_intermediates_arguments_and_views_of_them() -> None:
    def fn(args: list[Any]) -> Sequence[Any]:
        x, y = args
        args.clear()
        hidden = torch.relu(x)
        _add_into(hidden, y)
        _add_into(x, hidden)
        _add_into(y[1:], x[:3])
        _add_into(torch.as_strided(x, (2, 2), (4, 1), 5), torch.ones(2, 2))
        return [torch.mm(hidden, y), x, torch.relu(x)]

    assert check(fn, lambda call: [randn(4, 4), randn(4, 4)]).record.state == "replay"


def test_arguments_that_overlap_are_given_as_they_are() -> None:
    def fn(args: list[Any]) -> Sequence[Any]:
        x, y = args
        args.clear()
        _add_into(x, torch.relu(y))
        return [torch.relu(y), torch.relu(x)]

    def make(call: int) -> list[Any]:
        base = randn(28)
        return [base[:12], base[4 * (call % 4) :][:12]]

    assert check(fn, make).record.replays > 0


def test_results_that_are_the_operands_memory() -> None:
    def fn(args: list[Any]) -> Sequence[Any]:
        x, y = args
        args.clear()
        hidden = torch.relu(x)
        same = ops.scaled_(hidden, 2.0)
        part = ops.rows(hidden, 1)
        part.add_(1)
        given = ops.scaled_(y, 0.5)
        given.add_(hidden)
        return [same * 1, torch.relu(part), torch.relu(ops.rows(y, 2))]

    assert check(fn, lambda call: [randn(4, 4), randn(4, 4)]).record.state == "replay"


@pytest.mark.parametrize("itself", [False, True])
def test_a_result_that_is_an_operand_though_its_schema_denies_it(itself: bool) -> None:
    def fn(args: list[Any]) -> Sequence[Any]:
        x, y = args
        args.clear()
        hidden = torch.relu(x)
        same = ops.identity(hidden)
        third = torch.mm(same, y)
        fourth = ops.identity(third)
        return [third, fourth if itself else fourth.t()]

    region = check(fn, lambda call: [randn(4, 4), randn(4, 4)])
    assert region.record.state == ("uncaptured" if itself else "replay"), "one object is returned twice"


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN is not part of this build")
def test_packed_weights_and_a_sum_that_is_written_though_the_schema_denies_it() -> None:
    def fn(args: list[Any]) -> Sequence[Any]:
        x, total = args
        args.clear()
        before = torch.relu(total)
        quantized = (x, 0.1, 0, PACKED, SCALES, ZEROS)
        made = torch.ops.onednn.qlinear_pointwise.binary(
            *quantized, total, None, 1.0, 0, torch.float, 1.0, 0, "sum", 1.0, "none", [], ""
        )
        return [torch.mm(made, before.t()), torch.relu(total)]

    region = check(fn, lambda call: [torch.randint(0, 50, (4, 16), dtype=torch.uint8), randn(4, 16)])
    assert [call.operator for call in region.record.eager] == ["onednn.qlinear_pointwise.binary"]
    assert region.record.state == "replay"


PACKED: Any = None
SCALES, ZEROS = torch.full((16,), 0.02), torch.zeros(16, dtype=torch.int64)
if torch.backends.mkldnn.is_available():
    PACKED = torch.ops.onednn.qlinear_prepack(torch.randint(-20, 20, (16, 16), dtype=torch.int8), [4, 16])


def test_two_operands_that_turn_out_to_be_one_tensor_are_told_of() -> None:
    def fn(args: list[Any]) -> Sequence[Any]:
        (x,) = args
        args.clear()
        hidden = torch.relu(x)
        _add_into(hidden, ops.identity(hidden))
        return [torch.relu(hidden)]

    region = check(fn, lambda call: [randn(4, 4)])
    assert "pygraph_eager.add_into.default is given one tensor where two were captured" in str(region.record.reason)


def test_draws_come_in_program_order() -> None:
    def fn(args: list[Any]) -> Sequence[Any]:
        (x,) = args
        args.clear()
        first = x + torch.rand(4, 4)
        second = ops.noise(first)
        third = second + torch.rand(4, 4)
        return [first, second, ops.noise(third) + torch.randn(4, 4)]

    for options in ({}, {"verify_every": 1}):
        region = check(fn, lambda call: [randn(4, 4)], **options)
        assert (region.record.replays, region.record.refusals) == (CALLS - 2, {})


def test_an_error_leaves_what_was_done_and_the_next_call_is_replayed() -> None:
    def fn(args: list[Any]) -> Sequence[Any]:
        x, total = args
        args.clear()
        total.add_(1)
        hidden = ops.fails(torch.relu(total) * x)
        total.add_(hidden)
        return [torch.relu(hidden)]

    region, total, plain = region_of(fn), torch.zeros(2, 2), torch.zeros(2, 2)
    for sign in (1, 1, 1, -1, 1, -1, -1, 1):
        args, reference = [torch.full((2, 2), float(sign)), total], [torch.full((2, 2), float(sign)), plain]
        for run, given in ((region, args), (fn, reference)):
            with pytest.raises(ValueError, match="negative") if sign < 0 else contextlib.nullcontext():
                run(given)
            assert given == []
        assert torch.equal(total, plain)
    assert (region.record.state, region.record.replays) == ("replay", 3)


def test_other_strides_than_the_fake_kernel_tells_are_copied() -> None:
    def fn(args: list[Any]) -> Sequence[Any]:
        (x,) = args
        args.clear()
        return [torch.mm(ops.odd(torch.relu(x)), x)]

    region = check(fn, lambda call: [randn(3, 3)])
    assert region.record.replays == CALLS - 2


def test_other_sizes_than_the_fake_kernel_tells_end_the_region() -> None:
    def fn(args: list[Any]) -> Sequence[Any]:
        (x,) = args
        args.clear()
        return [torch.relu(ops.resized(torch.relu(x))).sum(0)]

    region = region_of(fn)
    expected = [region([torch.ones(2, 4)])[0].tolist() for _ in range(3)]
    assert (expected, region.record.replays) == ([[4.0] * 4] * 3, 1)
    with pytest.raises(ReplayError, match="another size"):
        region([torch.ones(2, 4)])
    assert region([torch.ones(2, 4)])[0].tolist() == [5.0] * 4, "uncaptured"
    assert region.record.state == "uncaptured"


# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory_lives_as_long_as_uncaptured() -> None:
    """Results, operands and arguments are let go of behind the step that uses them last."""
    alive: list[list[bool]] = []

    def fn(args: list[Any]) -> Sequence[Any]:
        x, y = args
        args.clear()
        first = ops.probe(torch.relu(x))
        del x
        second = torch.relu(ops.probe(torch.mm(first, y)))
        del first
        third = ops.probe(second)
        del second
        return [torch.relu(ops.probe(third))]

    for run in (fn, region_of(fn)):
        for _ in range(4):
            kept: list[StorageWeakRef] = []

            def note(x: torch.Tensor, kept: list[StorageWeakRef] = kept) -> None:
                kept.append(StorageWeakRef(x.untyped_storage()))
                alive[-1].append(kept[0].expired())

            hooks[:] = [note]
            alive.append([])
            first, second = randn(4, 4), randn(4, 4)
            argument = StorageWeakRef(first.untyped_storage())
            hooks.append(lambda x, argument=argument: alive[-1].append(argument.expired()))
            args = [first, second]
            del first
            run(args)
    hooks.clear()
    plain, replayed = alive[0], alive[-1]
    assert plain == [False, False, True, True, True, True, True, True][: len(plain)]
    assert len(replayed) == len(plain)
    assert all(ours or not theirs for ours, theirs in zip(replayed, plain, strict=True)), "no longer than uncaptured"


def test_what_an_operator_keeps_stays_as_it_was() -> None:
    """Its operands have storages of their own, which no later launch of the call, and no later call, uses again."""

    def fn(args: list[Any]) -> Sequence[Any]:
        (x,) = args
        args.clear()
        hidden = torch.mm(x, x)
        for _ in range(3):
            hidden = torch.mm(ops.probe(hidden), x)
        return [torch.relu(hidden)]

    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    hooks[:] = [lambda x: kept.append((x, x.clone()))]
    region = region_of(fn)
    for _ in range(4):
        region([randn(8, 8)])
    assert region.record.replays == 2
    assert len(kept) == 12
    assert all(torch.equal(memory, copy) for memory, copy in kept)


def test_nothing_of_a_call_is_kept() -> None:
    references: list[Any] = []
    hooks[:] = [lambda x: references.append(StorageWeakRef(x.untyped_storage()))]

    def fn(args: list[Any]) -> Sequence[Any]:
        x, y = args
        args.clear()
        return [torch.mm(ops.probe(torch.relu(x)), ops.probe(y))]

    region = region_of(fn)
    for _ in range(4):
        args = [randn(4, 4), randn(4, 4)]
        references.extend(weakref.ref(arg) for arg in args)
        region(args)
        del args
    gc.collect()
    assert all(ref.expired() if isinstance(ref, StorageWeakRef) else ref() is None for ref in references)


def test_a_region_that_is_called_by_its_own_operator_runs_uncaptured_inside() -> None:
    inner: list[list[float]] = []

    def fn(args: list[Any]) -> Sequence[Any]:
        (x,) = args
        args.clear()
        return [torch.relu(ops.probe(torch.relu(x)))]

    region = region_of(fn)
    for call in range(4):
        hooks[:] = []
        expected = float(call + 1)

        def again(x: torch.Tensor) -> None:
            hooks.clear()
            inner.append(region([torch.full((2,), 7.0)])[0].tolist())

        hooks[:] = [again] if call > 1 else []
        assert region([torch.full((2,), float(call))])[0].tolist() == [expected] * 2
    assert inner == [[8.0] * 2] * 2
    assert region.record.replays == 2


def test_a_region_that_is_closed_by_its_own_operator_ends_the_call() -> None:
    region = region_of(lambda args: [torch.relu(ops.probe(torch.relu(args.pop())))])
    for call in range(4):
        hooks[:] = [lambda x: region.close()] if call == 2 else []
        assert region([torch.full((2,), 3.0)])[0].tolist() == [4.0] * 2
    assert region.record.replays == 1


def test_inference_mode() -> None:
    region = region_of(counted)
    for call in range(4):
        with torch.inference_mode(call % 2 == 1):
            x, w = randn(4, 4), randn(4, 4)
            out, hidden = region([x, w])
            assert torch.equal(out, torch.mm(hidden, w))
    assert region.record.replays == 2


# -- the comparison ----------------------------------------------------------------------------------------------------


class Miswired(HostDriver):
    """Gives an eager call another intermediate than the captured one."""

    def instantiate(self, program: Program) -> Executable:
        (call,) = program.calls
        (wrong,) = [slot for slot in program.slots if slot.launch == 0 and slot.word == 2]
        slots = [
            replace(slot, index=wrong.index) if (slot.launch, slot.word) == (call.index, 0) else slot
            for slot in program.slots
        ]
        fresh = tuple(sorted({*program.layout.fresh, wrong.index}))
        changed = replace(program, slots=tuple(slots), layout=replace(program.layout, fresh=fresh))
        with mock.patch("pygraph.runtime.host.driver.verify"):  # which refuses it
            return super().instantiate(with_steps(changed))


def test_an_operator_that_is_given_other_memory_is_noticed_though_its_results_are_those_of_the_other_run() -> None:
    def fn(args: list[Any]) -> Sequence[Any]:
        (x,) = args
        args.clear()
        first, second = torch.mm(x, x), torch.relu(x)
        return [torch.relu(ops.counter(second)), first]

    region = region_of(fn, Miswired())
    for _ in range(3):
        region([randn(4, 4)])
    assert len(seen) == 3
    assert "comparison-failed: replayed: operand 0 of pygraph_eager.counter.default" in str(region.record.reason)


class Disturbed(HostDriver):
    """Another thread draws at the end of each compared replay."""

    def instantiate(self, program: Program) -> Executable:
        made = super().instantiate(program)

        class Drawing:
            close, nbytes, replay, used = made.close, made.nbytes, made.replay, 0

            @staticmethod
            def replay_answered(args: list[Any], answer: Any) -> Sequence[Any] | None:
                outputs = made.replay_answered(args, answer)
                thread = threading.Thread(target=lambda: torch.rand(3))
                thread.start()
                thread.join()
                return outputs

        return cast("Executable", Drawing())


@pytest.mark.parametrize(("draws", "captured"), [(False, True), (True, False)])
def test_draws_of_other_threads_do_not_matter_where_operators_alone_draw(draws: bool, captured: bool) -> None:
    def fn(args: list[Any]) -> Sequence[Any]:
        (x,) = args
        args.clear()
        return [torch.relu(ops.noise(torch.mm(x, x))), torch.rand(4, 4) if draws else x]

    region = region_of(fn, Disturbed(), verify_every=1)
    for _ in range(CALLS):
        region([randn(4, 4)])
    assert (region.record.replays > 0, "random-state" in region.record.refusals) == (captured, not captured)


def test_a_program_that_does_not_repeat_itself_is_compared_within_a_tolerance() -> None:
    def fn(args: list[Any]) -> Sequence[Any]:
        x, where = args
        args.clear()
        total = torch.zeros(4, 4).index_add_(0, where, x)
        return [torch.relu(ops.counter(total)), total]

    region = check(fn, lambda call: [randn(9, 4), torch.arange(9) % 4])
    assert region.record.replays == CALLS - 2


@pytest.fixture
def unset() -> Iterator[None]:
    """Memory that nobody set holds NaN where a program allocates it; a replay's holds what was there."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _fill_all(hidden: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    _fill(out := torch.empty_like(hidden), hidden)
    return out


def _fill_by_out(hidden: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cumsum(hidden, 0, out=torch.empty_like(hidden))


def _fill_halves(hidden: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty(2, *hidden.shape)
    _fill(out[1], hidden)
    _fill(out[0], torch.relu(y))
    return out.sum(0)


def _fill_part(hidden: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty(2, *hidden.shape)
    _fill(out[:1], hidden[None])
    out[1].copy_(y)
    return out.sum(0)


def _fill(out: torch.Tensor, x: torch.Tensor) -> None:
    ops.fill(out, x)


@pytest.mark.parametrize("fill", [_fill_all, _fill_by_out, _fill_halves, _fill_part])
def test_memory_that_an_operator_is_given_to_fill_may_hold_anything(
    fill: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], unset: None
) -> None:
    def fn(args: list[Any]) -> Sequence[Any]:
        x, y = args
        args.clear()
        filled = fill(torch.mm(x, y), y)
        return [torch.relu(filled), filled]

    region = check(fn, lambda call: [randn(4, 4), randn(4, 4)], eager=["aten.cumsum"])
    assert (region.record.replays, region.record.refusals) == (CALLS - 2, {})


def test_memory_that_an_operator_reads_is_compared_though_nobody_set_it(unset: None) -> None:
    def fn(args: list[Any]) -> Sequence[Any]:
        (x,) = args
        args.clear()
        return [torch.relu(ops.counter(torch.empty(4, 4))), torch.relu(x)]

    region = region_of(fn)
    for _ in range(3):
        region([randn(4, 4)])
    assert str(region.record.reason).startswith("comparison-failed")


# -- collectives -------------------------------------------------------------------------------------------------------


@pytest.fixture
def group(tmp_path: Path) -> Iterator[str]:
    """The name of a group of this process alone."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        yield str(distributed.group.WORLD.group_name)  # type: ignore[union-attr]
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def waits(region: Callable[..., Any], args: list[Any]) -> int:
    """How many waits a call of ``region`` calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        region(args)
    return sum(event.name == "_c10d_functional::wait_tensor" for event in profile.events())


def summed(group: str) -> Function:
    """A collective in place, which is waited for at once."""
    functional = torch.ops._c10d_functional

    def fn(args: list[Any]) -> Sequence[Any]:
        (x,) = args
        args.clear()
        return [torch.relu(functional.wait_tensor(functional.all_reduce_(torch.relu(x), "sum", group)))]

    return fn


def test_a_collective_is_sent_and_waited_for_at_once(group: str) -> None:
    region = region_of(summed(group))
    for _ in range(2):
        region([randn(4, 4)])
    assert [waits(region, [randn(4, 4)]) for _ in range(2, CALLS)] == [0] * (CALLS - 2)
    assert region.record.replays == CALLS - 2


def test_a_collective_draws_nothing_and_an_operator_of_anybodys_may(group: str) -> None:
    collective = HostDriver().capture(summed(group), [randn(4, 4)]).launches
    assert [launch.name for launch in collective if launch.eager is not None and launch.random] == []
    other = HostDriver().capture(lambda args: [ops.counter(args[0])], [randn(4, 4)]).launches
    assert [launch.name for launch in other if launch.random] == ["pygraph_eager.counter.default"]


def test_a_wait_is_called_where_work_lies_between(group: str) -> None:
    functional = torch.ops._c10d_functional

    def fn(args: list[Any]) -> Sequence[Any]:
        (x,) = args
        args.clear()
        flying = functional.all_reduce_(torch.relu(x), "sum", group)
        other = torch.mm(x, x)
        return [torch.relu(functional.wait_tensor(flying)) + other]

    region = region_of(fn)
    for _ in range(3):
        region([randn(4, 4)])
    assert waits(region, [randn(4, 4)]) == 1


def test_a_wait_is_for_all_that_fills_a_tensor(group: str) -> None:
    """Also for what was sent before, inside of the region or outside."""
    functional, left = torch.ops._c10d_functional, torch._C._distributed_c10d._get_work_registry_size

    def fn(args: list[Any]) -> Sequence[Any]:
        (x,) = args
        args.clear()
        y = torch.relu(x)
        functional.all_reduce_(y, "sum", group)
        y = functional.wait_tensor(functional.all_reduce_(y, "sum", group))
        return [torch.relu(y), torch.relu(functional.wait_tensor(functional.all_reduce_(x, "sum", group)))]

    region = region_of(fn)
    for _ in range(3):
        region([randn(4, 4)])
    never = functional.all_reduce(randn(4, 4), "sum", group)
    x = randn(4, 4)
    functional.all_reduce_(x, "sum", group)
    assert waits(region, [x]) == 0
    assert region.record.replays == 2
    assert left() == 1
    functional.wait_tensor(never)


def test_collectives_are_sent_once_where_each_call_is_compared(group: str) -> None:
    world: Any = distributed.group.WORLD
    region = region_of(summed(group), verify_every=1)
    for _ in range(CALLS):
        before = world._get_sequence_number_for_group()
        x = randn(4, 4)
        assert torch.equal(region([x])[0], torch.relu(x))
        assert world._get_sequence_number_for_group() == before + 1
    assert region.record.replays == CALLS - 2


def test_a_group_is_looked_for_by_its_name_at_each_call(group: str, tmp_path: Path) -> None:
    """One that was destroyed raises as uncaptured; another one of its name is used."""
    fn = summed(group)
    region = region_of(fn)
    for _ in range(3):
        region([randn(4, 4)])
    distributed.destroy_process_group()
    said = []
    for each in (fn, region):
        with pytest.raises(RuntimeError) as error:
            each([randn(4, 4)])
        said.append(str(error.value).partition("\n")[0])
    assert said[0] == said[1]
    assert group in said[0]
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'again'}", rank=0, world_size=1)
    assert distributed.group.WORLD.group_name == group  # type: ignore[union-attr]
    assert waits(region, [randn(4, 4)]) == 0


def test_a_kernel_of_somebody_else_is_called(group: str) -> None:
    """A library may replace what an operator does on a device."""
    with torch.library._scoped_library("_c10d_functional", "IMPL") as library:

        def theirs(x: torch.Tensor, *_: Any) -> torch.Tensor:
            seen.append("theirs")
            return x.add_(1)

        library.impl("all_reduce_", theirs, "CPU")
        region = region_of(summed(group))
        for _ in range(CALLS):
            x = randn(4, 4)
            assert torch.equal(region([x])[0], torch.relu(x) + 1)
        assert seen == ["theirs"] * CALLS
        assert region.record.replays == CALLS - 2


def test_what_is_under_way_at_either_end_of_a_region_is_not_compared(group: str) -> None:
    """A region returns what a collective still fills, and another one waits for it."""
    functional = torch.ops._c10d_functional

    def issue(args: list[Any]) -> Sequence[Any]:
        (x,) = args
        args.clear()
        return [functional.all_reduce(torch.relu(x), "sum", group), torch.mm(x, x)]

    def wait(args: list[Any]) -> Sequence[Any]:
        flying, x = args
        args.clear()
        other = torch.mm(x, x)
        return [torch.relu(functional.wait_tensor(flying)) + other]

    regions = [region_of(fn) for fn in (issue, wait)]
    for _ in range(CALLS):
        x = randn(4, 4)
        flying, product = regions[0]([x])
        (out,) = regions[1]([flying, x])
        assert torch.equal(product, torch.mm(x, x))
        assert torch.equal(out, torch.relu(x) + torch.mm(x, x))
    assert [region.record.replays for region in regions] == [CALLS - 2] * 2
    assert [call.operator for region in regions for call in region.record.eager] == [
        "_c10d_functional.all_reduce.default",
        "_c10d_functional.wait_tensor.default",
    ]


@pytest.mark.parametrize("verify", [False, True], ids=["", "always compared"])
@pytest.mark.parametrize(("name", "replays"), [("grown", CALLS - 2), ("sparse", 0), ("wider", 0)])
def test_operators_that_do_not_keep_their_word(name: str, replays: int, verify: bool) -> None:
    """One gives what it is given other memory; two return something else than their fake kernels tell."""

    def fn(args: list[Any]) -> list[torch.Tensor]:
        x, w = args
        args.clear()
        hidden = torch.mm(x, w)
        made = getattr(ops, name)(hidden)
        return [torch.mm(torch.relu(hidden), w), torch.relu(hidden), made]

    region = region_of(fn, verify_every=int(verify))
    for call in range(CALLS):
        torch.manual_seed(call)
        given = [torch.randn(3, 3), torch.randn(3, 3)]
        pairs = zip(region([each.clone() for each in given]), fn(given), strict=True)
        assert all(torch.equal(mine.to_dense(), right.to_dense()) for mine, right in pairs)
    assert region.record.replays == replays
