"""``pygraph.prepare``: sizes are captured before real calls come."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph
from pygraph import compat
from pygraph.errors import CaptureError, OptionError
from pygraph.runtime.asked import asking
from pygraph.runtime.host.driver import HostDriver
from tests import forked, small
from tests.runtime.fake import make
from tests.small import UNFUSED, replays

pytestmark = pytest.mark.usefixtures("fresh")


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return small.compiled(function, **UNFUSED, **options)


def scale(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).relu()


def rows(count: int, width: int = 16) -> torch.Tensor:
    return torch.randn(count, width)


class Called:
    """A compiled function, and what it is called with."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self.function = compiled(function, **options)
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((*args, *kwargs.values()))
        return self.function(*args, **kwargs)

    def sizes(self) -> list[int]:
        """The first dimension of the first argument of each call."""
        return [len(args[0]) for args in self.calls]


def assert_replayed(function: Callable[..., Any], plain: Callable[..., Any], *calls: tuple[Any, ...]) -> None:
    """Each call is a replay, and right."""
    before = pygraph.counters()
    with torch.no_grad():
        for args in calls:
            torch.testing.assert_close(function(*args), plain(*args))
    after = pygraph.counters()
    assert {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)} == {
        "replays": len(calls)
    }


def captures() -> int:
    return pygraph.counters().get("captures", 0)


# -- which sizes ---------------------------------------------------------------------------------------------------


def test_every_size_is_replayed_at_its_first_call() -> None:
    """The largest comes first; its program of its own, which Dynamo compiles for the first size, is no capture."""
    ours, x, w = Called(scale), rows(8), rows(16)
    with torch.no_grad():
        prepared = pygraph.prepare(ours, {(0, 0): [1, 2, 4, 8, 32]}, args=(x, w))
    assert prepared.captured == ((32,), (8,), (4,), (2,), (1,))
    assert prepared.refused == {}
    assert captures() == 5
    compiling, capturing, again = [32, 8, 4], [32, 32, 8, 4, 2, 1, 1], [32, 8, 4, 2, 1]
    assert ours.sizes() == compiling + capturing + again
    assert_replayed(ours, scale, *((rows(n), w) for n in (1, 4, 32, 2, 8)))


def test_captures_that_are_asked_for_need_neither_pay_nor_wait() -> None:
    ours, w = compiled(scale, ledger=True, capture_after=5), rows(16)
    with torch.no_grad():
        prepared = pygraph.prepare(ours, {(0, 0): range(2, 12)}, args=(rows(2), w))
        assert len(prepared.captured) == captures() == 10
        assert_replayed(ours, scale, *((rows(n), w) for n in range(2, 12)))
        for _ in range(3):
            ours(rows(20), w)  # other calls live as before
    assert captures() == 10


def test_all_combinations_of_places_keywords_and_numbers() -> None:
    def function(x: torch.Tensor, start: int, *, mask: torch.Tensor) -> torch.Tensor:
        return (x * mask)[:, start:].cumsum(1)

    ours = Called(function, ledger=False)
    sizes = {((0, 0), ("mask", -2)): [2, 4], 1: [3, 5, 6]}
    with torch.no_grad():
        prepared = pygraph.prepare(ours, sizes, args=(rows(3), 2), kwargs={"mask": rows(3)})
    assert prepared.captured == ((4, 6), (4, 5), (4, 3), (2, 6), (2, 5), (2, 3))
    assert {(len(x), start, len(mask)) for x, start, mask in ours.calls} == {
        (n, s, n) for n in (2, 4) for s in (3, 5, 6)
    }
    before = replays()
    with torch.no_grad():
        for count, start in ((2, 5), (4, 3), (4, 6), (2, 3)):
            x, mask = rows(count), rows(count)
            torch.testing.assert_close(ours(x, start, mask=mask), function(x, start, mask=mask))
    assert replays() == before + 4


