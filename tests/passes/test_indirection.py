"""Indirection: what becomes of each value that a region reads from outside, why, and at which modelled cost."""

from __future__ import annotations

import dataclasses

import pytest

from pygraph.errors import PassError
from pygraph.ir import H200, UNKNOWN, Graph, OpaqueType, Parameter, Stage, symbol
from pygraph.passes import PassContext, PassManager
from pygraph.passes.indirection import Indirection
from tests.passes.build import TENSOR, build

CTX = PassContext("cuda", H200)


def decide(graph: Graph, region: int = 0, copies: str = "cheaper") -> dict[str, Parameter]:
    """The parameters of ``region``, by name of the value."""
    PassManager(f"partitioning,indirection{{copies={copies}}}", check="full").run(graph, CTX)
    return {value.name: parameter for value, parameter in graph.regions[region].parameters.items()}


def decisions(graph: Graph, region: int = 0, copies: str = "cheaper") -> dict[str, str]:
    return {name: parameter.decision for name, parameter in decide(graph, region, copies).items()}


def test_parameters_are_what_is_read_from_outside_in_order_of_first_use() -> None:
    graph = build("a: launch y x", "b: launch a w", "u: host b", "c: launch a u z")
    assert list(decide(graph)) == ["y", "x", "w"]
    assert list(decide(graph, 1)) == ["a", "u", "z"]


def test_what_keeps_its_address_is_static() -> None:
    parameters = decide(build("a: launch x w", "b: launch a s0"))
    assert parameters["w"] == Parameter("static", "its address stays: guarded", 0.0)
    assert parameters["s0"] == Parameter("static", "scalar: part of the region's key", 0.0)
    assert parameters["x"].decision == "patched"


def test_constants_and_opaque_values_are_static() -> None:
    graph = build("a: launch x y z")
    x, y, _ = graph.inputs
    x.role = "constant"
    graph.set_type(y, OpaqueType("generator"))
    assert decisions(graph) == {"x": "static", "y": "static", "z": "patched"}


def test_few_launches_are_patched_at_their_cost() -> None:
    parameter = decide(build("a: launch x", "b: launch x", "c: launch a b"))["x"]
    assert parameter.decision == "patched"
    assert parameter.cost_us == pytest.approx(2 * H200.patch_us)
    assert parameter.reason == "patching 2 × 0.24 µs, copying 2.90 µs"


def test_little_memory_that_many_launches_use_is_copied() -> None:
    parameter = decide(build("a: many x", "b: launch a y"))["x"]
    assert (parameter.decision, parameter.cost_us) == ("copied", H200.copy_us)


def test_nothing_is_copied_unless_that_is_asked_for() -> None:
    """Copies take the device's time as well, of which the model says nothing."""
    assert Indirection().copies == "never"
    parameter = decide(build("a: many x", "b: launch a y"), copies="never")["x"]
    assert (parameter.decision, parameter.cost_us) == ("patched", pytest.approx(40 * H200.patch_us))
    assert parameter.reason == "patching 40 × 0.24 µs, copying 2.90 µs"


def test_every_input_can_be_copied_that_nobody_would_miss() -> None:
    rows = ("a: launch x w", "m: write y a", "v: view z", "b: launch m v s0")
    found = decisions(build(*rows, returns="b v"), copies="always")
    assert found == {"x": "copied", "w": "static", "y": "patched", "z": "patched", "s0": "static"}
    parameter = decide(build("a: unknown x"), copies="always")["x"]
    assert (parameter.decision, parameter.reason) == ("copied", "asked for")


@pytest.mark.parametrize("copies", ["cheaper", "always"])
def test_what_the_program_makes_outside_of_the_region_is_patched(copies: str) -> None:
    parameter = decide(build("u: host x", "a: many u"), copies=copies)["u"]
    assert (parameter.decision, parameter.reason) == ("patched", "the program itself makes it")


