"""Entering a program that is one region by its replay: results, arguments that are let go of, what declining does."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pygraph.compat import dynamo_guards
from pygraph.inductor.entry import bind, entry_text

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


class Module:
    """Stands for the emitted module, its region and the program as emitted: notes what is checked, uploaded and called.

    ``watched`` is asked while the region or the program runs."""

    def __init__(self, source: str = SOURCE, *, declines: bool = False, ready: bool = True) -> None:
        self.declines = declines
        self.checked: list[Any] = []
        self.calls: list[list[Any]] = []
        self.alive: list[bool] = []
        self.uploads = 0
        self.watched: Any = lambda: None
        ops = SimpleNamespace(pygraph=SimpleNamespace(upload=SimpleNamespace(default=self._upload)))
        names = {
            "torch": SimpleNamespace(float32=torch.float32, ops=ops),
            "device": lambda **where: torch.device("cpu"),
            "empty_strided_cpu": lambda size, stride, dtype: torch.full(size, -1.0),
            "reinterpret_tensor": dynamo_guards._reinterpret_tensor,
            "assert_size_stride": lambda x, *facts: self.checked.append(x),
            "cpp_fused_0": lambda x, result, number: result.copy_(x * number),
        }
        text = entry_text(source)
        assert text is not None
        region: Any = SimpleNamespace(try_replay=self._replay, expects_replay=lambda: ready)
        self.call = bind(text, names, region, self._program)

    def _upload(self, xs: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        self.uploads += 1
        return [x.clone() for x in xs]

    def _replay(self, args: list[Any]) -> list[torch.Tensor] | None:
        if self.declines:
            return None
        x, y, factor, rate = args
        args.clear()
        result = [(x + y * factor + rate).flatten(), y.sum(0)]
        del x, y
        self._look()
        return result

    def _program(self, args: list[Any]) -> str:
        self.calls.append([id(arg) for arg in args])
        args.clear()
        self._look()
        return "as emitted"

    def _look(self) -> None:
        gc.collect()
        self.alive.append(self.watched() is not None)


def arguments() -> list[Any]:
    return [torch.ones(2, 2), torch.full((2, 2), 5.0), 3, torch.tensor(2.0)]


def test_the_region_is_replayed_with_what_was_prepared() -> None:
    module, args = Module(), arguments()
    rate, module.watched = args[3], weakref.ref(args[0])
    first, number, nothing, fetched = module.call(args)
    assert args == []
    assert torch.equal(first, torch.full((2, 2), 5.0 + 1 * 6 + 2))
    assert (number, nothing) == (3, None)
    assert torch.equal(fetched, torch.full((2,), 2.0))
    assert [id(x) for x in module.checked] == [id(rate)], "only what is read on the host is checked here"
    assert module.alive == [False], "no argument is held while the region runs"
    assert module.calls == []


@pytest.mark.parametrize(("declines", "ready"), [(True, True), (False, False)])
def test_the_program_gets_every_argument_in_its_place_when_nothing_is_replayed(declines: bool, ready: bool) -> None:
    module, args = Module(declines=declines, ready=ready), arguments()
    module.watched, rate = weakref.ref(args[0]), args[3]
    given = [id(arg) for arg in args]
    assert module.call(args) == "as emitted"
    assert module.calls == [given]
    assert module.alive == [False], "no argument is held while the program runs"
    assert module.uploads == int(ready), "nothing is prepared for a replay that is not to be expected"
    assert torch.equal(rate, torch.tensor(2.0))


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
