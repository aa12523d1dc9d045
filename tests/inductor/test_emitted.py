"""Reading Inductor's emitted text: regions, arguments, kernels, and comments put into it."""

from __future__ import annotations

from pygraph.inductor.emitted import annotate, read_program

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
