"""The shortcut past the main function of a program that is one region: text, results, and what declining does."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pygraph.compat import dynamo_guards
from pygraph.inductor import direct as module
from pygraph.inductor import wrap

SOURCE = """
class Runner:
    def call(self, args):
        arg0_1, arg1_1, arg2_1 = args
        args.clear()
        s0 = arg2_1
        assert_size_stride(arg0_1, (s0, 4), (4, 1))
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            stream0 = get_raw_stream(0)
            partition0_args = [arg1_1, arg0_1, s0]
            del arg1_1
            del arg0_1
            (buf0, buf1,) = self.partitions[0](partition0_args)
            del partition0_args
            del buf1
            return (reinterpret_tensor(buf0, (2, 2), (2, 1), 0), arg2_1, None, )
"""

VIEW = dynamo_guards._reinterpret_tensor


class Program:
    """Stands for the whole program: notes what it was called with."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []

    def __call__(self, args: list[Any]) -> str:
        self.calls.append(list(args))
        return "whole"


def replayed(args: list[Any]) -> list[torch.Tensor]:
    """Like a region: takes its arguments, empties the list."""
    first, second, number = args
    args.clear()
    return [(first + second * number).flatten(), first]


def always() -> bool:
    """A region that expects to replay each call."""
    return True


def shortcut(source: str, names: Any, ready: Any, replay: Any, program: Any) -> Any:
    text = module.shortcut(source)
    return None if text is None else wrap.bind(text, names, ready, replay, program)


def made(source: str = SOURCE, replay: Any = replayed, program: Any = None) -> Any:
    return shortcut(source, {"reinterpret_tensor": VIEW}, always, replay, program or Program())


def test_the_region_is_replayed_and_its_results_are_arranged_as_emitted() -> None:
    program = Program()
    args: list[Any] = [torch.ones(2, 2), torch.full((2, 2), 5.0), 3]
    result = made(program=program)(args)
    assert args == []
    assert torch.equal(result[0], torch.full((2, 2), 8.0))
    assert result[1:] == (3, None)
    assert program.calls == []


def test_the_whole_program_gets_every_argument_in_its_place_when_the_replay_declines() -> None:
    program = Program()
    args: list[Any] = [torch.ones(2, 2), torch.full((2, 2), 5.0), 3]
    given = list(args)
    assert made(replay=lambda args: None, program=program)(args) == "whole"
    assert [[id(a) for a in call] for call in program.calls] == [[id(a) for a in given]]


def test_no_argument_is_held_while_the_region_runs() -> None:
    alive: list[bool] = []

    def replay(args: list[Any]) -> list[torch.Tensor]:
        first = weakref.ref(args[0])
        args.clear()
        gc.collect()
        alive.append(first() is not None)
        return [torch.zeros(4), torch.zeros(1)]

    made(replay=replay)([torch.ones(1), torch.ones(1), 3])
    assert alive == [False]


def test_no_argument_is_held_while_the_whole_program_runs() -> None:
    alive: list[bool] = []

    def program(args: list[Any]) -> None:
        watched = [weakref.ref(arg) for arg in args[:2]]
        args.clear()
        gc.collect()
        alive.extend(ref() is not None for ref in watched)

    made(replay=lambda args: None, program=program)([torch.ones(1), torch.ones(1), 3])
    assert alive == [False, False]


def test_what_a_replay_raises_is_raised() -> None:
    def replay(args: list[Any]) -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        made(replay=replay)([torch.ones(1), torch.ones(1), 3])


@pytest.mark.parametrize(
    "line",
    [
        "buf5 = empty_strided_cuda((4,), (1,), torch.float32)",
        "buf5 = empty_strided_cpu((s0,), (1,), torch.float32)",
        "arg0_1.copy_(arg1_1, False)",
        "triton_poi_fused_0.run(arg0_1, 4, stream=stream0)",
        "extern_kernels.mm(arg0_1, arg1_1, out=arg0_1)",
        "arg0_1.copy_(arg1_1)",
        "u0 = arg0_1.item()",
        "if arg2_1:\n                pass",
        "(buf9,) = self.partitions[0](partition0_args)",
        "for _ in range(2):\n                pass",
    ],
)
def test_a_program_that_does_more_has_no_shortcut(line: str) -> None:
    where = "            (buf0, buf1,) = self"
    if "partition0_args" in line:
        source = SOURCE.replace("            del partition0_args", f"            {line}")
    else:
        source = SOURCE.replace(where, f"            {line}\n{where}")
    assert source != SOURCE
    assert made(source) is None


