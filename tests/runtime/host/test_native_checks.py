"""Checks of the native half at each replay, and before it: nothing is launched, or stored, that does not fit."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pygraph.errors import CaptureError
from pygraph.program.recording import Output, OutputKind
from pygraph.runtime.description import Argument, Patch, RegionDescription, RegionStep
from pygraph.runtime.host import HostDriver
from tests.runtime.host.replays import make_executable
from tests.runtime.host.test_native import load_kernel, storing
from tests.runtime.regions import RegionCall

# -- arguments ---------------------------------------------------------------------------------------------------------


def passing(native: Any, captured: torch.Tensor, *, offset: int, alignment: int = 1) -> Any:
    """A graph that launches nothing and returns its argument: read only, captured at a multiple of ``alignment``."""
    nbytes = captured.numel() * captured.itemsize
    argument = Argument(captured, offset=offset, nbytes=nbytes, alignment=alignment)
    described = RegionDescription(arguments=(argument,), outputs=(Output(OutputKind.ARGUMENT, 0),))
    return native.HostGraph(described, launches=[], segments=[], exclusive=[])


def at_offset(offset: int) -> torch.Tensor:
    return torch.arange(16.0).as_strided((4,), (1,), offset)


def test_no_copy_stands_for_an_argument_whose_storage_offset_is_baked(native: Any) -> None:
    """A copy begins at its first element: what lies before it in the storage is not there."""
    argument = at_offset(1)
    assert argument.data_ptr() % 16 == 4
    assert passing(native, argument, offset=-1, alignment=16).replay([argument]) is not None
    assert passing(native, argument, offset=1, alignment=16).replay([argument]) is None
    aligned = at_offset(4)
    assert passing(native, aligned, offset=4, alignment=16).replay([aligned]) is not None


def scaled(args: list[Any]) -> tuple[Any, ...]:
    """Writes its first argument, reads the second."""
    x, y = args
    x.add_(y)
    return (torch.mul(x, 3),)


def test_a_lazy_clone_that_is_written_gets_memory_of_its_own(driver: HostDriver) -> None:
    x, y = torch.randn(5), torch.randn(5)
    executable, _ = make_executable(driver, RegionCall(scaled, [x.clone(), y.clone()]))
    before = x.clone()
    written, read = torch._lazy_clone(x), torch._lazy_clone(y)
    outputs = executable.replay([written, read])
    assert torch.equal(x, before)
    assert torch.equal(written, before + y)
    assert torch.equal(outputs[0], (before + y) * 3)
    assert torch._C._is_cow_tensor(read)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("begin", "nbytes"), [(0, 0), (0, 16), (0, 31), (4, 32)])
def test_a_tensor_without_memory_for_its_elements_is_not_captured(driver: HostDriver, begin: int, nbytes: int) -> None:
    short = torch.ones(begin + 8)[begin:]
    short.untyped_storage().resize_(nbytes)
    with pytest.raises(CaptureError, match="no memory for its elements") as caught:
        driver.capture(scaled, [torch.ones(8), short])
    assert caught.value.reason == "unsupported-tensor"


# -- what operators return ---------------------------------------------------------------------------------------------

returned: list[torch.Tensor] = []


@pytest.fixture(scope="module")
def library() -> Iterator[torch.library.Library]:
    """Operators that return what ``returned`` holds by then."""
    with torch.library._scoped_library("pygraph_checks", "DEF") as made:
        made.define("one(Tensor x) -> Tensor")
        made.impl("one", lambda x: returned[0].clone(), "CPU")
        made.define("many(Tensor x) -> Tensor[]")
        made.impl("many", lambda x: [each.clone() for each in returned], "CPU")
        yield made


def calling(native: Any, operator: str, count: int) -> Any:
    """A graph that calls an operator, whose ``count`` results are three floats each."""
    call = native.OperatorCall(f"pygraph_checks::{operator}", "", (torch.zeros(3),), {})
    launch = native.Operator(call, [False], [torch.zeros(3) for _ in range(count)])
    outputs = [Output(OutputKind.FRESH, index, 0, (3,), (1,), torch.float32) for index in range(count)]
    return storing(native, launch, outputs, 12, word=1)


@pytest.mark.parametrize("other", [torch.ones(4), torch.ones(1), torch.ones(3, 1), torch.ones(3, dtype=torch.float64)])
def test_a_result_of_another_size_or_dtype_is_not_stored(native: Any, library: object, other: torch.Tensor) -> None:
    graph = calling(native, "one", 1)
    returned[:] = [torch.tensor([1.0, 2.0, 3.0])]
    assert graph.replay([])[0].tolist() == [1, 2, 3]
    returned[:] = [other]
    with pytest.raises(RuntimeError, match="another size or dtype"):
        graph.replay([])


def test_fewer_or_more_results_are_an_error(native: Any, library: object) -> None:
    graph = calling(native, "many", 2)
    returned[:] = [torch.full((3,), 1.0), torch.full((3,), 2.0)]
    assert [out.tolist() for out in graph.replay([])] == [[1, 1, 1], [2, 2, 2]]
    for count in (1, 3):
        returned[:] = [torch.ones(3)] * count
        with pytest.raises(RuntimeError, match=f"returned {count} tensors at replay, and 2 when captured"):
            graph.replay([])


# -- threads -----------------------------------------------------------------------------------------------------------


def test_other_threads_run_python_code_during_a_replay(native: Any, tmp_path: Path) -> None:
    """The kernel waits, for five seconds at most, until another thread has answered."""
    source = tmp_path / "waits.cpp"
    source.write_text(
        "#include <cstdint>\n#include <unistd.h>\n"
        'extern "C" void kernel(volatile int64_t* asked, volatile int64_t* answered) {\n'
        "  *asked = 1;\n  for (int i = 0; i < 5000 && *answered == 0; ++i) usleep(1000);\n"
        "  *asked = *answered == 0 ? 2 : 3;\n}\n"
    )
    asked, answered = ctypes.c_int64(0), ctypes.c_int64(0)
    words = [ctypes.addressof(asked), ctypes.addressof(answered)]
    graph = storing(native, native.Kernel(load_kernel(source), words, [False] * 2), [], 0)
    over = threading.Event()

    def answer() -> None:
        while not over.is_set():
            if asked.value == 1:
                answered.value = 1
                return

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        assert graph.replay([]) == []
    finally:
        over.set()
        thread.join()
    assert asked.value == 3


# -- what a graph is made from -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("launch", "place"), [(1, 0), (0, 3)])
def test_a_description_that_patches_what_is_not_there_makes_no_graph(native: Any, launch: int, place: int) -> None:
    owned, step = ((Patch(launch, place, 0),),), RegionStep(taken=((0, 8),))
    kernel = native.Kernel(1, [0] * 3, [False] * 3)
    with pytest.raises(IndexError):
        native.HostGraph(
            RegionDescription(owned=owned, steps=(step,)), launches=[kernel], segments=[[kernel]], exclusive=[]
        )
