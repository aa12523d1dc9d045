"""A training step compiled whole: against the same step run eagerly, and one graph in all cases."""

from __future__ import annotations

import functools
import io
import itertools
import logging
import re
import threading
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._inductor.fx_passes import post_grad
from torch.utils.checkpoint import checkpoint

import pygraph
from pygraph.errors import OptionError
from pygraph.inductor.partition_hooks import PartitionHooks, _growth, _planning
from pygraph.program.program import Program
from pygraph.runtime.life import Lives
from pygraph.runtime.variants import Variant
from pygraph.training import step as whole_step
from tests.small import UNFUSED
from tests.training.steps import (
    CLASSES,
    FEATURES,
    Setup,
    assert_equal_training,
    assert_same_state,
    basic,
    batches,
    setup,
)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "dampening": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, eps=1e-3),  # else near the signs of gradients
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


QUICK = ("adamw-fused",)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.sweep) for n in OPTIMIZERS])
def test_a_stock_optimizer_is_part_of_the_graph(name: str) -> None:
    ours, theirs = setup(OPTIMIZERS[name], one_layer), setup(OPTIMIZERS[name], one_layer)
    step = pygraph.train_step(basic(ours), fullgraph=True)
    assert_equal_training(step, basic(theirs), ours, theirs, steps=20)
    assert ours.compiled == (2 if name == "dampening" else 1)  # its first momentum is not what zeros lead to
    assert ours.replays >= 15


@pytest.mark.sweep
def test_some_parameters_have_a_state_before_others() -> None:
    def change(of: Setup, index: int) -> None:
        first: Any = of.model[0]  # type: ignore[index]
        if index == 1:
            first.requires_grad_(True)
        if index == 4:
            of.optimizer.state.pop(first.bias)

    ours, theirs = setup(OPTIMIZERS["amsgrad"]), setup(OPTIMIZERS["amsgrad"])
    for one in (ours, theirs):
        one.model[0].requires_grad_(False)  # type: ignore[index]
    assert_equal_training(pygraph.train_step(basic(ours)), basic(theirs), ours, theirs, steps=10, after=change)


def test_a_checkpoint_is_loaded_without_a_recompilation() -> None:
    def reload(setup: Setup, index: int) -> None:
        if index % 5 == 2:  # state_dict() has the keys of each group in another order
            kept = io.BytesIO()
            torch.save((setup.model.state_dict(), setup.optimizer.state_dict()), kept)
            model, optimizer = torch.load(io.BytesIO(kept.getvalue()))
            setup.model.load_state_dict(model)
            setup.optimizer.load_state_dict(optimizer)

    ours, theirs = setup(model=one_layer), setup(model=one_layer)
    step = pygraph.train_step(basic(ours), fullgraph=True)
    assert_equal_training(step, basic(theirs), ours, theirs, after=reload)
    assert ours.compiled == 1
    assert ours.replays >= 15


@pytest.mark.sweep
def test_parameters_change_their_groups() -> None:
    def layers() -> nn.Module:  # two of the same shape
        sizes = [(FEATURES, FEATURES), (FEATURES, FEATURES), (FEATURES, CLASSES)]
        return nn.Sequential(*(nn.Linear(*size) for size in sizes))

    def grouped(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        groups = [{"params": params[:2]}, {"params": params[2:4], "lr": 0.05}, {"params": params[4:]}]
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9)

    def swap(setup: Setup, index: int) -> None:
        if index in (3, 8):
            one, other, _ = setup.optimizer.param_groups
            one["params"], other["params"] = other["params"], one["params"]

    ours, theirs = setup(grouped, layers), setup(grouped, layers)
    assert_equal_training(pygraph.train_step(basic(ours)), basic(theirs), ours, theirs, steps=12, after=swap)
    assert ours.replays >= 6