def test_example_arguments_of_each_size() -> None:
    def function(given: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        return (given["a"][0] @ given["a"][1]).relu()

    ours = compiled(function, ledger=False)
    examples = [({"a": [rows(n, m), rows(m)]},) for n, m in ((2, 4), (8, 16), (3, 16))]
    with torch.no_grad():
        prepared = pygraph.prepare(ours, iter(examples))
    assert prepared.captured == (((8, 16), (16, 16)), ((3, 16), (16, 16)), ((2, 4), (4, 16)))
    assert_replayed(ours, function, *examples)


def test_a_size_that_was_called_before_is_captured_too() -> None:
    ours, w = compiled(scale, ledger=False), rows(16)
    with torch.no_grad():
        for n in (4, 4, 4, 6):
            ours(rows(n), w)
        assert pygraph.prepare(ours, {(0, 0): [4, 6, 8]}, args=(rows(4), w)).captured == ((8,), (6,), (4,))
        assert_replayed(ours, scale, *((rows(n), w) for n in (4, 8, 6)))


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({}, None),
        ({(0, 2): [1]}, "argument 0 has 2 dimensions, not 2"),
        ({(3, 0): [1]}, "argument 3 is not given"),
        ({(2, 0): [1]}, "argument 2 is a int"),
        ({0: [1]}, "argument 0 is a Tensor"),
        ({("mask", 0): [1]}, "argument 'mask' is not given"),
        ({(0, 0): [-1]}, "whole numbers, not -1"),
        ({(0, 0): [1.5]}, "whole numbers, not 1.5"),
        ({(0, 0): []}, "no sizes"),
        ([(1,)], "leave one of both out"),
    ],
)
def test_sizes_that_do_not_fit_the_arguments_are_errors(sizes: Any, told: str | None) -> None:
    args = (rows(2), rows(16), 3)
    if told is None:  # the arguments as they are
        assert pygraph.prepare(compiled(lambda x, w, n: x @ w * n), sizes, args=args).captured == ((),)
        return
    with pytest.raises(OptionError, match=told):
        pygraph.prepare(scale, sizes, args=args)


def test_each_example_is_a_tuple() -> None:
    with pytest.raises(OptionError, match="each example is a tuple of arguments, not Tensor"):
        pygraph.prepare(scale, [rows(2)])  # type: ignore[list-item]


@pytest.mark.parametrize("fails", ["capture", "comparison"])
def test_a_size_that_never_ran_may_fail_to_be_captured_once(fails: str) -> None:
    """Its first run may load what the capture needs; nothing is made of the failure. The second one counts."""
    region, driver = make()

    def raises(capture: Any) -> None:
        raise CaptureError("host-read")

    def call(*sizes: int) -> None:
        for size in sizes:
            x = rows(size)
            assert torch.equal(region([x.clone()])[0], x * 2)

    def fail() -> None:
        if fails == "capture":
            driver.edits = [raises]
        else:
            driver.kernel = lambda args: [args.pop() * 3]

    with asking():
        call(4, 4, 8)
        assert region.record.captures == 2, "the second size is captured at its first call"
        fail()
        call(16)
        assert (region.record.captures, region.record.refusals) == (2, {})
        driver.kernel = None
        call(16, 16)
        assert (region.record.captures, region.record.replays) == (3, 1)
        fail()
        call(32)
        fail()
        call(32)
        assert list(region.record.refusals) == ["host-read" if fails == "capture" else "comparison-failed"]


_failed: list[int] = []


