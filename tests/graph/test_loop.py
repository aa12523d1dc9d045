"""Loops: one replay runs a step as often as the device decides, and does what a loop in Python does, bit by bit."""

from __future__ import annotations

import copy
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import pygraph
from pygraph.graphs import Looped
from pygraph.graphs import loops as graph_loops
from pygraph.program import loops
from pygraph.program.loops import looped
from pygraph.program.program import Program
from pygraph.runtime import compare as compare_module
from pygraph.runtime import judge as judge_module
from pygraph.runtime import life
from pygraph.runtime.compare import compare
from pygraph.runtime.host.driver import HostDriver
from pygraph.runtime.judge import judge
from pygraph.runtime.provenance import Refusal
from tests.graph.calls import assert_same

WEIGHT = torch.randn(4, 4)
WHERE = torch.tensor([0, 0, 1, 1])


def plain(
    step: Callable[[Any], Any],
    state: Any,
    steps: int,
    until: Callable[[Any], Any] | None = None,
    collect: Callable[[Any], Any] | None = None,
) -> tuple[Any, int, list[Any]]:
    """The loop in Python."""
    count, rows = 0, []
    state = copy.deepcopy(state)
    with torch.no_grad():
        while count < steps and not (until is not None and until(state)):
            state, count = step(state), count + 1
            if collect is not None:
                rows.append(collect(state))
    return state, count, rows


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """A copy without the strides, also of a single element."""
    return tensor.clone(memory_format=torch.contiguous_format)


def assert_loop(found: Looped, expected: tuple[Any, int, list[Any]]) -> None:
    state, count, rows = expected
    assert found.count.item() == count
    for one, other in zip(pytree.tree_leaves(found.state), pytree.tree_leaves(state), strict=True):
        if isinstance(one, torch.Tensor):
            assert_same(dense(one), dense(other))  # strides are those of the first state
        else:
            assert one == other
    for number, row in enumerate(rows):
        for one, other in zip(pytree.tree_leaves(found.collected), pytree.tree_leaves(row), strict=True):
            assert_same(one[number], other)


@torch.library.custom_op("tests::hosted", mutates_args=())
def hosted(x: torch.Tensor) -> torch.Tensor:
    """An operator that replays call."""
    return x.abs()


@hosted.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 4), torch.randn(4, 4)


STEPS: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "two values": (lambda s: (torch.tanh(s[0] @ WEIGHT), s[0] + s[1]), pair),
    "values that change places": (lambda s: (s[1], s[0]), pair),
    "values that move on": (lambda s: (s[1], s[1] * s[0]), pair),
    "a view of what is carried": (lambda s: (s[0][:], s[1].view(4, 4)), pair),
    "a container that the step writes to": (lambda s: s.update(x=s["x"] * 2) or s, lambda: {"x": torch.randn(3)}),
    "a part of what is carried": (lambda s: (s[1].flip(0)[:], s[0][:2].repeat(2, 1)), pair),
    "written in place": (lambda s: (s[0].mul_(0.5), s[1].add_(s[0])), pair),
    "written in place and handed on": (lambda s: (s[1], s[0].mul_(0.5)), pair),
    "a dictionary with numbers": (
        lambda s: {"x": s["x"] * s["scale"], "scale": s["scale"], "n": s["n"] + 1},
        lambda: {"x": torch.randn(3), "scale": 1.5, "n": torch.tensor(0)},
    ),
    "a tensor": (lambda s: torch.sin(s @ WEIGHT), lambda: torch.randn(4, 4)),
    "strides": (lambda s: torch.sin(s), lambda: torch.randn(4, 3).t()),
    "nothing changes": (lambda s: s, lambda: torch.randn(3)),
    "NaN": (lambda s: (s - 1).sqrt() + s, lambda: torch.randn(4)),
    "integers": (lambda s: s * 3 + 1, lambda: torch.randint(0, 99, (5,))),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_loop_does_what_a_loop_in_python_does(name: str) -> None:
    step, make = STEPS[name]
    for steps in (3, 4, 5, 1, 0, 7):
        state = make()
        expected = plain(step, state, steps)
        before = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, state)
        found = pygraph.loop(step, state, steps=steps, held=WEIGHT)
        assert_loop(found, expected)
        assert_loop(Looped(state, found.count, None, found.record), (before, found.count.item(), []))
    assert (found.record.captures, found.record.replays) == (1, 4), found.record