WIDE = 64


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("disable", [False, True])
def test_steps_that_share_their_code_share_its_limit(disable: bool) -> None:
    def scaled(scale: float, inner: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return inner(x * scale, y)

    for scale in (1.0, 2.0, 3.0):
        ours, theirs = (setup(OPTIMIZERS["sgd"], one_layer) for _ in range(2))
        mine, other = (functools.partial(scaled, scale, basic(each)) for each in (ours, theirs))
        with torch._dynamo.config.patch(recompile_limit=1):
            step = pygraph.train_step(mine, options={"disable": disable})
            assert_equal_training(step, other, ours, theirs, steps=5)
        assert (ours.replays > 0) != disable


class Checkpointed(nn.Module):
    """Attention and dropout, computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 2 * FEATURES), nn.Linear(2 * FEATURES, CLASSES)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(1, 2, -1, FEATURES)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads).reshape(x.shape)
        return nn.functional.dropout(torch.tanh(mixed), 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.block, self.first(x), use_reentrant=False))


@pytest.mark.parametrize("moved", [False, True], ids=["as-traced", "as-the-option-says"])
def test_a_step_is_lowered_in_the_order_of_its_trace(moved: bool) -> None:
    """Inductor fuses only what it lowers close together: both gradients of a layer read the same."""
    options = {"inductor": {"reorder_for_locality": True}} if moved else None
    ours, theirs = setup(OPTIMIZERS["sgd"], six_layers), setup(OPTIMIZERS["sgd"], six_layers)
    assert_equal_training(pygraph.train_step(basic(ours), options=options), basic(theirs), ours, theirs, steps=3)
    products = re.findall(r"extern_kernels\.mm\((\w+).* out=buf(\d+)\)", pygraph.reports()[-1].source or "")
    of_weights = [x == "reinterpret_tensor" for x, _ in sorted(products, key=lambda found: int(found[1]))]
    layers = [sum(of_weights[place : place + 2]) for place in range(0, 10, 2)]
    assert len(of_weights) == 11, "a gradient of each weight, and of each input but the first"
    assert (layers == [1] * 5) is not moved
    assert (of_weights == [False] * 5 + [True] * 6) is moved


def six_layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(5)), nn.Linear(FEATURES, CLASSES))


@pytest.mark.parametrize("options", [{"inductor": 5}, {"inductor": {"no_such_option": 1}}, {"no_such_option": 1}])
def test_invalid_options_of_a_step_are_told_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        pygraph.train_step(lambda: None, options=options)


def test_a_disabled_step_is_plain_inductors() -> None:
    ours = setup(OPTIMIZERS["sgd"], one_layer)
    moved = mock.Mock(wraps=post_grad.reorder_for_locality)
    uncached = torch._inductor.config.patch(force_disable_caches=True)
    with mock.patch.object(post_grad, "reorder_for_locality", moved), uncached:
        pygraph.train_step(basic(ours), options={"disable": True})(*batches(1)[0])
    assert moved.call_count == 1


def test_a_step_compiles_where_inductor_has_no_such_pass() -> None:
    ours, theirs = setup(OPTIMIZERS["sgd"], one_layer), setup(OPTIMIZERS["sgd"], one_layer)
    with mock.patch.object(whole_step, "_ORDER", "no_such_option"):
        step = pygraph.train_step(basic(ours))
    assert_equal_training(step, basic(theirs), ours, theirs, steps=3)
    assert ours.replays == 1


@pytest.mark.sweep
def test_a_checkpointed_part_keeps_what_it_drew() -> None:
    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.05)

    ours, theirs = setup(sgd, Checkpointed), setup(sgd, Checkpointed)
    step, eager = pygraph.train_step(basic(ours), fullgraph=True), basic(theirs)
    with torch._inductor.config.patch(fallback_random=True):
        for index, (x, y) in enumerate(batches(20)):
            losses = []
            for run in (step, eager):
                torch.manual_seed(index)
                losses.append(run(x, y))
            torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
            assert_same_state(ours, theirs)
    assert ours.compiled == 1
    assert ours.replays >= 15


def test_a_checkpointed_part_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what it computes takes no memory until then."""
    products: list[int] = []
    kernels: list[set[str]] = []

    def told(lives: Lives, variant: Variant, program: Program) -> None:
        products.append(sum(launch.name.startswith("aten.addmm") for launch in program.recording.launches))
        kernels.extend(set(launch.origin.nodes) for launch in program.recording.launches)

    monkeypatch.setattr(Lives, "tell", told)

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
            self.block = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(checkpoint(self.block, self.first(x), use_reentrant=False))

    ours, theirs = (setup(lambda p: torch.optim.SGD(p, lr=0.05), Parts) for _ in range(2))
    assert_equal_training(pygraph.train_step(basic(ours)), basic(theirs), ours, theirs, steps=4)
    assert products == [6], "four layers, and the two of the block once more"
    end = "_recomputed"
    again = {name for names in kernels for name in names if name.endswith(end)}
    before = {name.removesuffix(end) for name in again}
    assert len(again) > 5
    assert not any(names & again and names & before for names in kernels), "no kernel computes both"


class Blocks(nn.Module):
    """Checkpointed blocks in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDE), nn.Linear(WIDE, CLASSES)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDE, 3 * WIDE), nn.Tanh(), nn.Linear(3 * WIDE, WIDE)) for _ in range(5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        made: torch.Tensor = self.last(x)
        return made


def test_checkpointed_parts_are_computed_again_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's own order computes them again all at once."""
    peaks: list[int] = []
    compute_late = PartitionHooks.compute_again_late

    def told(hooks: PartitionHooks, snodes: list[Any]) -> list[Any]:
        _, freeable, outputs = _planning(snodes)
        peaks.append(_growth(snodes, freeable, outputs)[1])
        return compute_late(hooks, snodes)

    monkeypatch.setattr(PartitionHooks, "compute_again_late", told)
    ours, theirs = (setup(OPTIMIZERS["nesterov"], Blocks) for _ in range(2))
    step, eager = pygraph.train_step(basic(ours), options={"order": "program"}), basic(theirs)
    with torch._inductor.config.patch(force_disable_caches=True):  # a cached program has its order
        for x, y in batches(4, batch=64):
            torch.testing.assert_close(step(x, y), eager(x, y), rtol=1e-4, atol=1e-5)
            assert_same_state(ours, theirs)
    (region,) = pygraph.reports()[-1].regions
    assert region.record is not None
    assert region.record.workspace_bytes < 0.8 * peaks[0]


class Own(torch.optim.SGD):
    """A user's optimizer."""


def one_layer() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, CLASSES))


