"""Programs that went wrong once: each says in its name what must hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor import config

import pygraph
from pygraph.program.order import Order

pytestmark = pytest.mark.usefixtures("fresh")

CALLS = 6
EVERYTHING = {"passes": "legality,placement,partitioning,indirection"}

_kept: list[tuple[torch.Tensor, torch.Tensor]] = []
"""What ``keep`` was given, and copies of it."""

_library = torch.library.Library("pygraph_regressions", "DEF")
_library.define("draw_outside(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_library.define("keep(Tensor x) -> Tensor")
_library.define("refuse(Tensor x) -> Tensor")
_library.impl("draw_outside", lambda x: torch.rand_like(x), "CPU")
_library.impl("draw_outside", lambda x: torch.empty_like(x), "Meta")


def _keep(x: torch.Tensor) -> torch.Tensor:
    _kept.append((x, x.clone()))
    return x * 2


def _refuse(x: torch.Tensor) -> torch.Tensor:
    if x.sum() < 0:
        raise ValueError("negative")
    return x * 2


_library.impl("refuse", _refuse, "CPU")
_library.impl("refuse", lambda x: torch.empty_like(x), "Meta")
_library.impl("keep", _keep, "CPU")
_library.impl("keep", lambda x: torch.empty_like(x), "Meta")
ops: Any = torch.ops.pygraph_regressions


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="pygraph", options={**EVERYTHING, **options})


@pytest.mark.parametrize("fallback", [False, True])
def test_draws_keep_their_order_when_some_of_them_cannot_be_captured(fallback: bool) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = torch.multinomial(x + 1, 4)
        return first, ops.draw_outside(x), torch.multinomial(x + 2, 3), ops.draw_outside(x + 2), torch.randperm(5)

    ours = compiled(f, inductor={"fallback_random": fallback})
    for seed in range(CALLS):
        x = torch.zeros(4)
        torch.manual_seed(seed)
        expected = f(x)
        torch.manual_seed(seed)
        for mine, theirs in zip(ours(x), expected, strict=True):
            assert torch.equal(mine, theirs)
    assert pygraph.counters().get("replays", 0) > 0


@pytest.mark.parametrize("order", ["program", "dependences"])
def test_what_inductor_draws_by_calling_operators_is_drawn_in_order(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros, with which it is compared, show nothing of what is drawn."""

    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = torch.nn.functional.dropout(x, 0.4) * y
        apart = y.sin().clone().bernoulli_(0.5)
        return first, apart, torch.nn.functional.dropout(x, 0.5) * y, torch.rand_like(y) * y

    def last_first(self: Order, begin: int, end: int) -> list[int]:
        left, found = set(range(begin, end)), list[int]()
        while left:
            found.append(max(launch for launch in left if not left.intersection(self.edges[launch])))
            left.remove(found[-1])
        return found

    def results(function: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        found: list[torch.Tensor] = []
        for call in range(CALLS):
            value = float(call > 1)
            found += [*function(torch.full((8, 8), value), torch.full((8, 8), value)), torch.get_rng_state()]
        return found

    monkeypatch.setattr(Order, "sequence", last_first)
    with config.patch(fallback_by_default=True, force_disable_caches=True), torch.no_grad():
        expected = results(torch.compile(f))
        torch._dynamo.reset()
        apart = f"legality{{forbid=[aten.bernoulli.p,aten.bernoulli.default]}},{EVERYTHING['passes'].partition(',')[2]}"
        found = results(compiled(f, order=order, passes=apart))
    assert all(map(torch.equal, found, expected))
    assert pygraph.counters()["replays"] >= CALLS - 2


def test_a_graph_without_operators_is_no_failure() -> None:
    gm = torch.fx.symbolic_trace(lambda x: (x,))
    from pygraph.backend import pygraph as backend

    ours = backend(gm, [torch.ones(2)], options={**EVERYTHING, "strict": True})
    x = torch.randn(2)
    (out,) = ours(x)
    assert torch.equal(out, x)
    assert [report.error for report in pygraph.reports()] == [None] * len(pygraph.reports())


@pytest.mark.parametrize("intermediate", [False, True])
def test_what_an_operator_keeps_outlives_the_replay(intermediate: bool) -> None:
    """No later launch of the call, and no later call, uses the memory again."""

    def f(x: torch.Tensor, keep: Callable[..., torch.Tensor]) -> torch.Tensor:
        hidden = torch.relu(x) if intermediate else x
        for _ in range(3):
            hidden = keep(hidden) @ x.t()
        return torch.relu(hidden)

    ours = compiled(lambda x: f(x, ops.keep), inductor={"allow_buffer_reuse": False})
    _kept.clear()
    for i in range(CALLS):
        x = torch.full((4, 4), (i + 1) / 8)
        assert torch.equal(ours(x), f(x, lambda hidden: hidden * 2))
    assert pygraph.counters()["replays"] > 1
    assert all(torch.equal(memory, copy) for memory, copy in _kept)
    assert len({memory.data_ptr() for memory, _ in _kept}) == len(_kept) >= 3 * CALLS
    _kept.clear()


def test_the_frames_of_an_error_show_the_arguments_of_their_own_call() -> None:
    ours = compiled(lambda x: ops.refuse(x + 1) @ x.t(), inductor={"allow_buffer_reuse": False})
    seen: list[torch.Tensor] = []
    for i in range(CALLS):
        for _ in range(3 if i == 0 else 1):
            ours(torch.full((4, 4), float(i)))
        with pytest.raises(ValueError, match="negative") as caught:
            ours(torch.full((4, 4), -10.0 - i))
        frame = next(entry.frame for entry in reversed(caught.traceback) if entry.name == "_refuse")
        seen.append(frame.f_locals["x"])
    assert pygraph.counters()["replays"] > 1
    assert [x.mean().item() for x in seen] == [-9.0 - i for i in range(CALLS)]


@pytest.mark.parametrize("broken", ["inductor.emitted.read_program", "backend._driver", "backend.bind"])
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_a_failure_after_inductor_is_done_leaves_training_to_plain_inductor(
    monkeypatch: pytest.MonkeyPatch, broken: str, dynamic: bool
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("broken")

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(x @ w).t() @ x)

    monkeypatch.setattr(f"pygraph.{broken}", fail)
    ours = torch.compile(f, backend="pygraph", options=EVERYTHING, dynamic=dynamic)
    for rows in (4, 4, 6):
        x, w = torch.randn(rows, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
        mine, theirs = ours(x, w), f(x, w)
        torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(
            torch.autograd.grad(mine.sum(), (x, w)), torch.autograd.grad(theirs.sum(), (x, w)), atol=1e-4, rtol=1e-4
        )
    assert {report.error for report in pygraph.reports()} == {"RuntimeError: broken"}


@pytest.mark.parametrize("passes", [EVERYTHING["passes"], "legality,placement,partitioning{max-regions=0}"])
def test_memory_of_another_size_than_was_compiled_for_is_refused(passes: str) -> None:
    """Dynamo does not guard the memory behind overlapping views of which one is written. The program checks it, in
    regions and outside of them."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        return torch.mm(x, y) + 1

    def views(memory: torch.Tensor, begin: int) -> tuple[torch.Tensor, torch.Tensor]:
        return memory[begin : begin + 36].view(6, 6), memory[begin + 4 : begin + 40].view(6, 6)

    ours = torch.compile(f, backend="pygraph", dynamic=False, options={"passes": passes})
    for _ in range(4):
        memory = torch.randn(512)
        expected = f(*views(memory.clone(), 400))
        torch.testing.assert_close(ours(*views(memory, 400)), expected)
    with pytest.raises(AssertionError, match="expected size"):
        ours(*views(torch.randn(100), 60))


@pytest.mark.parametrize(
    "f", [torch.fft.ifft, lambda x: torch.fft.fft(x).conj(), lambda x: (torch.mm(x + 0j, x + 0j).mH @ (x + 1j)).conj()]
)
def test_an_output_that_is_to_be_conjugated_still_is_when_it_is_read(f: Callable[..., Any]) -> None:
    ours = compiled(f)
    for seed in range(CALLS):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
        found, expected = ours(x), f(x)
        assert found.is_conj() == expected.is_conj()
        torch.testing.assert_close(found, expected)
    refusals = {refusal for report in pygraph.reports() for r in report.regions for refusal in r.record.refusals}
    assert refusals == {"unsupported-tensor"}