def bodies(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """The bodies of loops that are captured from now on."""
    found: list[Program] = []

    def keep(program: Program, control: int) -> Program:
        made = looped(program, control)
        found.append(made.recording.launches[0].bodies[0])
        return made

    monkeypatch.setattr(loops, "looped", keep)
    return found


def shifted(s: Any) -> Any:
    return s[1], s[2], torch.cos(s[0])


LAUNCHES: dict[str, tuple[Callable[[Any], Any], Callable[[], Any], dict[str, Any], str]] = {
    "written anew": (lambda s: torch.sin(s @ WEIGHT), lambda: torch.randn(4, 4), {}, "mm sin"),
    "read by the last launch": (lambda s: torch.sin(s @ WEIGHT) + s, lambda: torch.randn(4, 4), {}, "mm sin add"),
    "two values": (lambda s: (torch.sin(s[1]), torch.cos(s[0])), pair, {}, "sin cos copy_"),
    "read behind": (
        lambda s: (torch.sin(s[0]), (s[0] * 2).sum()),
        lambda: (torch.randn(4), torch.tensor(1.0)),
        {},
        "sin mul sum copy_",
    ),
    "an error of what is written anew": (
        lambda s: (lambda new: (new, (new - s[0]).abs().max()))(torch.tanh(s[0])),
        lambda: (torch.randn(4), torch.tensor(1.0)),
        {"until": lambda s: s[1] < 0.25},
        "tanh sub abs max copy_ lt",
    ),
    "whether to stop": (
        lambda s: s * 1.5,
        lambda: torch.ones(3),
        {"until": lambda s: s.max() > 20},
        "mul max gt",
    ),
    "a number that says whether to stop": (
        lambda s: s - 1,
        lambda: torch.full((1,), 3.0),
        {"until": lambda s: (s < 0).int()},
        "sub lt _to_copy ne",
    ),
    "rows": (
        lambda s: s * 1.5,
        lambda: torch.ones(3),
        {"until": lambda s: s.max() > 20, "collect": lambda s: s.sum()},
        "mul sum index_copy_ max gt",
    ),
    "nothing changes": (lambda s: (s[0], torch.sin(s[1])), pair, {}, "sin"),
    "views of what is carried": (lambda s: (s[0][:], torch.sin(s[1].view(4, 4)).view(4, 4)), pair, {}, "sin"),
    "written in place": (lambda s: (s[0].mul_(0.5)[:], s[1].add_(s[0])), pair, {}, "mul_ add_"),
    "values that change places": (lambda s: (s[1], s[0]), pair, {}, "clone copy_ copy_"),
    "values that move on": (shifted, lambda: (*pair(), torch.randn(4, 4)), {}, "cos copy_ copy_ copy_"),
    "another type": (lambda s: (s > 0).float(), lambda: torch.randn(4), {}, "gt _to_copy"),
    "strides": (lambda s: torch.sin(s), lambda: torch.randn(4, 3).t(), {}, "sin"),
    "integers": (lambda s: s * 3 + 1, lambda: torch.randint(0, 99, (5,)), {}, "mul add"),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_an_iteration_has_the_launches_of_its_step_and_few_copies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step, make, facts, launches = LAUNCHES[name]
    found = bodies(monkeypatch)
    for steps in (4, 9, 4, 12, 2):
        state = make()
        done = pygraph.loop(step, state, steps=steps, held=WEIGHT, **facts)
        assert_loop(done, plain(step, state, steps, **facts))
    assert done.record.replays >= 2, done.record
    (body,) = found
    assert [each.name.split(".")[1] for each in body.recording.launches] == launches.split()


@pytest.mark.parametrize("seed", [*range(24), *(pytest.param(n, marks=pytest.mark.sweep) for n in range(24, 200))])
def test_steps_made_up_at_random(seed: int) -> None:
    """Steps that read, write in place and hand on what is carried and what is held, in any order, some of them in
    inference mode. A single element of any stride is carried as well."""
    draw = random.Random(seed)
    plan = [(draw.randrange(9), draw.randrange(9), draw.randrange(9)) for _ in range(draw.randint(1, 9))]
    taken = draw.sample(range(3 + len(plan)), 3)
    ours, theirs = (torch.zeros(4, 4) for _ in range(2))

    def stepper(cache: torch.Tensor) -> Callable[[Any], Any]:
        def step(state: Any) -> Any:
            *values, single = state
            for kind, one, other in plan:
                x, y = values[one % len(values)], values[other % len(values)]
                if kind < 4:
                    values.append((torch.sin(x), x @ y / 4, x + y, x * 0.5 + cache)[kind])
                elif kind == 4:
                    values.append(x.mul_(0.5))
                elif kind == 5:
                    cache.copy_(torch.tanh(x))
                elif kind == 6:
                    cache[1:].copy_(torch.cos(y)[1:])
                    values.append(x[:])
                elif kind == 7:
                    values.append(y.copy_(x.flip(0)))
                else:
                    values.append(torch.cat((x[:2], y[2:])))
            return *(values[each % len(values)] for each in taken), single * 0.5 + 1

        return step

    us, them = stepper(ours), stepper(theirs)
    for steps in (4, 5, 4, 6, 11):
        with torch.inference_mode(seed % 3 == 0):
            state = (*(torch.randn(4, 4) for _ in range(3)), torch.randn(2, 5)[1:, 2])
            expected = plain(them, state, steps)
            found = pygraph.loop(us, state, steps=steps, held=ours)
            assert_loop(found, expected)
        assert_same(ours, theirs)
    assert found.record.replays == 3 or "share memory" in (found.record.reason or ""), found.record


def in_place_twice(s: Any) -> Any:
    s[0].mul_(2)
    new = s[1] + 1
    return new, new


def parts_of_one(s: Any) -> Any:
    s[0].add_(1)
    new = torch.cat((s[0] + 1, s[1] * 2))
    return new[:4], new[2:6]


def summed(s: Any) -> Any:
    return s.contiguous() * 0.99 + s.sum() * 1e-3


ODD: dict[str, tuple[Callable[[Any], Any], Callable[[], Any], str]] = {
    "one tensor twice": (in_place_twice, pair, "share memory"),
    "parts of one tensor": (parts_of_one, pair, "share memory"),
    "transposed": (lambda s: (s[0].t(), s[1]), pair, "makes strides"),
    "made contiguous": (summed, lambda: torch.randn(67, 33).t(), "makes strides"),
    "expanded": (lambda s: s.mean(1, keepdim=True).expand(3, 4), lambda: torch.randn(3, 4), "makes strides"),
    "a first state that shares memory": (
        lambda s: (s[0].add_(1), s[1] * 2),
        lambda: (lambda x: (x[:4], x[2:]))(torch.randn(6)),
        "values of the first state share memory",
    ),
    "one tensor in the first state": (
        lambda s: (s[0].add_(1), s[1] * 2),
        lambda: (lambda x: (x, x))(torch.randn(6)),
        "values of the first state share memory",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_copies_that_would_do_something_else_are_left_to_the_host(name: str) -> None:
    step, make, said = ODD[name]
    for steps in (4, 5, 3, 6):
        state = make()
        expected = plain(step, state, steps)
        found = pygraph.loop(step, state, steps=steps)
        assert_loop(found, expected)
        assert said in (found.record.reason or ""), found.record
    assert found.record.replays == 0


def test_a_step_may_return_memory_that_is_held() -> None:
    ours, theirs = torch.zeros(3), torch.zeros(3)

    def stepper(cache: torch.Tensor) -> Callable[[Any], Any]:
        def step(state: torch.Tensor) -> torch.Tensor:
            cache.mul_(2)
            return cache.copy_(state + 1)

        return step

    for steps in (3, 4, 5, 3):
        state = torch.randn(3)
        expected = plain(stepper(theirs), state, steps)
        found = pygraph.loop(stepper(ours), state, steps=steps, held=ours)
        assert_loop(found, expected)
        assert_same(ours, theirs)
        assert "memory that is held" in (found.record.reason or "")


def test_what_python_changes_in_each_iteration_is_left_to_the_host() -> None:
    class First:
        def __init__(self) -> None:
            self.first = True

    flag = First()

    def step(state: torch.Tensor) -> torch.Tensor:
        if flag.first:
            flag.first = False
            return state.clamp(max=5.0) + 1
        return state + 1

    for start, steps in ((0.0, 4), (0.0, 4), (0.0, 4), (0.0, 12), (7.0, 4)):
        flag.first = True
        expected = plain(step, torch.full((2,), start), steps)
        flag.first = True
        found = pygraph.loop(step, torch.full((2,), start), steps=steps, held=flag)
        assert_loop(found, expected)
        assert not flag.first
    assert "changes attributes" in str(found.record.refusals), found.record


def test_what_a_step_keeps_is_left_as_it_was() -> None:
    ours: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []

    def stepper(kept: list[torch.Tensor]) -> Callable[[Any], Any]:
        def step(state: torch.Tensor) -> torch.Tensor:
            kept.append(state)
            return state + len(kept)

        return step

    for steps in (3, 4, 3):
        expected = plain(stepper(theirs), torch.zeros(2), steps)
        assert_loop(pygraph.loop(stepper(ours), torch.zeros(2), steps=steps, held=ours), expected)
        assert_same(ours, theirs)


@pytest.mark.parametrize("writes", ["state", "held", "generator", "collect"])
def test_until_and_collect_only_read(writes: str) -> None:
    held = torch.zeros(2)

    def reads(state: torch.Tensor) -> torch.Tensor:
        if writes == "generator":
            return torch.rand(1) > 2
        return (held if writes == "held" else state).add_(1).sum() > 1e6

    keywords: Any = {"collect" if writes == "collect" else "until": reads}
    with pytest.raises(ValueError, match="may only read"):
        pygraph.loop(lambda s: s + 1, torch.zeros(2), steps=3, held=held, **keywords)


@pytest.mark.parametrize("ends", [False, True])
def test_another_thread_that_draws_is_no_write_of_until(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[threading.Thread] = []
    look = graph_loops._look

    def look_while_another_draws(*args: Any) -> None:
        look(*args)
        if not drawn:
            drawn.append(threading.Thread(target=torch.rand, args=(1,)))
            drawn[0].start()
            drawn[0].join()

    monkeypatch.setattr(graph_loops, "_look", look_while_another_draws)
    keywords: Any = {"until": lambda state: state.sum() > 3} if ends else {}
    found = pygraph.loop(lambda s: s + 1, torch.zeros(2), steps=3, **keywords)
    assert found.count.item() == (2 if ends else 3)
    assert drawn


def test_steps_are_integers() -> None:
    for steps in (np.int64(3), True, np.int32(4), 5):
        found = pygraph.loop(lambda s: s + 1, torch.zeros(1), steps=steps, collect=lambda s: s)
        assert found.count.item() == len(found.collected) == steps
    with pytest.raises(TypeError):
        pygraph.loop(lambda s: s + 1, torch.zeros(1), steps=2.5)
    with pytest.raises(ValueError, match="pass an integer one"):
        pygraph.loop(lambda s: s + 1, torch.zeros(1), steps=torch.tensor(2.5))


def test_states_are_of_tensors_and_plain_values() -> None:
    with pytest.raises(ValueError, match="a object in the state"):
        pygraph.loop(lambda s: s, (torch.zeros(2), object()), steps=3)
    with pytest.raises(ValueError, match="sparse_coo in the state"):
        pygraph.loop(lambda s: s, (torch.zeros(2), torch.eye(2).to_sparse()), steps=3)


def test_a_loop_of_a_session_is_not_that_of_another() -> None:
    def step(state: torch.Tensor) -> torch.Tensor:
        return state * 2

    for _ in range(2):
        with pygraph.Session():
            for _ in range(3):
                found = pygraph.loop(step, torch.ones(2), steps=3)
            assert found.record.replays == 1, found.record


def test_another_order_of_an_iterations_launches_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a device would run some of them side by side, as two copies of a state."""
    monkeypatch.setattr(HostDriver, "parallel", True)
    monkeypatch.delenv("PYGRAPH_ORDER")

    def step(state: Any) -> Any:
        one, other = state
        return (one * 1.01 + 0.1).tanh(), (other.sin() * 0.9 + 0.2).cos()

    first = torch.randn(8), torch.randn(8)
    expected = plain(step, first, 20)
    for _ in range(12):
        found = pygraph.loop(step, first, steps=20)
        assert_loop(found, expected)
    (region,) = found.record.regions
    assert (region.launches, region.longest_path, region.contests) == (7, 4, 1)
    assert found.record.replays == 9, "the calls that capture are answered by a loop of the host"
    assert not region.refusals


def test_a_chain_is_captured_in_its_order_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostDriver, "parallel", True)
    monkeypatch.delenv("PYGRAPH_ORDER")
    for _ in range(4):
        found = pygraph.loop(lambda x: (x * 1.01).tanh(), torch.ones(8), steps=20)
    (region,) = found.record.regions
    assert (region.launches, region.longest_path, region.contests) == (2, 2, 0)
    assert found.record.replays == 2


def test_the_device_decides_when_it_is_over() -> None:
    def step(state: torch.Tensor) -> torch.Tensor:
        return state * 2

    for start, steps in ((1.0, 9), (1.0, 4), (2.0, 9), (64.0, 9), (9.0, 9), (1.0, 0), (1.0, -3), (0.0, 5), (1.0, 99)):
        state = torch.tensor([start])
        expected = plain(step, state, steps, lambda s: s[0] > 60)
        found = pygraph.loop(step, state, steps=steps, until=lambda s: s > 60)
        assert_loop(found, expected)
    assert (found.record.captures, found.record.replays) == (1, 7), found.record


def test_steps_may_be_a_tensor() -> None:
    def step(state: torch.Tensor) -> torch.Tensor:
        return state + 1

    for steps in (3, 4, 5, 0, 7):
        found = pygraph.loop(step, torch.zeros(2), steps=torch.tensor(steps, dtype=torch.int32))
        assert found.state.tolist() == [steps, steps]
    assert found.record.replays == 3
    with pytest.raises(ValueError, match="needs an integer for steps"):
        pygraph.loop(step, torch.zeros(2), steps=torch.tensor(3), collect=lambda s: s)


def test_results_are_kept_for_each_iteration() -> None:
    def step(state: torch.Tensor) -> torch.Tensor:
        return torch.sin(state @ WEIGHT)

    def collect(state: torch.Tensor) -> Any:
        return {"sum": state.sum(), "first": state[0], "positive": state > 0}

    until = lambda s: s.abs().max() < 0.5  # noqa: E731 - as a user writes it
    for steps in (5, 9, 16, 2, 0, 11):
        state = torch.randn(4, 4)
        expected = plain(step, state, steps, until, collect)
        found = pygraph.loop(step, state, steps=steps, until=until, collect=collect, held=WEIGHT)
        assert_loop(found, expected)
        assert {name: rows.size(0) for name, rows in found.collected.items()} == dict.fromkeys(found.collected, steps)
        assert not found.collected["sum"][found.count :].any()
    assert found.record.captures == 1


def test_a_cache_that_is_held_is_written_in_place() -> None:
    class Cache:
        def __init__(self) -> None:
            self.keys = torch.zeros(8, 4)

    def run(cache: Cache, state: Any, steps: int) -> Looped:
        def step(state: Any) -> Any:
            x, position = state
            cache.keys.index_copy_(0, position, x)
            return torch.tanh(cache.keys.sum(0, keepdim=True)), position + 1

        return pygraph.loop(step, state, steps=steps, held=cache)

    ours, theirs = Cache(), Cache()
    for steps in (3, 4, 5, 2):
        state = (torch.randn(1, 4), torch.tensor([1]))
        found = run(ours, state, steps)
        x, position = state
        for _ in range(steps):
            theirs.keys.index_copy_(0, position, x)
            x, position = torch.tanh(theirs.keys.sum(0, keepdim=True)), position + 1
        assert_same(ours.keys, theirs.keys)
        assert_same(found.state[0], x)
        if steps == 4:
            ours.keys = ours.keys.clone()
    assert (found.record.captures, found.record.replays) == (1, 2), found.record


def test_random_numbers_are_those_of_the_host() -> None:
    def step(state: torch.Tensor) -> torch.Tensor:
        return state + torch.rand(3) + torch.bernoulli(torch.full((3,), 0.5))

    for steps in (3, 4, 5, 2, 0):
        torch.manual_seed(steps)
        expected = plain(step, torch.zeros(3), steps)
        after = torch.rand(2)
        torch.manual_seed(steps)
        found = pygraph.loop(step, torch.zeros(3), steps=steps)
        assert_loop(found, expected)
        assert_same(torch.rand(2), after)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda s: (s[0],), "of another structure"),
        (lambda s: (s[0][:2], s[1], 1), "makes a tensor of"),
        (lambda s: (s[0].double(), s[1], 1), "torch.float64"),
        (lambda s: (1.0, s[1], 1), "makes a float of"),
        (lambda s: (s[0], s[1], 2), "changes a plain value of the state, 1"),
    ],
)
def test_states_keep_their_structure(step: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pygraph.loop(step, (*pair(), 1), steps=3)


def test_what_a_step_raises_is_raised() -> None:
    def step(state: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("this step")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="this step"):
            pygraph.loop(step, torch.zeros(2), steps=3)
    with pytest.raises(ValueError, match="a tensor of one element"):
        pygraph.loop(lambda s: s + 1, torch.zeros(2), steps=3, until=lambda s: s > 0)
    with pytest.raises(ValueError, match="has no tensor"):
        pygraph.loop(lambda s: s, 3, steps=3)


def test_where_a_step_needs_the_host_that_loops_over_replays() -> None:
    def step(state: torch.Tensor) -> torch.Tensor:
        return hosted(state * 2).cos()

    for steps in (3, 4, 5, 2, 6):
        state = torch.randn(5)
        expected = plain(step, state, steps)
        found = pygraph.loop(step, state, steps=steps)
        assert_loop(found, expected)
    assert found.record.reason is not None
    assert "host-loop: tests.hosted.default is called by the host" in found.record.reason
    assert found.record.captures == 0
    own = [
        report
        for report in pygraph.reports()
        if any(found.record.name in region.record.name for region in report.regions)
    ]
    assert sum(region.record.replays for report in own for region in report.regions) > 4


def test_steps_of_one_iteration_prove_nothing() -> None:
    def step(state: torch.Tensor) -> torch.Tensor:
        return state + 1

    for _ in range(4):
        found = pygraph.loop(step, torch.zeros(2), steps=1)
    assert found.record.captures == 0
    for _ in range(3):
        found = pygraph.loop(step, torch.zeros(2), steps=2)
    assert found.record.replays


def test_each_size_is_compared() -> None:
    def step(state: torch.Tensor) -> torch.Tensor:
        return state * 2

    for size in (3, 5, 7):
        for _ in range(2):
            found = pygraph.loop(step, torch.ones(size), steps=3)
            assert found.state.tolist() == [8.0] * size
    assert (found.record.captures, found.record.uncaptured) == (3, 6), found.record


def test_a_replay_is_interrupted() -> None:
    def step(state: torch.Tensor) -> torch.Tensor:
        return state + 1

    state = torch.zeros(2)
    for _ in range(3):
        found = pygraph.loop(step, state, steps=3)
    assert found.record.replays
    threading.Timer(0.3, lambda: signal.raise_signal(signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        pygraph.loop(step, state, steps=10**12)
    assert state.tolist() == [0, 0]
    assert pygraph.loop(step, state, steps=5).state.tolist() == [5, 5]
    assert found.record.replays > 1


def test_many_iterations() -> None:
    def step(state: torch.Tensor) -> torch.Tensor:
        return state + 1

    for steps in (2, 3, 100_000):
        found = pygraph.loop(step, torch.zeros(1, dtype=torch.int64), steps=steps)
    assert found.state.item() == found.count.item() == 100_000
    assert found.record.replays == 1


def test_steps_are_modules_compiled_functions_and_graphs() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    compiled = torch.compile(module, backend="eager")
    graph = pygraph.graph(lambda x: torch.tanh(x) * 2)
    for step, held in ((module, ()), (compiled, module), (graph, ())):
        for steps in (3, 4, 5):
            state = torch.randn(2, 4)
            expected = plain(step, state, steps)
            found = pygraph.loop(step, state, steps=steps, held=held)
            assert_loop(found, expected)
        assert found.record.replays == 1, found.record


def test_loops_are_told_apart_by_what_they_refer_to() -> None:
    records = set()
    for factor in (2.0, 3.0, 2.0, 3.0, 2.0, 3.0):
        found = pygraph.loop(lambda s: s * factor, torch.ones(1), steps=3)  # noqa: B023 - it is called at once
        assert found.state.item() == factor**3
        records.add(id(found.record))
    assert len(records) == 2
    assert found.record.replays == 1


def test_a_step_may_refer_to_what_is_not_there_yet() -> None:
    def step(state: torch.Tensor) -> torch.Tensor:
        return state * 2 if state.dim() else later

    assert pygraph.loop(step, torch.ones(1), steps=3).state.item() == 8
    later = torch.zeros(1)
    assert pygraph.loop(step, torch.ones(1), steps=3).state.item() == 8


def test_loops_run_in_inference_mode() -> None:
    def step(state: torch.Tensor) -> torch.Tensor:
        return torch.tanh(state @ WEIGHT)

    with torch.inference_mode():
        for steps in (3, 4, 5):
            state = torch.randn(2, 4)
            expected = plain(step, state, steps)
            found = pygraph.loop(step, state, steps=steps, held=WEIGHT)
            assert_loop(found, expected)
    assert found.record.replays == 1, found.record


def test_single_elements_in_inference_mode_may_have_any_stride() -> None:
    with torch.inference_mode():
        for steps in (3, 4, 5):
            state = torch.randn(2, 5)[1:, 2]
            assert state.stride() == (5,)
            expected = plain(lambda s: s * 0.5 + 1, state, steps)
            found = pygraph.loop(lambda s: s * 0.5 + 1, state, steps=steps)
            assert_loop(found, expected)
    assert found.record.replays == 1, found.record


def test_loops_are_told_apart_by_defaults_of_keywords() -> None:
    for factor in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0):
        found = pygraph.loop(lambda s, *, f=factor: s * f, torch.ones(1), steps=3)
        assert found.state.item() == factor**3
    assert found.record.replays == 1


def test_threads_run_one_loop_with_different_caches() -> None:
    def step(state: torch.Tensor) -> torch.Tensor:
        return state + 1

    wrong: list[Any] = []

    def work(number: int) -> None:
        for _ in range(20):
            found = pygraph.loop(step, torch.full((2,), float(number)), steps=5 + number)
            if found.state.tolist() != [2 * number + 5] * 2:
                wrong.append(found.state)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_loop_in_what_dynamo_traces_or_a_graph_captures_runs_whole() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return pygraph.loop(lambda s: s * 2, x, steps=3).state + 1

    compiled, graph = torch.compile(twice, backend="eager"), pygraph.graph(twice)
    for value in (1.0, 2.0, 3.0, 4.0):
        assert compiled(torch.tensor([value])).item() == 8 * value + 1
        assert graph(torch.tensor([value])).item() == 8 * value + 1


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_steps_that_train_what_is_held(momentum: float, kept: bool) -> None:
    """Gradients that are there before lie between what is held and what says how often."""
    model = torch.nn.Linear(4, 1)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=momentum) for each in (model, twin)]

    def training(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Any], Any]:
        def step(state: Any) -> Any:
            with torch.enable_grad():
                optimizer.zero_grad(set_to_none=not kept)
                loss = (net(state[0]) ** 2).mean()
                loss.backward()
                optimizer.step()
            return state[0] * 0.99, loss.detach()

        return step

    ours, theirs = map(training, (model, twin), optimizers)
    for steps in (3, 3, 4, 5, 3):
        state = torch.randn(8, 4), torch.randn(())
        expected = plain(theirs, state, steps)
        found = pygraph.loop(ours, state, steps=steps, held=[model, optimizers[0]])
        assert_loop(found, expected)
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert_same(one, other)
            assert_same(one.grad, other.grad)
    assert found.record.replays > 1 if kept else found.record.reason, found.record


def test_a_few_iterations_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that vary from run to run end in other integers after many, in any two runs."""
    limits = []

    def step(state: torch.Tensor) -> torch.Tensor:
        return state * 0.99 + state.sum() * 1e-3

    def noted(fn: Any, driver: Any, executable: Any, args: Any, *more: Any, **facts: Any) -> Any:
        limits.append(args[0].tolist())
        return compare(fn, driver, executable, args, *more, **facts)

    monkeypatch.setattr(life, "compare", noted)
    for steps in (50, 60, 70):
        state = torch.randn(4, 4)
        assert_loop(pygraph.loop(step, state, steps=steps), plain(step, state, steps))
    assert limits == [[0, 4, 0]]


def test_loops_that_vary_are_held_against_other_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    doubts = [Refusal(judge_module.ODD_REPLAY, "as if an integer had come out otherwise")]

    def doubtful(*outcomes: Any, **facts: Any) -> Any:
        return doubts.pop() if doubts else judge(*outcomes, **facts)

    monkeypatch.setattr(compare_module, "judge", doubtful)

    def one(state: torch.Tensor) -> torch.Tensor:
        return torch.zeros(4).index_add_(0, WHERE, torch.sin(state))

    for steps in (9, 8, 7):
        state = torch.randn(4)
        expected = plain(one, state, steps)
        found = pygraph.loop(one, state, steps=steps, held=WHERE)
        assert_loop(found, expected)
    assert not doubts
    assert (found.record.captures, found.record.replays) == (1, 1), found.record


def test_a_loop_that_is_wrong_is_left_to_the_host_and_no_launch_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Refusal("comparison-failed", "replayed: as if it were wrong")
    monkeypatch.setattr(compare_module, "judge", lambda *_, **__: wrong)
    for _ in range(3):
        found = pygraph.loop(lambda s: s * 2 - 1, torch.full((3,), 2.0), steps=9)
        assert found.state.tolist() == [2.0**9 + 1] * 3
    assert found.record.replays == 0
    assert "as if it were wrong; which launch of the loop differs is not looked for" in str(found.record.reason)


# -- rows while the loop runs ------------------------------------------------------------------------------------------


def rows_of(chunks: list[torch.Tensor]) -> list[float]:
    return [row for chunk in chunks for row in chunk.tolist()]


@pytest.mark.parametrize("ends", [False, True])
def test_rows_are_followed_in_order_and_once(ends: bool) -> None:
    """By loops that are captured, compared, replayed, and by those of the host."""
    weight = torch.eye(4) * 0.9

    def step(state: torch.Tensor) -> torch.Tensor:
        return state @ weight + 0.5

    until = (lambda state: state.sum() > 30.0) if ends else None
    for steps in (5, 6, 1, 0, 40, 300, 7):
        chunks: list[torch.Tensor] = []
        first = torch.ones(2, 4)
        _, count, rows = plain(step, first, steps, until, lambda state: state.sum())
        found = pygraph.loop(
            step, first, steps=steps, until=until, collect=lambda s: s.sum(), follow=chunks.append, held=weight
        )
        assert found.count.item() == count
        assert rows_of(chunks) == found.collected[:count].tolist() == [row.item() for row in rows]
    assert found.record.replays, found.record


def test_rows_are_there_while_a_replay_runs() -> None:
    """The loop goes on until a row was seen: what follows writes what ends it."""
    last, seen = torch.tensor([5]), list[int]()

    def see(rows: torch.Tensor) -> None:
        seen.extend(rows.tolist())
        if len(seen) > 100:
            last.zero_()

    def run() -> Looped:
        seen.clear()
        first, until = torch.zeros(1, dtype=torch.int64), lambda state: state >= last
        return pygraph.loop(
            lambda s: s + 1, first, steps=10**6, until=until, collect=lambda s: s[0], follow=see, held=last
        )

    replays = [run().record.replays for _ in range(4)]
    last.fill_(10**9)
    found = run()
    assert found.record.replays == replays[-1] + 1 > 1
    assert 100 < found.count.item() < 10**6
    assert seen == list(range(1, found.count.item() + 1))


def test_what_follows_may_raise_and_the_loop_runs_to_its_end() -> None:
    written = torch.zeros(1, dtype=torch.int64)

    def step(state: torch.Tensor) -> torch.Tensor:
        written.add_(1)
        return state * 2

    def broken(rows: torch.Tensor) -> None:
        told.append(len(rows))
        raise BrokenPipeError

    for steps in (3, 4, 5, 6):
        told: list[int] = []
        written.zero_()
        with pytest.raises(BrokenPipeError):
            pygraph.loop(step, torch.ones(2), steps=steps, collect=torch.sum, follow=broken, held=written)
        assert (written.item(), len(told)) == (steps, 1)
    found = pygraph.loop(step, torch.ones(2), steps=4, collect=torch.sum, held=written)
    assert found.record.replays > 1, found.record


def test_rows_of_a_loop_of_the_host_come_one_by_one() -> None:
    def step(state: torch.Tensor) -> torch.Tensor:
        return state + float(state.sum())

    chunks: list[torch.Tensor] = []
    found = pygraph.loop(step, torch.ones(1), steps=4, collect=lambda s: s[0], follow=chunks.append)
    assert [chunk.tolist() for chunk in chunks] == [[2], [4], [8], [16]]
    assert found.count.item() == 4


def test_following_needs_what_is_collected() -> None:
    with pytest.raises(ValueError, match="pass collect, too"):
        pygraph.loop(lambda s: s + 1, torch.ones(1), steps=2, follow=print)