def test_much_memory_is_patched_however_many_launches_use_it() -> None:
    graph = build("a: many x")
    graph.set_type(graph.inputs[0], dataclasses.replace(TENSOR, shape=(1 << 28,)))
    assert decisions(graph) == {"x": "patched"}


def test_launches_behind_views_are_counted() -> None:
    parameter = decide(build("v: view x", "w1: view v", "a: launch w1", "b: launch v", "c: launch x"))["x"]
    assert parameter.cost_us == pytest.approx(3 * H200.patch_us)


@pytest.mark.parametrize("rows", [("m: write x", "a: many x"), ("v: view x", "m: write v", "a: many x")])
def test_what_the_region_writes_is_never_copied(rows: tuple[str, ...]) -> None:
    parameter = decide(build(*rows))["x"]
    assert (parameter.decision, parameter.reason) == ("patched", "the region writes its memory")


def test_what_shares_written_memory_outside_the_region_is_never_copied() -> None:
    # v and x come in separately and are the same memory
    graph = build("u: host x", "o: launch x u", "h: host o", "m: write x h", "a: many v h", "v2: launch m a")
    view = graph.add("test.view", [graph.value("x")], [TENSOR], name="v0", before=graph.node("u"))
    view.effects = dataclasses.replace(graph.node("u").effects, aliases=((0, 0),))
    view.meta = graph.node("u").meta.copy()
    graph.replace_uses(graph.value("v"), view.output)
    parameters = decide(graph, 1)
    assert parameters["x"].decision == parameters["v0"].decision == "patched"
    assert parameters["v0"].reason == "the region writes its memory"


def test_what_a_result_shares_is_never_copied() -> None:
    graph = build("a: many x", "v: view x", returns="a v")
    assert decide(graph)["x"].reason == "a result shares its memory"


def test_unknown_launches_are_patched_at_unknown_cost() -> None:
    parameter = decide(build("a: unknown x"))["x"]
    assert parameter == Parameter("patched", "launches or bytes are unknown", None)


def test_unknown_bytes_are_patched() -> None:
    graph = build("a: many x", "b: launch y")
    graph.set_type(graph.inputs[0], dataclasses.replace(TENSOR, shape=(symbol("s7"),)))
    parameter = decide(graph)["x"]
    assert parameter.decision == "patched"
    assert parameter.cost_us == pytest.approx(40 * H200.patch_us)


def test_symbols_are_valued_by_hints_and_context() -> None:
    def graph() -> Graph:
        made = build("a: many x")
        made.set_type(made.inputs[0], dataclasses.replace(TENSOR, shape=(symbol("s7"),)))
        made.hints["s7"] = 4
        return made

    assert decisions(graph()) == {"x": "copied"}
    large = PassContext("cuda", H200, {"s7": 1 << 28})
    other = graph()
    PassManager("partitioning,indirection{copies=cheaper}").run(other, large)
    assert [parameter.decision for parameter in other.regions[0].parameters.values()] == ["patched"]


def test_running_again_says_so_only_when_something_changes() -> None:
    graph = build("a: launch x w", "u: host a", "b: launch u")
    decide(graph)
    assert not Indirection().run(graph, CTX).modified
    graph.regions[0].parameters.popitem()
    result = Indirection().run(graph, CTX)
    assert result.modified
    assert result.notes == ("region parameters: 1 static, 2 patched, 0 copied",)


def test_a_graph_without_regions_is_left_alone() -> None:
    graph = build("u: host x")
    PassManager("partitioning,indirection", check="full").run(graph, CTX)
    assert graph.stage is Stage.INDIRECTED


def test_an_unpartitioned_graph_is_refused() -> None:
    with pytest.raises(PassError, match="requires a graph at stage partitioned"):
        PassManager("indirection").run(build("a: launch x"))


def test_unknown_cost_of_nodes_is_not_taken_for_nothing() -> None:
    graph = build("a: launch x", "b: launch x")
    graph.set_cost(graph.node("b"), UNKNOWN)
    assert decide(graph)["x"].cost_us is None