FETCH = """            buf2 = empty_strided_cpu((2, 2), (2, 1), torch.float32)
            buf2.copy_(reinterpret_tensor(buf0, (2, 2), (2, 1), 0), False)
            del buf0
            return (buf2, arg2_1, )
"""


def fetching(text: str = FETCH) -> str:
    """A program that copies its result to the host after the region has run."""
    return SOURCE[: SOURCE.index("            return")] + text


def test_results_are_fetched_to_the_host_after_the_replay() -> None:
    def empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(size, -1.0, dtype=dtype)

    program = Program()
    names = {"reinterpret_tensor": VIEW, "empty_strided_cpu": empty, "torch": torch}
    args: list[Any] = [torch.ones(2, 2), torch.full((2, 2), 5.0), 3]
    given = list(args)
    direct = shortcut(fetching(), names, always, replayed, program)
    assert direct is not None
    result = direct(args)
    assert torch.equal(result[0], torch.full((2, 2), 8.0))
    assert result[1] == 3
    assert program.calls == []
    declined = shortcut(fetching(), names, always, lambda args: None, program)
    assert declined is not None
    assert declined(list(given)) == "whole"
    assert [[id(a) for a in call] for call in program.calls] == [[id(a) for a in given]]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(2, 2), (2, 1), torch.float32", "(s0, 2), (2, 1), torch.float32"),
        ("empty_strided_cpu", "empty_strided_cuda"),
        ("copy_(", "add_("),
        ("buf2.copy_", "buf2[0].copy_"),
        ("copy_(reinterpret_tensor(buf0, (2, 2), (2, 1), 0), False)", "copy_(buf0 + 1, False)"),
        ("copy_(reinterpret_tensor(buf0, (2, 2), (2, 1), 0), False)", "copy_(1.0)"),
        ("0), False)", "0), arg2_1)"),
    ],
)
def test_other_work_after_the_region_has_no_shortcut(old: str, new: str) -> None:
    assert made(fetching()) is not None
    assert made(fetching(FETCH.replace(old, new))) is None


@pytest.mark.parametrize(
    "result",
    ["reinterpret_tensor(buf0, (s0, 2), (2, 1), 0)", "buf0[0]", "aten.view(buf0, (4,))", "buf0 + 1"],
)
def test_results_that_are_computed_have_no_shortcut(result: str) -> None:
    assert made(SOURCE.replace("reinterpret_tensor(buf0, (2, 2), (2, 1), 0)", result)) is None


PREPARE = """
cpp_fused_0 = async_compile.cpp_pybinding(['const float*', 'float*', 'const int64_t'], r''' ''')
cpp_fused_1 = async_compile.cpp_pybinding(['float*'], r''' ''')

class Runner:
    def call(self, args):
        arg0_1, arg1_1, arg2_1, arg3_1 = args
        args.clear()
        s0 = arg2_1
        assert_size_stride(arg0_1, (2, 2), (2, 1))
        assert_size_stride(arg3_1, (), ())
        buf0 = empty_strided_cpu((), (), torch.float32)
        cpp_fused_0(arg3_1, buf0, s0)
        buf1 = buf0
        del buf0  # reuse
        cpp_fused_1(buf1)
        buf2 = torch.ops.pygraph.upload.default([buf1, arg3_1], device(type='cuda', index=0))
        del arg3_1
        del buf1
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            buf3 = buf2[0]
            assert_size_stride(buf3, (), (), 'torch.ops.pygraph.upload.default')
            buf4 = buf2[1]
            del buf2
            partition0_args = [arg1_1, arg0_1, buf3, buf4]
            del arg1_1, arg0_1, buf3, buf4
            (buf5,) = self.partitions[0](partition0_args)
            del partition0_args
            return (buf5, arg2_1, )
"""


