"""Inductor's emitted text: regions, arguments, kernels, comments put into it, and which operators each line runs."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pygraph.inductor.decision import Decision, Placed
from pygraph.inductor.emitted import PatternNode, Step, annotate, line_origins, read_program
from pygraph.program.recording import Origin

SOURCE = '''
cpp_fused_add_0 = async_compile.cpp_pybinding(['const float*'], r"""kernel""")

def partition_0(args):
    arg1_1, arg0_1, s0 = args
    args.clear()
    s0 = s0
    buf0 = empty_strided_cpu((s0, 4), (4, 1), torch.float32)
    extern_kernels.addmm(arg1_1, reinterpret_tensor(arg0_1, (4, 4), (1, 4), 0), out=buf0)
    del arg0_1
    cpp_fused_add_0(buf0, s0)
    return (buf0, )

def partition_1(args):
    buf1, = args
    args.clear()
    buf2 = torch.ops.aten.sort.stable(buf1)
    return (buf2[0], )

class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
        arg0_1, arg1_1, arg2_1 = args
        args.clear()
        (buf0,) = self.partitions[0]([arg1_1, arg0_1, arg2_1])
        u0 = buf0.item()
        aten.nonzero.default(buf0)
        return (buf0, )
'''


def test_regions_and_outside_are_read() -> None:
    program = read_program(SOURCE)
    first, second = program.regions
    assert first.arguments == ("arg1_1", "arg0_1", "s0")
    assert first.kernels == ("extern_kernels.addmm", "cpp_fused_add_0")
    assert second.arguments == ("buf1",)
    assert second.kernels == ("aten.sort.stable",)
    assert program.outside == ("item", "aten.nonzero.default")


def test_comments_stand_above_their_region_and_the_text_still_parses() -> None:
    text = annotate(SOURCE, {0: ["first"], 1: ["second", "more"]}, ["head"])
    assert text.startswith("# head\n")
    assert "# first\ndef partition_0(args):" in text
    assert "# second\n# more\ndef partition_1(args):" in text
    assert read_program(text).regions[1].kernels == ("aten.sort.stable",)


# -- lines: exact where the text shows it, never wrong -----------------------------------------------------------------

OPS = {
    "mm": ("aten.mm.default", "m.py:1"),
    "relu": ("aten.relu.default", "m.py:2"),
    "late": ("lib.late.default", "m.py:3"),
    "put": ("hop.auto_functionalized_v2", "m.py:4"),
    "put_1": ("hop.auto_functionalized_v2", "m.py:5"),
    "add": ("aten.add.Tensor", "m.py:6"),
    "sum_1": ("aten.sum.dim_IntList", "m.py:7"),
}


MODULES = {"relu": "block.act", "add": "block", "sum_1": "block"}

NODES = {name: Placed(op, 0, None, True, loc=loc, module=MODULES.get(name, "")) for name, (op, loc) in OPS.items()}
DECISION = Decision("cpu", NODES, frozenset({0}), "legality")


def step(buffers: str, *origins: str, launches: bool = True, made: tuple[PatternNode, ...] = ()) -> Step:
    return Step(tuple(buffers.split()), origins, launches, None, made)


def origins(body: str, *steps: Step) -> Mapping[str, Origin]:
    """Map each line of a region's function, by its text, to the origin of its work; lines that run nothing are left
    out."""
    lines = ["def partition_0(args):", *(f"    {line}" for line in body.strip().splitlines())]
    source = "\n".join(["import torch", "", *lines, ""])
    (found,) = line_origins(source, read_program(source).regions, [steps], DECISION)
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
        "cpp_fused_relu_0(buf1)": Origin(("relu",), ("m.py:2",), ("block.act",)),
        "buf2 = torch.ops.lib.late.default(buf1)": Origin(("late",), ("m.py:3",)),
        "cpp_fused_sum_1(buf3, buf5)": Origin(("add", "sum_1"), ("m.py:6", "m.py:7"), ("block",)),
    }


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


RELU, MM, SUM, ADD = step("buf1", "relu"), step("buf6", "mm"), step("buf7", "sum_1"), step("buf8", "add")
MANY = "cpp_fused_relu_0(a, buf1)\n{}(buf1, a)\nextern_kernels.mm(buf1, b, out=buf6)"


@pytest.mark.parametrize(
    ("body", "steps", "expected"),
    [
        (MANY.format("torch.ops.lib.put.default"), (RELU, *PUTS, MM), [("put_default", "put_default_1"), ("mm",)]),
        (MANY.format("cpp_fused_copy_1"), (RELU, SUM, ADD, MM), [("relu", "sum_1", "add", "mm"), ("mm",)]),
        (
            "extern_kernels.mm(a, b, out=buf6)\ncpp_fused_add_sum_1(buf6, buf7)",
            (MM, SUM, ADD),
            [("mm",), ("sum_1", "add")],
        ),
        (
            "extern_kernels.mm(a, b, out=buf6)\ncpp_fused_sum_1(buf1, buf6, buf7)",
            (RELU, MM, SUM),
            [("mm",), ("sum_1",)],
        ),
        ("buf2 = torch.ops.lib.late.default(x)", (step("buf2", "relu", "late"),), [("late",)]),
    ],
    ids=["count-is-off", "any-neighbour", "several-steps", "consumer-of-an-earlier-buffer", "operator-alone"],
)
def test_all_that_a_statement_may_run_are_named(
    body: str, steps: tuple[Step, ...], expected: list[tuple[str, ...]]
) -> None:
    assert nodes(body, *steps)[-2:] == expected


@pytest.mark.parametrize("head", ["with torch.cuda._DeviceGuard(0):", "if True:"])
def test_statements_inside_of_others_are_found(head: str) -> None:
    body = f"{head}\n    triton_poi_fused_relu_0.run(\n        a,\n        buf1,\n    )"
    found = origins(body, step("buf1", "relu"))
    assert set(found) == {"triton_poi_fused_relu_0.run(", "a,", "buf1,", ")"}
    assert {origin.nodes for origin in found.values()} == {("relu",)}


def test_several_regions_and_a_line_that_runs_nothing() -> None:
    source = "def partition_0(args):\n    cpp_a_0(buf0)\n\ndef partition_1(args):\n    x = 1\n    k_1.run(buf1, 16)\n"
    steps = [[step("buf0", "mm")], [step("buf1", "relu")]]
    first, second = line_origins(source, read_program(source).regions, steps, DECISION)
    assert {line: origin.nodes for line, origin in first.items()} == {1: ("mm",)}
    assert {line: origin.nodes for line, origin in second.items()} == {2: ("relu",)}
