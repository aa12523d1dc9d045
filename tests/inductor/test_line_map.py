"""Lines of an emitted region matched with the operators that they run: exact where the text shows it, never wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from pygraph.inductor.decision import Decision, Placed
from pygraph.inductor.emitted import PatternNode, Step, line_origins, read_program
from pygraph.runtime.provenance import Origin

OPS = {
    "mm": ("aten.mm.default", "m.py:1"),
    "relu": ("aten.relu.default", "m.py:2"),
    "late": ("lib.late.default", "m.py:3"),
    "put": ("hop.auto_functionalized_v2", "m.py:4"),
    "put_1": ("hop.auto_functionalized_v2", "m.py:5"),
    "add": ("aten.add.Tensor", "m.py:6"),
    "sum_1": ("aten.sum.dim_IntList", "m.py:7"),
}


def decision() -> Decision:
    nodes = {name: Placed(op, 0, None, True, loc=loc) for name, (op, loc) in OPS.items()}
    return Decision("cpu", nodes, (0,), frozenset({0}), "legality")


def step(buffers: str, *origins: str, launches: bool = True, made: tuple[PatternNode, ...] = ()) -> Step:
    return Step(tuple(buffers.split()), origins, launches, None, made)


def origins(body: str, *steps: Step) -> Mapping[str, Origin]:
    """What each line of a region's function runs, by the line's text; lines that run nothing are left out."""
    lines = ["def partition_0(args):", *(f"    {line}" for line in body.strip().splitlines())]
    source = "\n".join(["import torch", "", *lines, ""])
    (found,) = line_origins(source, read_program(source).regions, [steps], decision())
    return {lines[number].strip(): origin for number, origin in found.items()}


def nodes(body: str, *steps: Step) -> list[tuple[str, ...]]:
    return [origin.nodes for origin in origins(body, *steps).values()]


def test_buffers_tell_steps_apart() -> None:
    found = origins(
        "a, b = args\n"
        "buf0 = empty_strided_cpu((8, 16), (16, 1), torch.float32)\n"
        "extern_kernels.mm(a, b, out=buf0)\n"
        "buf1 = buf0; del buf0\n"
        "cpp_fused_relu_0(buf1)\n"
        "buf2 = torch.ops.lib.late.default(buf1)\n"
        "buf3 = buf2\n"
        "assert_size_stride(buf3, (8, 16), (16, 1))\n"
        "cpp_fused_sum_1(buf3, buf5)",
        step("buf0", "mm"),
        step("buf1", "relu"),
        step("buf2", "late"),
        step("buf3", "late", launches=False),
        step("buf5", "add", "sum_1"),
    )
    assert found == {
        "extern_kernels.mm(a, b, out=buf0)": Origin(("mm",), ("m.py:1",)),
        "cpp_fused_relu_0(buf1)": Origin(("relu",), ("m.py:2",)),
        "buf2 = torch.ops.lib.late.default(buf1)": Origin(("late",), ("m.py:3",)),
        "cpp_fused_sum_1(buf3, buf5)": Origin(("add", "sum_1"), ("m.py:6", "m.py:7")),
    }


def test_of_an_operators_step_only_the_operator_is_named() -> None:
    body = "buf2 = torch.ops.lib.late.default(x)"
    assert nodes(body, step("buf2", "relu", "late")) == [("late",)]


PUTS = (
    step("buf2 buf3", "put_default", made=(PatternNode("put_default", "lib.put.default", ("put",)),)),
    step("buf4", "put_default_1", made=(PatternNode("put_default_1", "lib.put.default", ("put_1",)),)),
)


def test_work_in_place_is_matched_by_operator_and_order() -> None:
    body = (
        "cpp_fused_relu_0(a, buf1)\n"
        "torch.ops.lib.put.default(buf1, a)\n"
        "torch.ops.lib.put.default(buf1, b)\n"
        "extern_kernels.mm(buf1, a, out=buf6)"
    )
    found = origins(body, step("buf1", "relu"), *PUTS, step("buf6", "mm"))
    assert [origin.nodes for origin in found.values()] == [("relu",), ("put_default",), ("put_default_1",), ("mm",)]
    assert found["torch.ops.lib.put.default(buf1, b)"].loc == "m.py:5"


def test_where_the_count_is_off_all_that_fit_are_named() -> None:
    body = "cpp_fused_relu_0(a, buf1)\ntorch.ops.lib.put.default(buf1, a)\nextern_kernels.mm(buf1, a, out=buf6)"
    found = nodes(body, step("buf1", "relu"), *PUTS, step("buf6", "mm"))
    assert found[1] == ("put_default", "put_default_1")


def test_a_statement_that_shows_nothing_may_be_any_of_its_neighbours() -> None:
    body = "cpp_fused_relu_0(a, buf1)\ncpp_fused_copy_1(buf1, a)\nextern_kernels.mm(buf1, b, out=buf6)"
    found = nodes(body, step("buf1", "relu"), step("buf7", "add"), step("buf8", "sum_1"), step("buf6", "mm"))
    assert found[1] == ("relu", "add", "sum_1", "mm")
    assert found[2] == ("mm",)


def test_a_kernel_of_several_steps_names_all_of_them() -> None:
    body = "extern_kernels.mm(a, b, out=buf6)\ncpp_fused_add_sum_1(buf6, a, buf7, a)"
    found = nodes(body, step("buf6", "mm"), step("buf7", "sum_1"), step("buf8", "add"))
    assert found == [("mm",), ("sum_1", "add")]


def test_a_consumer_that_mentions_an_earlier_buffer_first_is_not_taken_for_its_maker() -> None:
    body = "extern_kernels.mm(a, b, out=buf6)\ncpp_fused_sum_1(buf1, buf6, buf7)"
    found = nodes(body, step("buf1", "relu"), step("buf6", "mm"), step("buf7", "sum_1"))
    assert found[0] == ("mm",)
    assert found[1] == ("sum_1",)


@pytest.mark.parametrize("head", ["with torch.cuda._DeviceGuard(0):", "if True:", "for _ in (0,):"])
def test_statements_inside_of_others_are_found(head: str) -> None:
    body = f"{head}\n    triton_poi_fused_relu_0.run(\n        a,\n        buf1,\n    )"
    found = origins(body, step("buf1", "relu"))
    assert set(found) == {"triton_poi_fused_relu_0.run(", "a,", "buf1,", ")"}
    assert {origin.nodes for origin in found.values()} == {("relu",)}


def test_a_kernel_of_the_users_is_a_launch() -> None:
    assert nodes("add_kernel_0.run(a, buf1, 16)", step("buf1", "add")) == [("add",)]


def test_several_regions_and_a_line_that_runs_nothing() -> None:
    source = "def partition_0(args):\n    cpp_a_0(buf0)\n\ndef partition_1(args):\n    x = 1\n    cpp_b_1(buf1)\n"
    steps: Sequence[Sequence[Step]] = [[step("buf0", "mm")], [step("buf1", "relu")]]
    first, second = line_origins(source, read_program(source).regions, steps, decision())
    assert {line: origin.nodes for line, origin in first.items()} == {1: ("mm",)}
    assert {line: origin.nodes for line, origin in second.items()} == {2: ("relu",)}