@torch.library.custom_op("quantized::pygraphprepare", mutates_args=())
def needs_a_run(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@needs_a_run.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    """Raises where 8 rows are captured that never ran."""
    if compat.TracingContext.try_get() is None and len(x) == 8 and not _failed:
        _failed.append(8)
        raise RuntimeError("not yet")
    return torch.empty_like(x)


def test_an_operator_that_needs_a_run_first_is_captured_all_the_same() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return needs_a_run(x).relu()

    ours = compiled(function)
    with torch.no_grad():
        sizes = {(0, 0): [16, 12, 10, 8]}
        assert pygraph.prepare(ours, sizes, args=(rows(2),)).captured == ((16,), (12,), (10,), (8,))
        assert_replayed(ours, function, *((rows(n),) for n in (8, 10, 12, 16)))
    assert _failed
    regions = [region.record for report in pygraph.reports() for region in report.regions if region.record]
    assert [record.eager_since for record in regions if record.captures] == [{}]


def test_the_ledger_pays_for_no_capture_that_is_asked_for() -> None:
    region, _ = make(ledger=True)
    assert region.record.ledger is not None
    with asking():
        for size in range(1, 9):
            region([rows(size)])
            region([rows(size)])
    assert region.record.captures == 8
    assert region.record.ledger.attempts == 0
    for size in (20, 20):
        region([rows(size)])
    assert (region.record.captures, region.record.ledger.attempts) == (9, 1)


# -- copies --------------------------------------------------------------------------------------------------------


def test_what_a_call_changes_is_a_copy() -> None:
    def function(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        count += 1
        return x.mul_(2).sum(0)

    ours, x, count = Called(function), rows(4), torch.zeros(2)
    before = x.clone()
    with torch.no_grad():
        assert len(pygraph.prepare(ours, {(0, 0): [4, 9]}, args=(x, count)).captured) == 2
    assert torch.equal(x, before)
    assert torch.equal(count, torch.zeros(2))
    assert max(int(args[1].max()) for args in ours.calls) == 1, "each call begins with the example"


def test_copies_repeat_values_and_keep_layouts() -> None:
    seen: list[tuple[torch.Tensor, ...]] = []

    def function(*args: torch.Tensor) -> None:
        seen.append(args)

    numbers = torch.arange(3).requires_grad_(False)
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    slice_of = torch.randn(4, 32)[:, :16]
    expanded = torch.randn(1, 16).expand(4, 16)
    column = torch.randn(16, 1).t()
    leaf = torch.randn(4, requires_grad=True)
    args = (numbers, image, slice_of, expanded, leaf, leaf, column)
    sizes = {((0, 0), (1, 0), (2, 0), (3, 0), (6, 0)): [7]}
    pygraph.prepare(function, sizes, args=args)
    numbers, image, slice_of, expanded, one, other, column = seen[0]
    assert numbers.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert image.shape == (7, 3, 4, 4)
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(image[:4], torch.cat([args[1], args[1]]))
    assert (slice_of.shape, slice_of.stride()) == ((7, 16), (32, 1))
    assert torch.equal(slice_of[4:], args[2][:3])
    assert (expanded.shape, expanded.stride()) == ((7, 16), (0, 1))
    assert torch.equal(expanded[:4], args[3])
    assert (column.shape, column.stride()) == ((7, 16), (16, 1)), "rows that lie apart"
    assert torch.equal(column, args[6].expand(7, 16))
    assert one is other, "passed twice"
    assert one.requires_grad
    assert one is not leaf
    assert torch.equal(one, leaf)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_calls_are_made_in_the_mode_of_the_caller(mode: Any) -> None:
    ours, w = compiled(scale), rows(16).requires_grad_(True)
    with mode():
        assert len(pygraph.prepare(ours, {(0, 0): [2, 3]}, args=(rows(2), w)).captured) == 2
        future = pygraph.prepare(ours, {(0, 0): [4, 5]}, args=(rows(2), w), background=True)
        assert len(future.result().captured) == 2
        before = pygraph.counters()
        for n in (2, 3, 4, 5):
            torch.testing.assert_close(ours(rows(n), w).requires_grad, torch.is_grad_enabled())
        after = pygraph.counters()
    assert {name: after[name] - before[name] for name in after} == {"captures": 0, "replays": 4, "uncaptured": 0}
    assert w.grad is None


def test_random_generators_are_put_back() -> None:
    ours = compiled(lambda x: torch.nn.functional.dropout(x, 0.5))
    state = torch.get_rng_state()
    with torch.no_grad():
        assert len(pygraph.prepare(ours, {(0, 0): [2, 3]}, args=(torch.ones(2, 16),)).captured) == 2
        assert torch.equal(torch.get_rng_state(), state)
        ours(torch.ones(2, 16))
    assert not torch.equal(torch.get_rng_state(), state)


# -- what is not captured ------------------------------------------------------------------------------------------


def test_what_the_model_raises_is_told_of_that_size() -> None:
    ours, w = compiled(scale), rows(16)

    def called(x: torch.Tensor, w: torch.Tensor) -> Any:
        if len(x) == 5:
            raise ValueError("no five")
        return ours(x, w)

    with torch.no_grad():
        prepared = pygraph.prepare(called, {(0, 0): [3, 5, 7]}, args=(rows(3), w))
    assert prepared.captured == ((7,), (3,))
    assert prepared.refused == {(5,): "ValueError: no five"}
    assert str(prepared).splitlines()[1] == "not captured: 5: ValueError: no five"
    assert str(prepared).startswith("captured 2 of 3 sizes in ")
    assert str(prepared).splitlines()[0].endswith(" s: 7, 3")


def test_a_size_that_cannot_be_captured_has_its_reason() -> None:
    ours = compiled(lambda x: x.to_sparse().to_dense() if len(x) < 0 else torch.nonzero(x))
    with torch.no_grad():
        prepared = pygraph.prepare(ours, {(0, 0): [2, 3]}, args=(rows(2),))
        plain = pygraph.prepare(scale, {(0, 0): [2]}, args=(rows(2), rows(16)))
    assert prepared.captured == ()
    assert list(prepared.refused) == [(3,), (2,)]
    assert all(prepared.refused.values())
    assert plain.refused == {(2,): "no compiled region ran: pygraph.reports() says what was compiled"}


def test_captures_that_went_for_others_are_told() -> None:
    w = rows(16)
    with torch.no_grad():
        alone = pygraph.prepare(compiled(lambda x: (x + 1).relu()), [(rows(2),)])
        ours = compiled(scale, memory_limit=4 * alone.after.captures)
        prepared = pygraph.prepare(ours, {(0, 0): range(2, 30)}, args=(rows(2), w))
    assert 0 < prepared.after.captures <= 4 * alone.after.captures
    assert set(prepared.refused.values()) == {"its capture was freed for others"}
    assert prepared.captured[-1] == (2,)
    assert str(prepared).splitlines()[-1].startswith("memory: captures ")


def test_training_mode_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(16, 16)
    pygraph.prepare(torch.compile(model, backend="pygraph"), {(0, 0): [2]}, args=(rows(2),))
    assert "training mode" in caplog.text
    assert all(parameter.grad is None for parameter in model.parameters())


def test_progress_is_told(caplog: pytest.LogCaptureFixture) -> None:
    ours = compiled(scale)
    with torch.no_grad(), caplog.at_level(logging.INFO, "pygraph.progress"):
        pygraph.prepare(ours, {(0, 0): [2, 3]}, args=(rows(2), rows(16)))
        assert "preparing: capturing 2 of 2: 2" in caplog.messages
        caplog.clear()
        pygraph.prepare(ours, {(0, 0): [2, 3]}, args=(rows(2), rows(16)), progress=False)
        assert not caplog.messages


# -- other threads, interrupts -------------------------------------------------------------------------------------


def test_calls_are_answered_while_sizes_are_prepared_in_the_background() -> None:
    """From within a capture, other threads are called."""
    ours, w = compiled(scale), rows(16)
    amid, answered = threading.Event(), threading.Event()
    threads = []

    def wait(event: pygraph.Event) -> None:
        if event.kind == "captured":
            threads.append(threading.current_thread().name)
            amid.set()
            assert answered.wait(60)

    end = pygraph.on_event(wait)
    try:
        with torch.no_grad():
            future = pygraph.prepare(ours, {(0, 0): [2, 3, 4]}, args=(rows(2), w), background=True)
            assert amid.wait(60)
            for n in (2, 3, 5, 2, 3, 5):
                x = rows(n)
                torch.testing.assert_close(ours(x, w), scale(x, w))
            assert replays() == 0
            assert not future.done()
    finally:
        answered.set()
        end()
    assert future.result(60).captured == ((4,), (3,), (2,))
    assert set(threads) == {"pygraph-prepare"}
    assert_replayed(ours, scale, *((rows(n), w) for n in (2, 3, 4)))


def test_two_preparations_take_turns() -> None:
    """One waits while the other captures."""
    ours, w = compiled(scale), rows(16)
    amid, ended = threading.Event(), threading.Event()

    def wait(event: pygraph.Event) -> None:
        if not amid.is_set():
            amid.set()
            assert not ended.wait(0.5), "the other one has not waited"

    end = pygraph.on_event(wait)
    with torch.no_grad():
        future = pygraph.prepare(ours, {(0, 0): [2, 3, 4]}, args=(rows(2), w), background=True)
        assert amid.wait(60)
        assert pygraph.prepare(ours, {(0, 0): [6, 7]}, args=(rows(2), w)).captured == ((7,), (6,))
    ended.set()
    end()
    assert future.result(60).captured == ((4,), (3,), (2,))


def test_a_preparation_in_the_background_is_cancelled_between_calls() -> None:
    ours, begun, go = compiled(scale), threading.Event(), threading.Event()
    sizes = []

    def called(x: torch.Tensor, w: torch.Tensor) -> Any:
        sizes.append(len(x))
        begun.set()
        assert go.wait(60)
        return ours(x, w)

    future = pygraph.prepare(called, {(0, 0): [2, 3, 4]}, args=(rows(2), rows(16)), background=True)
    assert begun.wait(60)
    assert future.cancel()
    go.set()
    for thread in threading.enumerate():
        if thread.name == "pygraph-prepare":
            thread.join(60)
    assert sizes == [4]


ENDS = """
import time
import torch
import pygraph

future = pygraph.prepare(lambda x: time.sleep(0.1), {(0, 0): range(1, 3000)}, args=(torch.ones(1),), background=True)
time.sleep(0.3)
print(future.done())
"""


def test_a_process_that_ends_ends_what_is_prepared_in_the_background() -> None:
    done = forked.run(ENDS, seconds=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


@pytest.mark.parametrize("number", range(1, 8))
def test_an_interrupt_leaves_all_as_it_was(number: int) -> None:
    """At each call in turn. What is captured by then stays, and later calls have to pay again."""
    ours, w = compiled(scale, ledger=False), rows(16)
    calls = 0

    def called(x: torch.Tensor, w: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        outputs = ours(x, w)
        if calls == number:
            signal.raise_signal(signal.SIGINT)
        return outputs

    state, handler = torch.get_rng_state(), signal.getsignal(signal.SIGINT)
    args = rows(2), w
    torch.set_rng_state(state)
    with torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            pygraph.prepare(called, {(0, 0): [2, 3, 4]}, args=args)
        assert calls == number
        assert torch.equal(torch.get_rng_state(), state)
        assert signal.getsignal(signal.SIGINT) is handler
        for n in (9, 9, 9, 4, 4, 4):
            x = rows(n)
            torch.testing.assert_close(ours(x, w), scale(x, w))
        prepared = pygraph.prepare(ours, {(0, 0): [2, 3, 4]}, args=args)
        assert len(prepared.captured) == 3
        assert_replayed(ours, scale, *((rows(n), w) for n in (2, 3, 4, 9)))


# -- a forecast of memory ------------------------------------------------------------------------------------------


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(((q @ k.mT) / 4).softmax(-1) @ v)


def layers(*parts: torch.nn.Module) -> Callable[[], torch.nn.Module]:
    return lambda: torch.nn.Sequential(*parts)


FORECAST: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[int], torch.Tensor], int]] = {
    "linear": (layers(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16)), rows, 0),
    "deep": (layers(*(torch.nn.Linear(16, 16) for _ in range(6))), rows, 0),
    "wide": (layers(torch.nn.Linear(16, 256), torch.nn.Tanh(), torch.nn.Linear(256, 4)), rows, 0),
    "norm": (layers(torch.nn.LayerNorm(16), torch.nn.Linear(16, 8), torch.nn.Softmax(-1)), rows, 0),
    "attention": (Attention, lambda n: rows(n), 0),
    "batched attention": (Attention, lambda n: torch.randn(n, 6, 16), 0),
    "long attention": (Attention, lambda n: torch.randn(2, n, 16), 1),
    "convolution": (
        layers(torch.nn.Conv1d(4, 8, 3), torch.nn.ReLU(), torch.nn.Conv1d(8, 4, 3)),
        lambda n: torch.randn(n, 4, 12),
        0,
    ),
    "pooled": (
        layers(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Conv2d(8, 4, 3)),
        lambda n: torch.randn(n, 3, 14, 14),
        0,
    ),
    "gated": (layers(torch.nn.Linear(16, 32), torch.nn.GLU(), torch.nn.Linear(16, 1)), rows, 0),
}


