"""A training loop as anyone writes it, with one word changed: forward and backward are captured and replayed.

Run it with ``python examples/mlp_training.py``, or ``pygraph explain examples/mlp_training.py`` for the report.
"""

from __future__ import annotations

import torch

STEPS = 6

torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
compiled = torch.compile(network, backend="pygraph")
optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
data, target = torch.randn(128, 32), torch.randn(128, 1)

for step in range(STEPS):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(compiled(data), target)
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