@pytest.mark.parametrize(
    ("optimizer", "hooked", "reason"),
    [
        (Own, False, "Own runs outside of the graph: it is not one of torch.optim"),
        (torch.optim.SGD, True, "the backward pass runs outside of the graph: a parameter (4, 8) has a hook"),
    ],
)
def test_what_cannot_be_traced_runs_as_it_is_and_is_told(
    optimizer: type[torch.optim.SGD], hooked: bool, reason: str
) -> None:
    ours, theirs = (setup(lambda p: optimizer(p, lr=0.05), one_layer) for _ in range(2))
    if hooked:
        for one in (ours, theirs):
            one.model[0].weight.register_hook(lambda grad: grad * 2)  # type: ignore[index, union-attr]
    step = pygraph.train_step(basic(ours), options=UNFUSED)
    assert_equal_training(step, basic(theirs), ours, theirs, steps=4)
    assert any(reason in note for report in pygraph.reports() for note in report.notes)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(FEATURES, FEATURES, batch_first=True), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.lstm(x[:, None])[0][:, 0])


def test_what_dynamo_fails_at_runs_as_it_is_and_is_told_with_its_line() -> None:
    ours, theirs = setup(OPTIMIZERS["sgd"], Recurrent), setup(OPTIMIZERS["sgd"], Recurrent)
    step = pygraph.train_step(basic(ours), options=UNFUSED)
    assert_equal_training(step, basic(theirs), ours, theirs, steps=3)
    assert any("self.lstm" in line.code for report in pygraph.reports() for line in report.origin.breaks)
    told = {note for report in pygraph.reports() for note in report.notes if "LSTM" in note}
    if torch.__version__ < "2.14":  # from then on, Dynamo ends the graph there and goes on
        (note,) = told
        assert note.startswith(f"forward runs as it is: Unsupported at {__file__}:")
    assert any("with held=[model, optimizer]" in note for report in pygraph.reports() for note in report.notes)


