"""Small training steps, and the comparison of two ways to run one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._inductor.codegen.common import BackendFeature
from torch._inductor.graph import GraphLowering

import pygraph

FEATURES, WIDTH, CLASSES, BATCH = 8, 16, 4, 6

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where all of these steps run."""


@contextmanager
def foreach_in_place() -> Iterator[None]:
    """Inductor writes in place by foreach operators on the CPU, too. On a GPU it makes one kernel of each besides."""
    has, register = GraphLowering.has_feature, GraphLowering.register_operation_list

    def has_feature(self: Any, device: Any, feature: BackendFeature) -> bool:
        return feature is BackendFeature.FOREACH or has(self, device, feature)

    def register_operation_list(self: Any, names: list[str]) -> str:
        return "" if self.name_to_op[names[0]].get_device().type == "cpu" else register(self, names)

    with (
        mock.patch.object(GraphLowering, "has_feature", has_feature),
        mock.patch.object(GraphLowering, "register_operation_list", register_operation_list),
        torch.compiler.config.patch(cache_key_tag="foreach_in_place"),
    ):
        yield


class Setup:
    """A model, its optimizer, and what was compiled and replayed since it was made."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self._reports, self._replays = len(pygraph.reports()), pygraph.counters().get("replays", 0)

    @property
    def compiled(self) -> int:
        """Graphs compiled since."""
        return len(pygraph.reports()) - self._reports

    @property
    def replays(self) -> int:
        """Replays since."""
        return pygraph.counters().get("replays", 0) - self._replays


def setup(
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=0.01),
    model: Callable[[], nn.Module] | None = None,
) -> Setup:
    """A model and its optimizer, with equal weights in each call."""
    torch.manual_seed(0)
    made = (mlp() if model is None else model()).to(DEVICE)
    return Setup(made, optimizer(made.parameters()))


def mlp() -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def basic(ours: Setup) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The step that the documentation begins with."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(ours.model(x), y)
        loss.backward()
        ours.optimizer.step()
        ours.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def batches(steps: int, batch: int = BATCH) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets, the same each time."""
    generator = torch.Generator().manual_seed(1)
    return [(drawn(generator, batch, FEATURES), drawn(generator, batch, CLASSES)) for _ in range(steps)]


def drawn(generator: torch.Generator, *size: int) -> torch.Tensor:
    """Random numbers of a generator of the CPU, on the device."""
    return torch.randn(*size, generator=generator).to(DEVICE)


def generator_state() -> torch.Tensor:
    """Of the generator that the device draws from."""
    return torch.cuda.get_rng_state() if DEVICE == "cuda" else torch.get_rng_state()


def state(of: Setup) -> dict[str, torch.Tensor]:
    """Parameters, buffers and the optimizer's state, by name."""
    found = {f"model.{name}": value for name, value in of.model.state_dict().items()}
    for index, entry in of.optimizer.state_dict()["state"].items():
        found.update({f"{index}.{name}": value for name, value in entry.items() if isinstance(value, torch.Tensor)})
    return found


def assert_same_state(ours: Setup, theirs: Setup) -> None:
    """Parameters and optimizer state agree as two correct programs do: other kernels, the same arithmetic."""
    mine, other = state(ours), state(theirs)
    assert mine.keys() == other.keys()
    for name, value in mine.items():
        torch.testing.assert_close(
            value,
            other[name].to(value.device),  # eager's counters of steps are on the CPU
            rtol=1e-4,
            atol=1e-5,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def assert_equal_training(
    step: Callable[..., Any],
    eager: Callable[..., Any],
    ours: Setup,
    theirs: Setup,
    *,
    steps: int = 20,
    after: Callable[[Setup, int], None] | None = None,
) -> None:
    """Train both for ``steps``: losses, parameters and state agree after each. ``after`` is called between."""
    for index, (x, y) in enumerate(batches(steps)):
        torch.testing.assert_close(step(x, y), eager(x, y), rtol=1e-4, atol=1e-5)
        assert_same_state(ours, theirs)
        if after is not None:
            after(ours, index)
            after(theirs, index)
