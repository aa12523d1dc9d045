"""Guard zones around the workspace and every output stay untouched, whatever lay where while capturing."""

from __future__ import annotations

import pytest
import torch

from pygraph.compat import storage_from_address
from pygraph.runtime.cuda import CudaDriver
from pygraph.runtime.cuda.replay import PythonRegion
from tests.gpu.replays import captured, fresh_arguments, replay_and_compare
from tests.gpu.test_operators import CASES, region

GUARD = 4096
MARK = 0xA5


class Guarded:
    """Hands out memory in the middle of marked bytes, in place of the region's own allocations."""

    def __init__(self) -> None:
        self.buffers: list[tuple[torch.Tensor, int]] = []

    def take(self, nbytes: int) -> torch.Tensor:
        end = -(-nbytes // 16) * 16
        buffer = torch.full((end + 2 * GUARD,), MARK, dtype=torch.uint8, device="cuda")
        self.buffers.append((buffer, nbytes))
        storage = storage_from_address(buffer.data_ptr() + GUARD, buffer.device, nbytes)
        return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage, 0, (nbytes,), (1,))

    def assert_intact(self) -> None:
        for buffer, nbytes in self.buffers:
            assert bool((buffer[:GUARD] == MARK).all()), "bytes before an allocation were written"
            assert bool((buffer[GUARD + nbytes :] == MARK).all()), "bytes behind an allocation were written"


@pytest.fixture(scope="module")
def python_replays() -> CudaDriver:
    """Captures natively (so that allocations are exact), replays in Python (so that a test can allocate)."""
    return CudaDriver()


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("sort_flat",)])
def test_nothing_is_written_beside_an_allocation(
    python_replays: CudaDriver, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    guarded = Guarded()
    monkeypatch.setattr(PythonRegion, "_bytes", lambda self, nbytes: guarded.take(nbytes))
    monkeypatch.setattr(python_replays._machine(0), "replays_native", False)
    function, make = CASES[name]
    args = make()
    made = captured(python_replays, region(function), args, reuse_workspace=name != "chain")
    for seed in range(2):
        replay_and_compare(python_replays, region(function), made, fresh_arguments(args, seed))
        torch.cuda.synchronize()
        guarded.assert_intact()
    assert guarded.buffers
