"""Speculative decoding in one launch: a small model drafts tokens, a large one checks them, and the device loops.

    iteration:  draft 4 tokens, one by one ─ the target's choices behind each, in one pass ─ keep as many as agree, + 1

Greedy: the text is the target's own. Caches are static; an iteration sets their lengths back to what is kept.

python examples/speculative.py
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import pygraph
from pygraph.integrations.transformers import generate

LONGEST, NEW, DRAFTED = 16, 96, 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def models(layers: int = 4) -> tuple[Any, Any]:
    """A target of so many layers, and its first one as a draft. The others change little, as those of a model whose
    draft was trained for it would."""
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    target = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, eos_token_id=None))
    draft = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, eos_token_id=None))
    with torch.no_grad():
        for layer in target.model.layers[1:]:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
    draft.load_state_dict(target.state_dict(), strict=False)
    return target.to(DEVICE).eval(), draft.to(DEVICE).eval()


class Decoder:
    """Speculative decoding of single texts of at most ``size`` tokens."""

    def __init__(self, target: Any, draft: Any, size: int) -> None:
        self.target, self.draft, self.size = target, draft, size + DRAFTED
        self.caches = {each: StaticCache(each.config, max_cache_len=self.size) for each in (target, draft)}

    def generate(self, prompt: torch.Tensor, new: int) -> tuple[torch.Tensor, int]:
        """The prompt and ``new`` tokens, [1, length], and how many iterations made them."""
        length = prompt.shape[1]
        end = torch.tensor([length + new], device=prompt.device)
        with torch.no_grad():
            for model, cache in self.caches.items():
                cache.reset()
                model(prompt[:, :-1], past_key_values=cache)
        text = torch.nn.functional.pad(prompt, (0, self.size - length))
        done = pygraph.loop(
            self.step,
            (text, torch.tensor([length], device=prompt.device), end),
            steps=new,
            until=lambda state: state[1] >= state[2],
            held=[self.target, self.draft, *(layer for cache in self.caches.values() for layer in cache.layers)],
        )
        return done.state[0][:, : length + new], int(done.count)

    def step(self, state: Any) -> Any:
        """Between one token and ``DRAFTED + 1``. The last token of a text is in no cache yet."""
        text, length, end = state
        last = length - 1
        tokens = [text.gather(1, last[None])]
        for number in range(DRAFTED + 1):  # the last of these only enters the draft's cache, in case that all are kept
            tokens.append(self._after(self.draft, tokens[-1], last + number))
        drafted = torch.cat(tokens[:-1], 1)
        chosen = self._after(self.target, drafted, last)
        agreed = (drafted[:, 1:] == chosen[:, :-1]).long().cumprod(1).sum(1)
        places = length + torch.arange(DRAFTED + 1, device=text.device)
        return text.index_copy(1, places, chosen), torch.minimum(length + agreed + 1, end), end

    def _after(self, model: Any, tokens: torch.Tensor, begin: torch.Tensor) -> torch.Tensor:
        """The most likely token behind each of those from position ``begin`` on, [1, tokens]."""
        cache = self.caches[model]
        for layer in cache.layers:
            layer.cumulative_length.copy_(begin[0])  # what lies behind is written anew
        positions = begin + torch.arange(tokens.shape[1], device=tokens.device)
        seen = torch.arange(self.size, device=tokens.device) <= positions[:, None]
        given = {"position_ids": positions[None], "attention_mask": seen[None, None], "past_key_values": cache}
        return model(tokens, **given).logits.argmax(-1)


def main() -> None:
    torch.manual_seed(0)
    target, draft = models()
    decoder = Decoder(target, draft, LONGEST + NEW)
    for length in (12, 9, LONGEST, 11):
        prompt = torch.randint(256, (1, length), device=DEVICE)
        began = perf_counter()
        expected = generate(target, prompt, max_new_tokens=NEW, max_cache_len=LONGEST + NEW)
        between = perf_counter()
        text, count = decoder.generate(prompt, NEW)
        ended = perf_counter()
        times = f"target alone {1e3 * (between - began):.0f} ms, speculative {1e3 * (ended - between):.0f} ms"
        print(f"{times}, {NEW / count:.1f} tokens an iteration, equal: {torch.equal(text, expected)}")


if __name__ == "__main__":
    main()