class Prepared:
    """A program that computes a factor on the host and uploads it beside its argument."""

    def __init__(self, source: str = PREPARE, *, declines: bool = False) -> None:
        self.checked: list[Any] = []
        self.given: list[list[torch.Tensor]] = []
        self.alive: list[bool] = []
        self.program, self.declines = Program(), declines
        self.watched: Any = None
        names = {
            "torch": SimpleNamespace(
                float32=torch.float32,
                ops=SimpleNamespace(pygraph=SimpleNamespace(upload=SimpleNamespace(default=self._upload))),
            ),
            "device": lambda **where: torch.device("cpu"),
            "empty_strided_cpu": lambda size, stride, dtype: torch.full(size, -1.0),
            "assert_size_stride": lambda x, *facts: self.checked.append(x),
            "cpp_fused_0": lambda x, result, number: result.copy_(x * number),
            "cpp_fused_1": lambda result: result.add_(1),
        }
        self.ready, self.uploads = True, 0
        self.call = shortcut(source, names, lambda: self.ready, self._replay, self.program)

    def _upload(self, xs: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        self.uploads += 1
        return [x.clone() for x in xs]

    def _replay(self, args: list[Any]) -> list[torch.Tensor] | None:
        self.given.append(list(args))
        if self.declines:
            return None
        x, y, factor, rate = args
        args.clear()
        return [x + y * factor + rate]


def prepared_arguments() -> list[Any]:
    return [torch.ones(2, 2), torch.zeros(2, 2), 3, torch.tensor(2.0)]


def test_values_are_prepared_on_the_host_before_the_replay() -> None:
    prepared, args = Prepared(), prepared_arguments()
    assert prepared.call is not None
    rate, x = args[3], weakref.ref(args[0])
    result = prepared.call(args)
    assert args == []
    assert torch.equal(result[0], torch.full((2, 2), 2.0 * 3 + 1 + 2))
    assert result[1:] == (3,)
    assert prepared.program.calls == []
    assert [id(each) for each in prepared.checked] == [id(rate)], "what is read on the host is not checked by a replay"
    prepared.given.clear()
    gc.collect()
    assert x() is None


def test_the_whole_program_gets_what_was_prepared_from_when_the_replay_declines() -> None:
    prepared, args = Prepared(declines=True), prepared_arguments()
    assert prepared.call is not None
    given = list(args)
    assert prepared.call(args) == "whole"
    assert [[id(a) for a in call] for call in prepared.program.calls] == [[id(a) for a in given]]
    assert torch.equal(given[3], torch.tensor(2.0))


def test_nothing_is_prepared_for_a_region_that_will_not_replay() -> None:
    """One that is left uncaptured for good would otherwise have everything prepared twice in each call."""
    prepared, args = Prepared(), prepared_arguments()
    assert prepared.call is not None
    prepared.ready = False
    given = list(args)
    assert prepared.call(args) == "whole"
    assert [[id(a) for a in call] for call in prepared.program.calls] == [[id(a) for a in given]]
    assert (prepared.uploads, prepared.given) == (0, [])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("cpp_fused_0(arg3_1, buf0, s0)", "cpp_fused_0(buf0, arg3_1, s0)"),
        ("cpp_fused_0(arg3_1, buf0, s0)", "cpp_fused_0(arg3_1, buf0)"),
        ("cpp_fused_0(arg3_1, buf0, s0)", "cpp_fused_0(arg3_1, buf0, s0=s0)"),
        ("cpp_fused_0(arg3_1, buf0, s0)", "cpp_fused_9(arg3_1, buf0, s0)"),
        ("cpp_fused_0(arg3_1, buf0, s0)", "arg3_1.add_(1)"),
        ("buf1 = buf0\n", "buf1 = arg3_1\n"),
        ("['const float*', 'float*', 'const int64_t']", "['float*', 'float*', 'const int64_t']"),
        ("['const float*', 'float*', 'const int64_t']", "kernel_types"),
        ("[buf1, arg3_1], device(type='cuda', index=0)", "[buf1, arg3_1 + 1], device(type='cuda', index=0)"),
        ("index=0)", "index=s0)"),
        ("buf3 = buf2[0]", "buf3 = buf2[s0]"),
        ("buf3 = buf2[0]", "buf3 = arg0_1[0]"),
        ("pygraph.upload", "pygraph.download"),
    ],
)
def test_other_work_before_the_region_has_no_shortcut(old: str, new: str) -> None:
    """Least of all what might write an argument: where the replay declines, it would be done twice."""
    assert old in PREPARE
    assert Prepared(PREPARE.replace(old, new)).call is None


def test_a_program_without_regions_has_no_shortcut() -> None:
    assert made("def call(args):\n    arg0_1, = args\n    args.clear()\n    return (arg0_1, )\n") is None
    assert made("x = 1\n") is None