class InParts(nn.Module):
    """A graph ends within it."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        made: torch.Tensor = self.last(x)
        return made


def replays_of(kind: str) -> int:
    """Of all programs, or captured callables."""
    chosen = [report for report in pygraph.reports() if (report.kind == "callable") == (kind == "callable")]
    return sum(region.record.replays for report in chosen for region in report.regions if region.record is not None)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("known", [True, False])
def test_a_step_in_parts_is_captured_as_it_runs_where_its_state_is_known(known: bool) -> None:
    ours, theirs = (setup(OPTIMIZERS["nesterov"], InParts) for _ in range(2))
    held = [ours.model, {"optimizer": ours.optimizer}] if known else None
    step = pygraph.train_step(basic(ours), held=held, options={"frames": True})  # an option of compiled programs alone

    def new_memory(of: Setup, index: int) -> None:
        if index == 5:
            of.model.last.weight.data = of.model.last.weight.data.clone()

    assert_equal_training(step, basic(theirs), ours, theirs, steps=9, after=new_memory)
    assert replays_of("callable") == (6 if known else 0)
    notes = [note for report in pygraph.reports() for note in report.notes]
    assert ("Dynamo leaves the step in parts: from here on, pygraph.graph captures it as it runs" in notes) == known


@pytest.mark.usefixtures("fresh")
def test_a_step_in_parts_that_takes_items_of_an_iterator_is_left_to_dynamo() -> None:
    """A capture would take items that no step uses."""
    ours, theirs = (setup(OPTIMIZERS["sgd"], InParts) for _ in range(2))

    def scaled(of: Setup) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        scales, inner = itertools.count(1.0), basic(of)
        return lambda x, y: inner(x * next(scales), y)

    step = pygraph.train_step(scaled(ours), held=[ours.model, ours.optimizer])
    assert_equal_training(step, scaled(theirs), ours, theirs, steps=6)
    assert not any(report.kind == "callable" for report in pygraph.reports())
    notes = [note for report in pygraph.reports() for note in report.notes]
    assert any(note.endswith("items of scales, an iterator: pass them as arguments") for note in notes)


@pytest.mark.usefixtures("fresh")
def test_a_step_in_parts_that_leads_to_a_file_is_captured_as_it_runs() -> None:
    ours, log = setup(OPTIMIZERS["sgd"], InParts), io.StringIO()
    inner = basic(ours)
    step = pygraph.train_step(lambda x, y: None if log.closed else inner(x, y), held=[ours.model, ours.optimizer])
    for x, y in batches(5):
        step(x, y)
    assert replays_of("callable") > 0


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("inner", [False, True])
def test_a_step_that_dynamo_compiles_too_often_goes_on_in_parts(inner: bool) -> None:
    """The model is compiled then, also where a part behind a graph break varies; captures, which know nothing of the
    name, do not take it over."""
    ours, theirs = (setup(model=one_layer) for _ in range(2))
    mode = types.SimpleNamespace(name="")

    def varied(of: Setup) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if inner and of is ours:
                torch._dynamo.graph_break()
            loss = nn.functional.mse_loss(of.model(x * 2 if mode.name.endswith("1") else x), y)
            loss.backward()
            of.optimizer.step()
            of.optimizer.zero_grad()
            return loss.detach()

        return step

    def rename(of: Setup, index: int) -> None:
        mode.name = f"name{index}"
        if index == 2:  # no fourth program: Python runs the step, and raises
            with pytest.raises(AttributeError, match="size"):
                step(batches(1)[0][0], cast("Any", None))
            of.optimizer.zero_grad()

    step = pygraph.train_step(varied(ours), held=None if inner else [ours.model, ours.optimizer])
    with torch._dynamo.config.patch(recompile_limit=3):
        assert_equal_training(step, varied(theirs), ours, theirs, steps=14, after=rename)
    assert ours.replays >= 6
    notes = [note for report in pygraph.reports() for note in report.notes]
    assert sum("too often: from here on it runs in parts" in note for note in notes) == 1
    assert not any(report.kind == "callable" for report in pygraph.reports())


@pytest.mark.usefixtures("fresh")
def test_a_whole_step_stays_one_program_where_its_state_is_known() -> None:
    ours, theirs = (setup(OPTIMIZERS["sgd"], one_layer) for _ in range(2))
    step = pygraph.train_step(basic(ours), held=[ours.model, ours.optimizer])
    assert_equal_training(step, basic(theirs), ours, theirs, steps=3)
    for x, y in batches(3, batch=2):  # compiled again, whole
        step(x, y)
    assert not any(report.kind == "callable" for report in pygraph.reports())


@pytest.mark.usefixtures("fresh")
def test_a_call_that_raises_while_it_is_traced_leaves_the_programs_of_others() -> None:
    ours, theirs = (setup(OPTIMIZERS["sgd"], one_layer) for _ in range(2))
    step, eager = pygraph.train_step(basic(ours)), basic(theirs)
    assert_equal_training(step, eager, ours, theirs, steps=3)
    before = ours.replays
    for x, y in batches(2):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            step(x[:, 1:], y)
    assert_equal_training(step, eager, ours, theirs, steps=3)
    assert (ours.compiled, ours.replays) == (1, before + 3)
    for x, y in batches(2, batch=2):
        torch.testing.assert_close(step(x, y), eager(x, y), rtol=1e-4, atol=1e-5)
    assert ours.compiled == 2, "another size is still compiled"


@pytest.mark.usefixtures("fresh")
def test_a_step_in_parts_is_left_to_dynamo_where_processes_train_together() -> None:
    """Each would decide by itself, and wait for collectives that another does not call."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        ours, theirs = (setup(OPTIMIZERS["sgd"], InParts) for _ in range(2))
        step = pygraph.train_step(basic(ours), held=[ours.model, ours.optimizer])
        assert_equal_training(step, basic(theirs), ours, theirs, steps=5)
    finally:
        torch.distributed.destroy_process_group()
    assert not any(report.kind == "callable" for report in pygraph.reports())


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("why", ["refused", "changes"])
def test_a_step_in_parts_is_taken_back_where_no_call_is_replayed(why: str) -> None:
    """Eager's AdamW reads its counters; a rate that is a number is part of what tells calls apart."""
    ours, theirs = (setup(OPTIMIZERS["adamw" if why == "refused" else "sgd"], InParts) for _ in range(2))
    step = pygraph.train_step(basic(ours), held=[ours.model, ours.optimizer])

    def change(of: Setup, index: int) -> None:
        of.optimizer.param_groups[0]["lr"] *= 0.99 if why == "changes" else 1.0

    assert_equal_training(step, basic(theirs), ours, theirs, steps=25, after=change)
    assert replays_of("callable") == 0
    assert replays_of("programs") >= 5 * 2, "of a forward, a backward, or an update"


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("steps", ["inside", "outside"])
def test_a_rate_goes_on_changing_where_held_does_not_tell_of_it(steps: str) -> None:
    """A replay steps no scheduler, and a rate of an optimizer that is not held tells no calls apart."""
    ours, theirs = (setup(OPTIMIZERS["sgd"], InParts) for _ in range(2))
    schedulers = [torch.optim.lr_scheduler.StepLR(of.optimizer, 4) for of in (ours, theirs)]

    def scheduled(of: Setup, scheduler: Any) -> Callable[..., Any]:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with warnings.catch_warnings():  # Dynamo leaves the frame to Python: it does not meet the scheduler
                loss = basic(of)(x, y)
                scheduler.step()
                return loss

        return step if steps == "inside" else basic(of)

    def after(of: Setup, index: int) -> None:
        if steps == "outside":
            schedulers[of is theirs].step()

    one, other = (scheduled(*each) for each in zip((ours, theirs), schedulers, strict=True))
    step = pygraph.train_step(one, held=[ours.model, ours.optimizer] if steps == "inside" else ours.model)
    assert_equal_training(step, other, ours, theirs, steps=9, after=after)


