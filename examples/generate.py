"""Greedy decoding of a small Llama: transformers' loop on the host, and one launch whose loop the device runs.

python examples/generate.py
"""

from __future__ import annotations

from time import perf_counter

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pygraph.integrations.transformers import generate

NEW, BATCH, CALLS = 64, 2, 6


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_attention_heads=4, num_hidden_layers=4
    )
    model = LlamaForCausalLM(config).to(device).eval()
    for _ in range(CALLS):
        prompt = torch.randint(3, 512, (BATCH, 12), device=device)
        began = perf_counter()
        expected = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW,
            do_sample=False,
            cache_implementation="static",
            eos_token_id=2,
            pad_token_id=0,
        )
        between = perf_counter()
        tokens = generate(model, prompt, max_new_tokens=NEW, eos_token_id=2)
        ended = perf_counter()
        same = torch.equal(tokens, expected)
        print(f"host {1e3 * (between - began):.0f} ms, device {1e3 * (ended - between):.0f} ms, equal: {same}")


if __name__ == "__main__":
    main()
