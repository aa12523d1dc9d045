"""A small BERT with random weights, for ``pygraph explain examples/bert.py [LAYERS] --html report.html``.

The command compiles ``model`` and calls it on ``inputs``, as keyword arguments because they are a mapping.
"""

from __future__ import annotations

import sys

import torch
from transformers import BertConfig, BertModel


def build(layers: int) -> tuple[BertModel, dict[str, torch.Tensor]]:
    """The model in inference mode, and one sentence of 32 tokens."""
    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=layers, hidden_size=128, intermediate_size=512, num_attention_heads=2, vocab_size=1000
    )
    tokens = torch.randint(0, config.vocab_size, (1, 32))
    bert = BertModel(config).eval().requires_grad_(False)
    return bert, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


if __name__ == "__main__":
    model, inputs = build(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
