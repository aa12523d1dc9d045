"""A network that reads a number back to the host in the middle: captured around it, with the line that is in the way.

Run it with ``pygraph explain examples/mlp_item.py``: the command compiles ``model`` and calls it on ``inputs``.
"""

from __future__ import annotations

import torch

torch._dynamo.config.capture_scalar_outputs = True  # else Dynamo breaks the graph at int(…), before PyGraph sees it


class Router(torch.nn.Module):
    """Scale what the second layer sees by the index of the first layer's largest feature, which the host reads."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, width)
        self.second = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        chosen = int(hidden.sum(0).argmax())
        return torch.tanh(self.second(hidden * chosen))


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = Router().eval().requires_grad_(False).to(device)
inputs = (torch.randn(8, 64, device=device),)
