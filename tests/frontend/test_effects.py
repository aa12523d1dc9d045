"""Effects of operators: memory, generators, the host, shapes, order; from schemas, tags and tables."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from pygraph.frontend.effects import HIDDEN_VIEWS, VIEWS, schema_facts
from pygraph.ir import PURE, TAGS, Effects
from pygraph.ir.order import dependences
from tests.frontend.capture import fake, lift_inference, node_of, only

aten = torch.ops.aten


def effects(target: Any, *args: Any, **kwargs: Any) -> Effects:
    """The effects of one call."""
    return node_of(target, *args, **kwargs).effects


def gpu(*size: int, **options: Any) -> Tensor:
    return torch.empty(size, device="meta", **options)


IN_PLACE = {"writes": (0,), "aliases": ((0, 0),)}
COUNTS, PLACES, MASK = (gpu(4, dtype=dtype) for dtype in (torch.int64, torch.int64, torch.bool))
HALVES, PARTS = [fake(2, 4), fake(2, 4)], Effects(aliases=((0, 0), (1, 0)), reads=())
ATTENTION, Q = aten._scaled_dot_product_flash_attention_for_cpu.default, fake(1, 2, 4, 8)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (effects(aten.add.Tensor, fake(4), fake(4)), PURE),
        (effects(aten.add_.Tensor, fake(4), fake(4)), Effects(**IN_PLACE)),
        (effects(aten.copy_.default, fake(4), fake(4)), Effects(**IN_PLACE, reads=(1,))),
        (effects(aten.uniform_.default, fake(4)), Effects(**IN_PLACE, rng="cpu")),
        (effects(aten.view.default, fake(4), [2, 2], value=fake(2, 2)), Effects(aliases=((0, 0),), reads=())),
        (effects(aten._unsafe_view.default, fake(4), [4]), Effects(aliases=((0, 0),), reads=())),
        (effects(aten.reshape.default, fake(4), [2, 2], value=fake(2, 2)), Effects(aliases=((0, 0),))),
        (effects(aten.dropout.default, fake(4), 0.5, False).aliases, ((0, 0),)),
        (effects(aten.set_.source_Tensor, fake(4), fake(4)).barrier, True),
        (effects(aten.copy_.default, fake(4), gpu(4)).sync, True),
        (effects(aten.copy_.default, fake(4), gpu(4), True).sync, False),
        (effects(aten.copy_.default, gpu(4), fake(4), value=gpu(4)).sync, False),
        (effects(aten._to_copy.default, gpu(4), device=torch.device("cpu")).sync, True),
        (effects(aten._to_copy.default, gpu(4), device=torch.device("cpu"), non_blocking=True).sync, False),
        (effects(aten._to_copy.default, gpu(4), dtype=torch.float64, value=gpu(4)).sync, False),
        (effects(torch.ops.prims.device_put.default, gpu(4), torch.device("cpu")).sync, True),
        (effects(aten.equal.default, gpu(4), gpu(4), value=True).sync, True),
        (effects(aten._local_scalar_dense.default, gpu(1), value=1), Effects(sync=True)),
        (effects(aten.nonzero.default, gpu(4), value=gpu(2, 1)), Effects(sync=True, dynamic=True)),
        (effects(aten.nonzero.default, fake(4), value=fake(2, 1)), Effects(dynamic=True)),
        (effects(aten.repeat_interleave.Tensor, COUNTS, value=gpu(9)), Effects(sync=True, dynamic=True)),
        (effects(aten.repeat_interleave.Tensor, COUNTS, value=gpu(9), output_size=9), PURE),
        (effects(torch.ops._c10d_functional.wait_tensor.default, fake(4)).collective, "unknown"),
        (effects(torch.ops._c10d_functional.wait_tensor.default, fake(4)).barrier, True),
        # each part of a tensor is a view of it
        (effects(aten.split.Tensor, fake(4, 4), 2, value=HALVES), PARTS),
        (effects(aten.unsafe_split.Tensor, fake(4, 4), 2, value=HALVES), PARTS),
        (effects(aten.unbind.int, fake(4, 4), value=HALVES), PARTS),
        # arguments that are written: by name, in a list, several
        (effects(aten.mm.out, fake(2, 2), fake(2, 2), out=fake(2, 2)), Effects(writes=(2,), aliases=((0, 2),))),
        (
            effects(aten._foreach_add_.List, [fake(4), fake(4)], [fake(4), fake(4)], value=()),
            Effects(writes=(0, 1)),
        ),
        (
            effects(aten.sort.values, fake(4), value=(fake(4), fake(4)), values=fake(4), indices=fake(4)),
            Effects(writes=(1, 2), aliases=((0, 1), (1, 2))),
        ),
        # masks as indices are searched, but for a fill with one value
        (effects(aten.index.Tensor, gpu(4, 4), [MASK], value=gpu(4)), Effects(sync=True, dynamic=True)),
        (effects(aten.index.Tensor, gpu(4, 4), [PLACES], value=gpu(4)), PURE),
        (effects(aten.index_put.default, gpu(4, 4), [MASK], gpu(3), value=gpu(4, 4)), Effects(sync=True)),
        (effects(aten.index_put.default, gpu(4, 4), [MASK], gpu(), value=gpu(4, 4)), PURE),
        (effects(aten.index_put.default, gpu(4, 4), [None, PLACES], gpu(2), value=gpu(4, 4)), PURE),
        # draws name the device of their generator; attention draws only with dropout
        (effects(aten.bernoulli.default, gpu(4), value=gpu(4)), Effects(rng="meta")),
        (effects(ATTENTION, Q, Q, Q, 0.0, value=(Q, fake(1, 2, 4))).rng, None),
        (effects(ATTENTION, Q, Q, Q, 0.1, value=(Q, fake(1, 2, 4))).rng, "cpu"),
    ],
)
def test_effects_of_single_calls(found: object, expected: object) -> None:
    assert found == expected


def test_dropout_draws_a_seed_and_computes_from_it() -> None:
    graph = lift_inference(lambda x: torch.nn.functional.dropout(x, 0.5), torch.randn(4, 4))
    assert only(graph, "prims.inductor_seeds.default").effects == Effects(rng="cpu")
    assert only(graph, "prims.inductor_random.default").effects == PURE
    assert only(graph, "prims.inductor_lookup_seed.default").effects == PURE


# -- checks, barriers, tags --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten._assert_async.msg, (fake(1), "message")),
        (aten._assert_scalar.default, (True, "message")),
        (aten._assert_tensor_metadata.default, (fake(1),)),
        (aten.sym_constrain_range.default, (3,)),
    ],
)
def test_checks_are_kept_but_order_nothing(op: Any, args: tuple[Any, ...]) -> None:
    found = effects(op, *args, value=())
    assert found != PURE
    assert (found.barrier, found.sync, found.writes) == (False, False, ())


@pytest.fixture(scope="module")
def library() -> Iterator[torch.library.Library]:
    """Custom operators of every kind of effect."""
    with torch.library._scoped_library("frontend_test", "DEF") as lib:
        lib.define("plain(Tensor x) -> Tensor")
        lib.define("unsafe(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
        lib.define("noise(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
        lib.define("bump(Tensor(a!) x, Tensor(b!)? y=None) -> ()")
        lib.define("log(Tensor x) -> ()")
        lib.define("view(Tensor(a) x) -> Tensor(a)")
        yield lib


@pytest.mark.parametrize(
    ("name", "expected", "tags"),
    [
        ("plain", Effects(rng="cpu"), None),
        ("unsafe", Effects(rng="cpu"), "cudagraph_unsafe"),
        ("noise", Effects(rng="cpu"), "nondeterministic_seeded"),
        ("log", Effects(rng="cpu", barrier=True), None),
        ("view", Effects(aliases=((0, 0),), rng="cpu"), None),
        ("bump", Effects(writes=(0, 1), rng="cpu"), None),
    ],
)
def test_custom_operators(library: torch.library.Library, name: str, expected: Effects, tags: str | None) -> None:
    op = getattr(torch.ops.frontend_test, name).default
    args = [fake(4) for _ in op._schema.arguments]
    node = node_of(op, *args, value=None if op._schema.returns else ())
    assert (node.op, node.effects, node.meta.get(TAGS)) == (f"frontend_test.{name}.default", expected, tags)
    assert node.cost.flops is None
    assert node.cost.launches is None


@pytest.mark.parametrize("name", sorted(VIEWS | HIDDEN_VIEWS))
def test_each_view_is_known_to_share_memory(name: str) -> None:
    namespace, operator = name.split(".")
    packet = getattr(getattr(torch.ops, namespace), operator)
    facts = [schema_facts(getattr(packet, overload)) for overload in packet.overloads()]
    functional = [f for f in facts if f is not None and not f.written]
    assert functional
    assert all(f.aliases or f.composite or name in HIDDEN_VIEWS for f in functional)


def test_a_lowering_of_inductor_only_computes() -> None:
    def mm_plus_mm(*args: Any) -> None: ...

    mm_plus_mm.__module__, mm_plus_mm.__qualname__ = "torch._inductor.fx_passes.post_grad", "mm_plus_mm"
    handler = functools.wraps(mm_plus_mm)(functools.partial(mm_plus_mm, "match"))
    assert effects(handler, fake(4)) == PURE


@pytest.fixture
def process_group() -> Iterator[Any]:
    """A process group of two whose operators do nothing."""
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def test_collectives_keep_their_order_in_the_group_and_a_wait_completes_its_memory(process_group: Any) -> None:
    import torch.distributed._functional_collectives as functional

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        y = functional.all_reduce(x * 2, "sum", process_group)
        return y.relu(), functional.all_gather_tensor(x, 0, process_group)

    graph = lift_inference(step, torch.randn(4, 4))
    calls = [node for node in graph.nodes if node.op.startswith("_c10d_functional.")]
    assert [node.effects.collective for node in calls] == [process_group.group_name] * 4
    assert not any(node.effects.barrier for node in calls)
    order = {(a.name, b.name) for a, b in dependences(graph)}
    assert all((a.name, b.name) in order for a, b in pairwise(calls))
    waits = [node.effects for node in calls if node.op == "_c10d_functional.wait_tensor.default"]
    assert [(wait.writes, wait.aliases) for wait in waits] == [((0,), ((0, 0),))] * 2
