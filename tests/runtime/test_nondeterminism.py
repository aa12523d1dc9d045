"""Which launches vary from run to run, and what they decide."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pygraph.program.program import Slot
from pygraph.program.recording import AllocationKind
from pygraph.runtime.host import HostDriver
from pygraph.runtime.nondeterminism import nondeterministic_kernels, nondeterministic_operator, unrepeatable
from tests.runtime.captures import Capture, reads, writes
from tests.runtime.regions import compile_regions

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("op", "known"),
    [
        (aten.index_add.default, True),
        (aten.index_add_.default, True),
        (aten.index_put_.default, True),
        (aten.scatter_reduce.two, True),
        (aten.cumsum.out, True),
        (aten.convolution_backward.default, True),
        (aten._scaled_dot_product_efficient_attention_backward.default, True),
        (aten._scaled_dot_product_cudnn_attention.default, True),
        (aten._scaled_dot_product_flash_attention.default, False),
        (aten.mm.default, False),
        (aten.add_.Tensor, False),
        (aten.rand.default, False),
        (aten.native_dropout.default, False),
    ],
)
def test_operators(op: Any, known: bool) -> None:
    assert nondeterministic_operator(op) == known


def test_every_name_on_the_list_is_an_operators() -> None:
    from pygraph.runtime.nondeterminism import _OPERATORS

    names = {schema.name.removesuffix("_") for schema in torch._C._jit_get_all_schemas()}
    assert len(list(filter(_OPERATORS.fullmatch, names))) == 79


PROGRAM = """
from torch._inductor.async_compile import AsyncCompile
async_compile = AsyncCompile()
{name} = async_compile.triton('{name}', '''
@triton_heuristics.pointwise(inductor_meta={{'atomic_add_found': {found}}})
@triton.jit
def {name}(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    {line}
''', device_str='cuda')

other = async_compile.triton('other', '''
def other(in_ptr0):
    tl.store(out_ptr0 + (x0), tmp0, xmask)
''', device_str='cuda')

async_compile.wait(globals())
def call(args):
    atomic_add_(1)
"""


@pytest.mark.parametrize(
    ("line", "known"),
    [
        ("tl.atomic_add(out_ptr0 + (tl.broadcast_to(tmp4, [XBLOCK])), tmp6, xmask, sem='relaxed')", True),
        ("tl.atomic_cas(lock, 0, 1)", True),
        ("tmp8 = triton_helpers.exclusive_scan_decoupled_lookback_64(ws_ptr, tmp7, XBLOCK)", True),
        ("tl.atomic_max(out_ptr0, tmp6)", False),
        ("tl.store(out_ptr0 + (x0), tmp0, xmask)", False),
    ],
)
def test_kernels_are_known_by_their_source(tmp_path: Any, line: str, known: bool) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(name="kernel_0", line=line, found=known))
    assert nondeterministic_kernels(str(file)) == ({"kernel_0"} if known else set())
    assert nondeterministic_kernels(str(tmp_path / "missing.py")) == frozenset()


def test_launches_of_inductors_cpu_kernels_say_so(fresh: None) -> None:
    def program(x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(64, 64).index_add(0, index, x), torch.relu(x @ x.t()).sum(1)

    compiled = compile_regions(program, **{"cpp.threads": 4})
    compiled.call(torch.randn(500, 64), torch.randint(0, 64, (500,)))
    assert "atomic_add" in compiled.sources[0], "Inductor adds another way: find another program for this test"
    (region,) = compiled.regions
    launches = HostDriver().capture(region.fn, region.args).launches
    found = {launch.name: launch.nondeterministic for launch in launches}
    assert [name for name, known in found.items() if known] == [name for name in found if "index_add" in name]
    assert len(found) > 1


@pytest.mark.parametrize("op", [aten.cumsum.default, aten.amax.default])
def test_launches_of_operators_say_so(op: Any) -> None:
    dim = [0] if op is aten.amax.default else 0
    recording = HostDriver().capture(lambda args: [op(args[0], dim)], [torch.randn(4)])
    assert [launch.nondeterministic for launch in recording.launches] == [op is aten.cumsum.default]


INPUT, POOL = AllocationKind.INPUT, AllocationKind.POOL
KEYS = [(INPUT, 0), (INPUT, 0), (POOL, 0), (POOL, 1)]
"""What each launch of a chain below only reads."""


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("decides", [0, 1, 2])
def test_what_a_non_deterministic_launch_decides(known: bool, decides: int) -> None:
    """x ▸ first ▸ second, beside x ▸ apart; the last launch writes an argument from second."""
    capture = Capture()
    x, total = capture.input(16), capture.input(16)
    first, second, apart = (capture.pool(16) for _ in range(3))
    chain = [(x, first), (x, apart), (first, second), (second, total)]
    for index, words in enumerate(chain):
        uses = [reads(0, 16), writes(1, 16)] if known else None
        facts = {} if known else {"read_only": frozenset({KEYS[index]})}
        capture.launch(*words, uses=uses, nondeterministic=index == decides, **facts)
    recording = capture.recording()
    keys = {x: (INPUT, 0), total: (INPUT, 1), first: (POOL, 0), second: (POOL, 1), apart: (POOL, 2)}
    slots = [Slot(i, w, *keys[word], 0) for i, words in enumerate(chain) for w, word in enumerate(words)]
    decided = unrepeatable(recording, slots)
    found = [(POOL, index) in decided for index in range(3)]
    expected = {0: [True, True, False], 1: [False, False, True], 2: [False, True, False]}
    assert found == expected[decides]
    assert [(INPUT, index) in decided for index in range(2)] == [False, decides != 1]