@pytest.mark.parametrize("name", FORECAST)
def test_memory_is_told_before_it_is_taken(name: str) -> None:
    make_model, inputs, dim = FORECAST[name]
    step = pygraph.graph(model := make_model().eval(), held=model)
    with torch.no_grad():
        few = pygraph.prepare(step, {(0, dim): [4, 20, 64]}, args=(inputs(64),))
        assert set(few.captured) == {(4,), (20,), (64,)}
        others = (6, 12, 33, 50, 90)
        told = {size: few.forecast(size) for size in others}
        then = pygraph.prepare(step, {(0, dim): others}, args=(inputs(64),))
    for size in others:
        taken = then.memory[size,]
        assert told[size].instances == pytest.approx(taken.instances, rel=0.1)
        assert told[size].workspace == pytest.approx(taken.workspace, rel=0.1)
        assert taken.workspace > 0


def test_batch_and_length_tell_of_their_product() -> None:
    step = pygraph.graph(model := Attention().eval(), held=model)
    sizes, x = {(0, 0): [2, 4, 8], (0, 1): [4, 12, 40]}, torch.randn(8, 40, 16)
    with torch.no_grad():
        few = pygraph.prepare(step, sizes, args=(x,))
        then = pygraph.prepare(step, {(0, 0): [3, 6], (0, 1): [20, 64]}, args=(x,))
    for size, taken in then.memory.items():
        assert few.forecast(*size).workspace == pytest.approx(taken.workspace, rel=0.1)
    assert few.forecast(4, 12) is few.memory[4, 12]


def test_each_size_is_captured_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that would run branches side by side, real calls decide whether another one is tried."""
    monkeypatch.setattr(HostDriver, "parallel", True)

    def branches(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).relu() * (x @ w.mT).sigmoid()

    function = pygraph.graph(branches, options={"order": "measured"})
    prepared = pygraph.prepare(function, {(0, 0): (2, 4, 6)}, args=(rows(2), torch.randn(16, 16)), progress=False)
    (region,) = function.record.regions
    assert region.captures == 3
    later = pygraph.prepare(function, {(0, 0): (5,)}, args=(rows(2), torch.randn(16, 16)), progress=False)
    assert later.memory[5,].instances == prepared.forecast(5).instances
    before = region.held_bytes
    for _ in range(2):
        function(rows(4), torch.randn(16, 16))
    assert region.held_bytes > before, "a real call has the other order captured, too"


def test_a_size_unlike_all_is_not_told() -> None:
    step = compiled(scale)
    with torch.no_grad():
        prepared = pygraph.prepare(step, {(0, 0): [4, 8], (1, 1): [16]}, args=(rows(8), rows(16)))
    for size in ((6, 17), (6,), ()):
        with pytest.raises(OptionError, match="no captured sizes differ"):
            prepared.forecast(*size)