@pytest.mark.usefixtures("fresh")
def test_a_step_that_cannot_be_captured_is_taken_back_with_the_option_strict() -> None:
    """Its parts can."""
    ours, theirs = (setup(OPTIMIZERS["adamw"], InParts) for _ in range(2))
    step = pygraph.train_step(basic(ours), held=[ours.model, ours.optimizer], options={"strict": True})
    assert_equal_training(step, basic(theirs), ours, theirs, steps=6)
    assert replays_of("programs") >= 2


@pytest.mark.usefixtures("fresh")
def test_a_step_is_taken_back_while_another_thread_is_in_it() -> None:
    ours = setup(OPTIMIZERS["sgd"], one_layer)

    def run(x: torch.Tensor, y: torch.Tensor, wait: Callable[[], Any]) -> torch.Tensor:
        wait()  # a graph takes no functions
        return basic(ours)(x, y)

    step = pygraph.train_step(run, held=[ours.model, ours.optimizer])
    begun, over = threading.Event(), threading.Event()
    (batch,) = batches(1)

    def wait() -> None:
        begun.set()
        assert over.wait(20)

    step(*batch, torch.compiler.disable(lambda: None))
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(step, *batch, wait)
        assert begun.wait(20)
        step(*batch, lambda: None)
        over.set()
        assert other.result().isfinite()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("meanwhile", ["tunes", "compiles"])
