"""The text by which a program that is one region is entered, and which programs are entered as emitted."""

from __future__ import annotations

import pytest

from pygraph.inductor.entry import entry_text

SOURCE = """
cpp_fused_0 = async_compile.cpp_pybinding(['const float*', 'float*', 'const int64_t'], r''' ''')

class Runner:
    def call(self, args):
        arg0_1, arg1_1, arg2_1, arg3_1 = args
        args.clear()
        s0 = arg2_1
        assert_size_stride(arg0_1, (s0, 2), (2, 1))
        assert_size_stride(arg3_1, (), ())
        buf0 = empty_strided_cpu((), (), torch.float32)
        cpp_fused_0(arg3_1, buf0, s0)
        buf1 = buf0
        del buf0  # reuse
        buf2 = torch.ops.pygraph.upload.default([buf1, arg3_1], device(type='cuda', index=1))
        del arg3_1
        del buf1
        with torch.cuda._DeviceGuard(1):
            torch.cuda.set_device(1)
            stream1 = get_raw_stream(1)
            buf3 = buf2[0]
            assert_size_stride(buf3, (), (), 'torch.ops.pygraph.upload.default')
            buf4 = buf2[1]
            del buf2
            partition0_args = [arg1_1, arg0_1, buf3, buf4]
            del arg1_1, arg0_1, buf3, buf4
            (buf5, buf6,) = self.partitions[0](partition0_args)
            del partition0_args
            buf7 = empty_strided_cpu((2, ), (1, ), torch.float32)
            buf7.copy_(buf6, False)
            del buf6
            return (reinterpret_tensor(buf5, (2, 2), (2, 1), 0), arg2_1, None, buf7, )
"""


ENTRY = """
def call(args):
    if not _ready():
        return _program(args)
    arg0_1, arg1_1, arg2_1, arg3_1 = args
    args.clear()
    s0 = arg2_1
    assert_size_stride(arg3_1, (), ())
    buf0 = empty_strided_cpu((), (), torch.float32)
    cpp_fused_0(arg3_1, buf0, s0)
    buf1 = buf0
    buf2 = torch.ops.pygraph.upload.default([buf1, arg3_1], device(type='cuda', index=1))
    buf3 = buf2[0]
    buf4 = buf2[1]
    partition0_args = [arg1_1, arg0_1, buf3, buf4]
    del arg1_1
    del arg0_1
    del buf3
    del buf4
    _outputs = _replay(partition0_args)
    if _outputs is None:
        [arg1_1, arg0_1, buf3, buf4] = partition0_args
        args[:] = [arg0_1, arg1_1, arg2_1, arg3_1]
        del arg0_1, arg1_1, arg2_1, arg3_1, buf3, buf4, partition0_args
        return _program(args)
    del buf0
    del arg3_1
    del buf1
    del buf2
    [buf5, buf6] = _outputs
    del partition0_args
    buf7 = empty_strided_cpu((2,), (1,), torch.float32)
    buf7.copy_(buf6, False)
    del buf6
    return (reinterpret_tensor(buf5, (2, 2), (2, 1), 0), arg2_1, None, buf7)
"""


def test_what_is_prepared_is_replayed_with_and_the_program_gets_every_argument_where_that_declines() -> None:
    """Only what is read on the host is checked here. No argument is held while region or program run."""
    assert entry_text(SOURCE) == ENTRY.strip()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("cpp_fused_0(arg3_1, buf0, s0)", "cpp_fused_0(buf0, arg3_1, s0)"),
        ("cpp_fused_0(arg3_1, buf0, s0)", "cpp_fused_0(arg3_1, buf0)"),
        ("cpp_fused_0(arg3_1, buf0, s0)", "cpp_fused_9(arg3_1, buf0, s0)"),
        ("cpp_fused_0(arg3_1, buf0, s0)", "arg3_1.copy_(arg0_1)"),
        ("buf0 = empty_strided_cpu((), (), torch.float32)", "buf0 = arg3_1"),
        ("['const float*', 'float*', 'const int64_t']", "['float*', 'float*', 'const int64_t']"),
        ("['const float*', 'float*', 'const int64_t']", "kernel_types"),
        ("pygraph.upload", "pygraph.download"),
        # results that are computed, and a program that is no region
        ("reinterpret_tensor(buf5, (2, 2), (2, 1), 0)", "buf5[0]"),
        ("reinterpret_tensor(buf5, (2, 2), (2, 1), 0)", "aten.view(buf5, (4,))"),
        ("reinterpret_tensor(buf5, (2, 2), (2, 1), 0)", "buf5 + 1"),
        ("(buf5, buf6,) = self.partitions[0](partition0_args)", ""),
        ("def call", "def other"),
    ],
)
def test_a_program_that_may_write_an_argument_or_computes_besides_is_entered_as_emitted(old: str, new: str) -> None:
    assert old in SOURCE
    assert entry_text(SOURCE.replace(old, new)) is None


@pytest.mark.parametrize(
    "line",
    [
        "buf8 = empty_strided_cuda((4,), (1,), torch.float32)",
        "triton_poi_fused_0.run(arg0_1, 4, stream=stream1)",
        "extern_kernels.mm(arg0_1, arg1_1, out=arg0_1)",
        "buf8 = torch.ops.mylib.late.default(arg0_1)",
        "u0 = arg0_1.item()",
        "arg0_1.add_(1)",
        "assert_size_stride(arg0_1, (2, 2), (2, 1)) or arg0_1.add_(1)",
        "buf8 = empty_strided_cpu((2,), (1,), torch.float32).copy_(arg0_1)",
        "buf8 = torch.ops.pygraph.upload.default([arg3_1], arg0_1.device)[0].add_(1)",
        "(buf8,) = self.partitions[0](partition0_args)",
        "if arg2_1: pass",
        "for _ in range(2): pass",
    ],
)
@pytest.mark.parametrize("where", ["partition0_args =", "buf7 ="])
def test_a_program_that_does_more_is_entered_as_emitted(line: str, where: str) -> None:
    source = SOURCE.replace(f"            {where}", f"            {line}\n            {where}")
    assert source != SOURCE
    assert entry_text(source) is None
