"""Programs of a few kernels or of many tiny ones, and those where a CUDA Graph cannot win.

In the first the host's time per call is all there is; in the last it is hidden, or the host has to wait.
"""

from __future__ import annotations

from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import nn

from benchmarks.suite.inference import floating
from benchmarks.suite.parts import in_turn, mlp
from benchmarks.workload import Compile, Step, Workload

__all__ = ["WORKLOADS"]


def perceptron(compile: Compile, device: str, *, layers: int, width: int, batch: int) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(*mlp([width] * (layers + 1)), nn.ReLU()).to(device).eval()
    run, x = compile(model), torch.randn(batch, width, device=device)

    def step() -> Any:
        with torch.no_grad():
            return run(x)

    return step


@torch.library.custom_op("pygraph_benchmarks::rescaled", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def rescaled(x: torch.Tensor) -> torch.Tensor:
    """A user's operator that its author does not let be captured."""
    return x * 1.01


rescaled.register_fake(torch.empty_like)


def with_operators(compile: Compile, device: str, *, layers: int, width: int, batch: int) -> Step:
    torch.manual_seed(0)
    linears = nn.ModuleList(nn.Linear(width, width) for _ in range(2 * layers + 2)).to(device).eval()

    def model(x: torch.Tensor) -> Any:
        first, last, *middle = linears
        x = first(x)
        for one, other in zip(middle[::2], middle[1::2], strict=True):
            x = torch.relu(other(torch.relu(one(rescaled(x)))))
        return last(x)

    run, x = compile(model), torch.randn(batch, width, device=device)

    def step() -> Any:
        with torch.no_grad():
            return run(x)

    return step


class Recurrence(nn.Module):
    """An LSTM cell over a sequence [length, batch, width], one call for each element; returns the last state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)

    def forward(self, sequence: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = memory = torch.zeros_like(sequence[0])
        for element in sequence:
            hidden, memory = self.cell(element, (hidden, memory))
        return hidden, memory


def recurrence(compile: Compile, device: str, *, length: int, batch: int, width: int) -> Step:
    torch.manual_seed(0)
    model = Recurrence(width).to(device).eval()
    run, sequence = compile(model), torch.randn(length, batch, width, device=device)

    def step() -> Any:
        with torch.no_grad():
            return run(sequence)

    return step


class ActorCritic(nn.Module):
    """Takes an observation [1, features]; returns the action's mean [1, actions] and the state's value [1, 1]."""

    mean: torch.Tensor
    deviation: torch.Tensor

    def __init__(self, features: int, hidden: int, actions: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.randn(features) * 0.1)
        self.register_buffer("deviation", torch.rand(features) + 0.5)
        self.actor = mlp((features, hidden, hidden, actions), nn.Tanh)
        value = nn.Linear(hidden, 1)
        nn.init.ones_(value.bias)
        self.critic = nn.Sequential(mlp((features, hidden, hidden), nn.Tanh), nn.Tanh(), value)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = ((observation - self.mean) / self.deviation).clamp(-5, 5)
        return torch.tanh(self.actor(x)), self.critic(x)


def policy(compile: Compile, device: str, *, features: int, hidden: int, actions: int) -> Step:
    torch.manual_seed(0)
    model = ActorCritic(features, hidden, actions).to(device).eval()
    observations = cycle([torch.randn(1, features, device=device) for _ in range(8)])
    act = compile(model)
    return in_turn(act, observations)


# -- where a CUDA Graph cannot win -------------------------------------------------------------------------------------


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def products(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return torch.relu(a @ b) @ c


def one_product(compile: Compile, device: str, *, size: int) -> Step:
    torch.manual_seed(0)
    a, b = (torch.randn(size, size, device=device, dtype=floating(device)) for _ in range(2))
    run = compile(product)

    def step() -> Any:
        with torch.no_grad():
            return run(a, b)

    return step


def fresh_products(compile: Compile, device: str, *, size: int) -> Step:
    """Other matrices in each call; scaled so that products of products stay in half precision's range."""
    torch.manual_seed(0)
    matrices = [torch.randn(size, size, device=device, dtype=floating(device)) * size**-0.5 for _ in range(5)]
    turns = cycle([(matrices[i], matrices[i - 1], matrices[i - 2]) for i in range(len(matrices))])
    run = compile(products)
    return in_turn(run, turns)


class EarlyExit(nn.Module):
    """A small network answers where it is sure; else a large one does. The host has to wait to know which."""

    def __init__(self, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.small = nn.Linear(width, classes)
        self.large = nn.Sequential(mlp([width] * (layers + 1)), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.small(x).softmax(-1)
        if answer.amax(-1).mean().item() > 0.5:
            return answer
        made: torch.Tensor = self.large(x).softmax(-1)
        return made


def early_exit(compile: Compile, device: str, *, width: int, layers: int, classes: int, batch: int) -> Step:
    """Large inputs are sure ones: scaled so that no rounding changes the way that a call takes."""
    torch.manual_seed(0)
    model = EarlyExit(width, layers, classes).to(device).eval()
    inputs = cycle([torch.randn(batch, width, device=device) * scale for scale in (0.5, 0.6, 100.0, 0.7)])
    run = compile(model)
    return in_turn(run, inputs)


FLOAT = "float32 sums in another order"

WORKLOADS: tuple[Workload, ...] = (
    Workload(
        "mlp-host",
        "inference",
        "perceptrons",
        "Four linear layers of width 256 at batch 8: nothing but the host's time per call.",
        partial(perceptron, layers=4, width=256, batch=8),
        partial(perceptron, layers=4, width=16, batch=4),
        calls=200,
        tolerance=1e-4,
        why_tolerance=FLOAT,
        whole_step=True,
    ),
    Workload(
        "uncapturable-operators",
        "inference",
        "perceptrons",
        "Ten operators that must not be captured between twenty-two linear layers of width 256 at batch 8.",
        partial(with_operators, layers=10, width=256, batch=8),
        partial(with_operators, layers=2, width=16, batch=4),
        calls=100,
        tolerance=1e-4,
        why_tolerance=FLOAT,
    ),
    Workload(
        "lstm-loop",
        "inference",
        "speech",
        "An LSTM cell of width 256 called for each of 50 elements: hundreds of small kernels, one after another.",
        partial(recurrence, length=50, batch=16, width=256),
        partial(recurrence, length=4, batch=2, width=16),
        calls=50,
        tolerance=1e-4,
        why_tolerance=FLOAT,
        whole_step=True,
    ),
    Workload(
        "actor-critic",
        "inference",
        "control",
        "A reinforcement learner's policy and value networks for one observation, another tensor in each step.",
        partial(policy, features=48, hidden=256, actions=12),
        partial(policy, features=8, hidden=16, actions=3),
        calls=200,
        tolerance=1e-4,
        why_tolerance=FLOAT,
    ),
    Workload(
        "matmul-8192",
        "inference",
        "linear algebra",
        "One product of half-precision matrices of 8192 x 8192: a graph has nothing to save.",
        partial(one_product, size=8192),
        partial(one_product, size=32),
        calls=20,
        whole_step=True,
    ),
    Workload(
        "matmul-fresh-4096",
        "inference",
        "linear algebra",
        "Two products of matrices of 4096 x 4096 and what lies between, others in each call: copies only cost.",
        partial(fresh_products, size=4096),
        partial(fresh_products, size=32),
        calls=50,
    ),
    Workload(
        "early-exit",
        "inference",
        "vision",
        "A cascade that reads a scalar in its middle (`.item()`) and branches in Python: the host has to wait.",
        partial(early_exit, width=1024, layers=6, classes=100, batch=64),
        partial(early_exit, width=16, layers=2, classes=5, batch=4),
        calls=40,
        tolerance=1e-4,
        why_tolerance=FLOAT,
    ),
)