def test_a_whole_step_is_not_handed_over(meanwhile: str) -> None:
    """Dynamo counts kernels that are tuned in their first call, and what another thread compiles, as compilations."""

    def work() -> None:
        if meanwhile == "tunes":
            with torch._dynamo.utils.dynamo_timed("tune", dynamo_compile_column_us="runtime_triton_autotune_time_us"):
                return
        with ThreadPoolExecutor(1) as pool:
            pool.submit(torch.compile(lambda x: x + 1, backend="eager"), torch.ones(1)).result()

    @torch.library.custom_op("pygraph_tests::works", mutates_args=())
    def works(x: torch.Tensor) -> torch.Tensor:
        work()
        return x.clone()

    works.register_fake(torch.empty_like)
    ours, theirs = (setup(OPTIMIZERS["sgd"], one_layer) for _ in range(2))
    step = pygraph.train_step(lambda x, y: basic(ours)(works(x), y), held=[ours.model, ours.optimizer])
    assert_equal_training(step, basic(theirs), ours, theirs, steps=3)
    assert not any("in parts" in note for report in pygraph.reports() for note in report.notes)


@functools.cache
def log_once(logger: logging.Logger, message: str) -> None:
    logger.warning(message)


@functools.cache
def log_and_return(logger: logging.Logger, message: str) -> logging.Logger:
    logger.warning(message)
    return logger


class Logging(logging.Logger):
    once, chained = log_once, log_and_return

    def often(self, message: str, number: int) -> None:
        self.warning(message, number)


def test_a_message_that_is_logged_once_ends_no_graph(caplog: pytest.LogCaptureFixture) -> None:
    logger = Logging("of a model")
    logger.addHandler(caplog.handler)
    log_once.cache_clear()
    ours, theirs = (setup(OPTIMIZERS["sgd"], one_layer) for _ in range(2))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logger.once("beware")  # type: ignore[call-arg]
        return basic(ours)(x, y)

    assert_equal_training(pygraph.train_step(step, fullgraph=True), basic(theirs), ours, theirs, steps=3)
    assert caplog.messages == ["beware"]
    assert ours.compiled == 1


def test_a_logger_that_a_cached_method_returns_ends_a_graph_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    logger = Logging("of a model")
    logger.addHandler(caplog.handler)
    ours, theirs = (setup(OPTIMIZERS["sgd"], one_layer) for _ in range(2))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logger.chained("beware")  # type: ignore[call-arg]
        return basic(ours)(x, y)

    assert_equal_training(pygraph.train_step(step), basic(theirs), ours, theirs, steps=3)
    assert caplog.messages == ["beware"]
    assert not any("runs as it is" in note for report in pygraph.reports() for note in report.notes)


def test_messages_of_other_programs_are_not_looked_at() -> None:
    """To look at an argument is to guard on it."""
    pygraph.train_step(lambda: None)
    logger, counter, number = Logging("of a model"), CompileCounter(), [0]

    @torch.compile(backend=counter)
    def other(x: torch.Tensor) -> torch.Tensor:
        logger.often("call %s", number[0])
        return x + 1

    with torch._dynamo.config.patch(ignore_logging_functions={Logging.often}):
        for number[0] in range(3):
            other(torch.ones(2))
    assert counter.frame_count == 1
