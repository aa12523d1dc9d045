"""Effects of operators: memory, generators, the host, shapes, order; from schemas, tags and tables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pygraph.frontend.effects import HIDDEN_VIEWS, VIEWS, schema_facts
from pygraph.frontend.lift import lift
from pygraph.ir import PURE, TAGS, Effects, Graph, KernelNode
from pygraph.ir.order import dependences
from tests.frontend.capture import Builder, checked, lift_inference

aten = torch.ops.aten


def only(graph: Graph, op: str) -> KernelNode:
    """The only node of ``graph`` with that operator."""
    (node,) = [node for node in graph.nodes if node.op == op]
    return node


def trace(fn: Callable[..., Any], *args: Tensor) -> Graph:
    """``fn`` traced on fake tensors, those of the meta device standing in for an accelerator."""
    env = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    with FakeTensorMode(shape_env=env, allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(arg, static_shapes=True) for arg in args]
    gm = make_fx(fn, tracing_mode="fake", _allow_non_fake_inputs=True)(*fakes)
    return checked(lift(gm, kind="inference", device_map={"meta": "cuda:0"}))


def effects_of_call(target: Any, *args: Any, value: Any = None, **kwargs: Any) -> Effects:
    """Effects of one call on fresh inputs; fake tensors among the arguments become inputs."""
    builder = Builder()
    nodes = [builder.input(f"x{i}", a) if isinstance(a, Tensor) else a for i, a in enumerate(args)]
    call = builder.call(target, tuple(nodes), builder.fake(4) if value is None else value, **kwargs)
    return builder.lift(call).nodes[0].effects


def cpu(*size: int) -> Tensor:
    return Builder().fake(*size)


def gpu(*size: int, **options: Any) -> Tensor:
    return torch.empty(size, device="meta", **options)


IN_PLACE = {"writes": (0,), "aliases": ((0, 0),)}
COUNTS = gpu(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (effects_of_call(aten.add.Tensor, cpu(4), cpu(4)), PURE),
        (effects_of_call(aten.add_.Tensor, cpu(4), cpu(4)), Effects(**IN_PLACE)),
        (effects_of_call(aten.copy_.default, cpu(4), cpu(4)), Effects(**IN_PLACE, reads=(1,))),
        (effects_of_call(aten.uniform_.default, cpu(4)), Effects(**IN_PLACE, rng="cpu")),
        (effects_of_call(aten.view.default, cpu(4), [2, 2], value=cpu(2, 2)), Effects(aliases=((0, 0),), reads=())),
        (effects_of_call(aten._unsafe_view.default, cpu(4), [4]), Effects(aliases=((0, 0),), reads=())),
        (effects_of_call(aten.reshape.default, cpu(4), [2, 2], value=cpu(2, 2)), Effects(aliases=((0, 0),))),
        (effects_of_call(aten.dropout.default, cpu(4), 0.5, False).aliases, ((0, 0),)),
        (effects_of_call(aten.set_.source_Tensor, cpu(4), cpu(4)).barrier, True),
        (effects_of_call(aten.copy_.default, cpu(4), gpu(4)).sync, True),
        (effects_of_call(aten.copy_.default, cpu(4), gpu(4), True).sync, False),
        (effects_of_call(aten.copy_.default, gpu(4), cpu(4), value=gpu(4)).sync, False),
        (effects_of_call(torch.ops.prims.device_put.default, gpu(4), torch.device("cpu")).sync, True),
        (effects_of_call(aten.equal.default, gpu(4), gpu(4), value=True).sync, True),
        (effects_of_call(aten.nonzero.default, gpu(4), value=gpu(2, 1)), Effects(sync=True, dynamic=True)),
        (effects_of_call(aten.nonzero.default, cpu(4), value=cpu(2, 1)), Effects(dynamic=True)),
        (effects_of_call(aten.repeat_interleave.Tensor, COUNTS, value=gpu(9)), Effects(sync=True, dynamic=True)),
        (effects_of_call(aten.repeat_interleave.Tensor, COUNTS, value=gpu(9), output_size=9), PURE),
        (effects_of_call(torch.ops._c10d_functional.wait_tensor.default, cpu(4)).collective, "unknown"),
        (effects_of_call(torch.ops._c10d_functional.wait_tensor.default, cpu(4)).barrier, True),
    ],
)
def test_effects_of_single_calls(found: object, expected: object) -> None:
    assert found == expected


# -- memory ------------------------------------------------------------------------------------------------------------


def test_an_out_argument_is_written() -> None:
    builder = Builder()
    a, b, out = (builder.input(name, builder.fake(2, 2)) for name in ("a", "b", "out"))
    call = builder.call(aten.mm.out, (a, b), builder.fake(2, 2), out=out)
    found = builder.lift(call).nodes[0].effects
    assert (found.writes, found.aliases) == ((2,), ((0, 2),))


def test_every_tensor_of_a_written_list_is_written() -> None:
    builder = Builder()
    xs = [builder.input(f"x{i}", builder.fake(4)) for i in range(3)]
    builder.call(aten._foreach_add_.List, (xs[:2], [xs[2], xs[2]]), None)
    found = builder.lift().nodes[0].effects
    assert found == Effects(writes=(0, 1))


@pytest.mark.parametrize("op", [aten.split.Tensor, aten.unsafe_split.Tensor, aten.chunk.default, aten.unbind.int])
def test_each_part_of_a_tensor_is_a_view_of_it(op: Any) -> None:
    count = 2 if op is not aten.unbind.int else 0
    found = effects_of_call(op, cpu(4, 4), count, value=[cpu(2, 4), cpu(2, 4)])
    assert found == Effects(aliases=((0, 0), (1, 0)), reads=())


def test_an_epilogue_comes_after_all_uses_of_what_it_overwrites() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        z = x.view(-1)[2:] * 2
        x.copy_(y)
        return z

    graph = lift_inference(step, torch.randn(4, 4), torch.randn(4, 4))
    copy = only(graph, "aten.copy_.default")
    before = {edge[0].op for edge in dependences(graph) if edge[1] is copy}
    assert "aten.mul.Tensor" in before


def test_results_of_several_alias_by_their_place() -> None:
    found = effects_of_call(aten.sort.values, cpu(4), value=(cpu(4), cpu(4)), values=None, indices=None)
    assert found.writes == ()
    builder = Builder()
    x, values, indices = (builder.input(name, builder.fake(4)) for name in ("x", "values", "indices"))
    call = builder.call(aten.sort.values, (x,), (builder.fake(4), builder.fake(4)), values=values, indices=indices)
    found = builder.lift(call).nodes[0].effects
    assert (found.writes, found.aliases) == ((1, 2), ((0, 1), (1, 2)))


# -- generators --------------------------------------------------------------------------------------------------------


def test_dropout_draws_a_seed_and_computes_from_it() -> None:
    graph = lift_inference(lambda x: torch.nn.functional.dropout(x, 0.5), torch.randn(4, 4))
    assert only(graph, "prims.inductor_seeds.default").effects == Effects(rng="cpu")
    assert only(graph, "prims.inductor_random.default").effects == PURE
    assert only(graph, "prims.inductor_lookup_seed.default").effects == PURE


def test_draws_name_the_device_of_their_generator() -> None:
    graph = trace(lambda x: torch.rand(4, device=x.device) + torch.bernoulli(x), gpu(4))
    assert only(graph, "aten.rand.default").effects == Effects(rng="cuda:0")
    assert only(graph, "aten.bernoulli.default").effects == Effects(rng="cuda:0")


@pytest.mark.parametrize(("dropout", "expected"), [(0.0, None), (0.1, "cpu")])
def test_attention_draws_only_with_dropout(dropout: float, expected: str | None) -> None:
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    q = cpu(1, 2, 4, 8)
    assert effects_of_call(op, q, q, q, dropout, value=(q, cpu(1, 2, 4))).rng == expected


# -- the host ----------------------------------------------------------------------------------------------------------


def test_reading_a_value_waits_for_it() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        graph = lift_inference(lambda x: x * x.sum().int().item(), torch.ones(4))
    item = only(graph, "aten._local_scalar_dense.default")
    assert item.effects == Effects(sync=True)
    assert item.meta.get(TAGS) == "data_dependent_output"


def test_copies_from_an_accelerator_wait_unless_told_not_to() -> None:
    def step(x: Tensor, c: Tensor) -> list[Tensor]:
        return [x.cpu(), x.to("cpu", non_blocking=True), c.to(x.device), x.to(torch.float64)]

    graph = trace(step, gpu(4), torch.randn(4))
    assert [node.effects.sync for node in graph.nodes] == [True, False, False, False]


def test_masks_as_indices_are_searched() -> None:
    mask, places = gpu(4, dtype=torch.bool), gpu(2, dtype=torch.int64)
    assert _index(aten.index.Tensor, [mask]) == Effects(sync=True, dynamic=True)
    assert _index(aten.index.Tensor, [places]) == PURE
    assert _index(aten.index_put.default, [mask], gpu(3)) == Effects(sync=True)
    assert _index(aten.index_put.default, [mask], gpu()) == PURE
    assert _index(aten.index_put.default, [None, places], gpu(2)) == PURE


def _index(op: Any, indices: list[Tensor | None], *values: Tensor) -> Effects:
    builder = Builder()
    x = builder.input("x", gpu(4, 4))
    picked = [None if t is None else builder.input(f"i{n}", t) for n, t in enumerate(indices)]
    rest = [builder.input(f"v{n}", t) for n, t in enumerate(values)]
    return builder.lift(builder.call(op, (x, picked, *rest), gpu(4))).nodes[0].effects


# -- checks, barriers, tags --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten._assert_async.msg, (cpu(1), "message")),
        (aten._assert_scalar.default, (True, "message")),
        (aten._assert_tensor_metadata.default, (cpu(1),)),
        (aten.sym_constrain_range.default, (3,)),
    ],
)
def test_checks_are_kept_but_order_nothing(op: Any, args: tuple[Any, ...]) -> None:
    builder = Builder()
    nodes = [builder.input(f"x{i}", a) if isinstance(a, Tensor) else a for i, a in enumerate(args)]
    builder.call(op, tuple(nodes), None)
    found = builder.lift().nodes[0].effects
    assert not found.is_pure
    assert (found.barrier, found.sync, found.writes) == (False, False, ())


@pytest.fixture(scope="module")
def library() -> Iterator[torch.library.Library]:
    """Custom operators of every kind of effect."""
    with torch.library._scoped_library("frontend_test", "DEF") as lib:
        lib.define("plain(Tensor x) -> Tensor")
        lib.define("unsafe(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
        lib.define("noise(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
        lib.define("bump(Tensor x, Tensor(a!) y, *, Tensor(b!)? z=None) -> ()")
        lib.define("log(Tensor x) -> ()")
        lib.define("view(Tensor(a) x) -> Tensor(a)")
        yield lib


@pytest.mark.parametrize(
    ("name", "expected", "tags"),
    [
        ("plain", PURE, None),
        ("unsafe", PURE, "cudagraph_unsafe"),
        ("noise", Effects(rng="cpu"), "nondeterministic_seeded"),
        ("log", Effects(barrier=True), None),
        ("view", Effects(aliases=((0, 0),)), None),
    ],
)
def test_custom_operators(library: torch.library.Library, name: str, expected: Effects, tags: str | None) -> None:
    op = getattr(torch.ops.frontend_test, name).default
    builder = Builder()
    x = builder.input("x", builder.fake(4))
    returns = len(op._schema.returns)
    call = builder.call(op, (x,), builder.fake(4) if returns else None)
    node = builder.lift(call if returns else None).nodes[0]
    assert (node.op, node.effects, node.meta.get(TAGS)) == (f"frontend_test.{name}.default", expected, tags)
    assert node.cost.flops is None
    assert node.cost.launches is None


def test_a_custom_operator_writes_what_its_schema_says(library: torch.library.Library) -> None:
    builder = Builder()
    x, y, z = (builder.input(name, builder.fake(4)) for name in "xyz")
    builder.call(torch.ops.frontend_test.bump.default, (x, y), None, z=z)
    assert builder.lift().nodes[0].effects == Effects(writes=(1, 2))


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
    assert effects_of_call(handler, cpu(4)) == PURE


def test_a_python_function_may_do_anything() -> None:
    builder = Builder()
    x = builder.input("x", builder.fake(4))
    call = builder.call(torch.nn.functional.relu, (x,), builder.fake(4))
    assert builder.lift(call).nodes[0].effects == Effects(barrier=True)


# -- collectives -------------------------------------------------------------------------------------------------------


@pytest.fixture
def process_group() -> Iterator[Any]:
    """A process group of two whose operators do nothing."""
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def test_collectives_keep_their_order_in_the_group(process_group: Any) -> None:
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


def test_waiting_completes_the_memory_that_it_waits_for(process_group: Any) -> None:
    import torch.distributed._functional_collectives as functional

    graph = lift_inference(lambda x: functional.all_reduce(x, "sum", process_group) + 1, torch.randn(4))
    wait = only(graph, "_c10d_functional.wait_tensor.default")
    assert (wait.effects.writes, wait.effects.aliases) == ((0,), ((0, 0),))
