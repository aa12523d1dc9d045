"""transformers: ``generate`` with a decoding step that is captured once, for all prompts.

    model.generate(**inputs, **pygraph.integrations.transformers.generation(max_cache_len=2048))

Also ``generate`` in one launch, in which the device decides when all texts have ended.

    pygraph.integrations.transformers.generate(model, inputs, max_new_tokens=128)

Interface: ``generate``, ``CompileConfig``, ``StaticCache``, ``prepare_inputs_for_generation`` and ``max_cache_len`` of
transformers 5.23.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from transformers import CompileConfig, StaticCache

import pygraph

__all__ = ["generate", "generation"]


def generation(max_cache_len: int, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Keywords for ``generate``, or for a ``GenerationConfig``: a static cache of ``max_cache_len`` tokens, and
    decoding steps compiled with ``backend="pygraph"``, on any device. Equal keywords share their program.

    The pass over the prompt runs uncompiled. Longer texts get a longer cache, with another program and capture.

    Args:
        max_cache_len: tokens of the longest text, with its prompt
        options: options of the backend
    """
    config: Any = CompileConfig(backend="pygraph", mode=cast("Any", None), options=dict(options or {}))
    config._compile_all_devices = True  # a CPU, too
    return {"cache_implementation": "static", "max_cache_len": max_cache_len, "compile_config": config}


def generate(
    model: Any,
    inputs: torch.Tensor | Mapping[str, torch.Tensor],
    *,
    max_new_tokens: int,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int = 0,
    max_cache_len: int | None = None,
    streamer: Any = None,
    options: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """Tokens of prompts and texts, as ``model.generate`` of a decoder-only model with a static cache returns them.

    From the third call with this batch size on, one launch makes all tokens after the pass over the prompts. On CUDA,
    Inductor compiles decoding steps. A model keeps its latest cache, for calls with the same batch size and
    ``max_cache_len``.

    Args:
        model: decoder-only model
        inputs: tokens [batch, length]; or a mapping with these as ``input_ids``, and an ``attention_mask``
        max_new_tokens: maximum number of new tokens per text
        do_sample: draw tokens from torch's default generator, with the next three options; else the most likely token
        temperature: divisor of logits
        top_k: draw only from this number of most likely tokens
        top_p: draw only from the most likely tokens whose probabilities add up to this
        eos_token_id: tokens that end a text; None: none
        pad_token_id: token after the end of a text
        max_cache_len: length of the cache in tokens; None: as this call needs
        streamer: receives prompts and tokens, as from ``model.generate``, while the loop runs, from another thread
        options: see ``pygraph.graph``
    """
    given = {"input_ids": inputs} if isinstance(inputs, torch.Tensor) else inputs
    prompt = given["input_ids"]
    batch, length = prompt.shape
    mask = given.get("attention_mask", torch.ones_like(prompt))
    size = max_cache_len or length + max_new_tokens
    if size < length + max_new_tokens:
        raise ValueError(f"a cache of {size} tokens holds no text of {length + max_new_tokens}")
    ends = () if eos_token_id is None else (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id)
    cache = _cache(model, batch, size)
    if streamer is not None:
        streamer.put(prompt.cpu())
    forward = _forward(cast("Any", type(model)), model.device.type)

    def choose(logits: torch.Tensor) -> torch.Tensor:
        scores = logits[:, -1].to(torch.float32)
        return _drawn(scores, temperature, top_k, top_p) if do_sample else scores.argmax(-1)

    def step(state: Any) -> Any:
        token, position, seen, finished = state
        prepared = model.prepare_inputs_for_generation(
            token, past_key_values=cache, attention_mask=seen, position_ids=position, use_cache=True
        )
        new = choose(forward(model, **prepared, return_dict=True).logits)
        if ends:
            new = torch.where(finished, pad_token_id, new)
            finished = finished | _is_any(new, ends)
        return new[:, None], position + 1, seen, finished

    with torch.no_grad():
        position = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
        prepared = model.prepare_inputs_for_generation(
            prompt,
            past_key_values=cache,
            attention_mask=mask,
            position_ids=position,
            use_cache=True,
            is_first_iteration=True,
        )
        token = choose(model(**prepared, return_dict=True).logits[:, -1:])
        rest = mask.new_ones(batch, size - length)  # the causal mask excludes future tokens
        state = (token[:, None], position[:, -1:] + 1, torch.cat([mask, rest], -1), _is_any(token, ends))
    if streamer is not None:
        streamer.put(token.cpu())
    done = pygraph.loop(
        step,
        state,
        steps=max_new_tokens - 1,
        until=_all_finished if ends else None,
        collect=_token,
        follow=None if streamer is None else _putting(streamer),
        held=[model, cache, *cache.layers],
        options=options,
    )
    if streamer is not None:
        streamer.end()
    return torch.cat([prompt, token[:, None], done.collected[: int(done.count)].T], -1)


_caches: WeakKeyDictionary[Any, tuple[tuple[int, int], StaticCache]] = WeakKeyDictionary()


def _cache(model: Any, batch: int, size: int) -> StaticCache:
    """An empty cache: the cache of the model's latest call, if batch and size are equal."""
    key, cache = _caches.get(model, (None, None))
    if cache is None or key != (batch, size):
        cache = StaticCache(model.config, max_cache_len=size)
        _caches[model] = (batch, size), cache
    cast("Any", cache).reset()
    return cache


@functools.cache
def _forward(kind: Any, device: str) -> Callable[..., Any]:
    """Forward of a decoding step, of any model of this class: compiled by Inductor, except on a CPU. A model's own
    compiled call (``get_compiled_call``) changes with each call of ``model.generate``."""
    forward: Callable[..., Any] = kind.__call__
    return forward if device == "cpu" else torch.compile(forward)


def _token(state: Any) -> torch.Tensor:
    return cast("torch.Tensor", state[0][:, 0])


def _putting(streamer: Any) -> Callable[[torch.Tensor], None]:
    def put(rows: torch.Tensor) -> None:
        for row in rows:
            streamer.put(row)

    return put


def _all_finished(state: Any) -> torch.Tensor:
    return cast("torch.Tensor", state[3].all())


def _is_any(tokens: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
    found = torch.zeros_like(tokens, dtype=torch.bool)
    for end in ends:
        found = found | (tokens == end)
    return found


def _drawn(scores: torch.Tensor, temperature: float, top_k: int | None, top_p: float | None) -> torch.Tensor:
    """Tokens drawn by ``scores``, as in transformers with ``torch.multinomial``, but without a wait for the device."""
    if temperature != 1.0:
        scores = scores / temperature
    if top_k:
        least = torch.topk(scores, min(top_k, scores.size(-1)))[0][..., -1, None]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if top_p is not None and top_p < 1.0:
        ordered, places = torch.sort(scores, descending=False)
        unlikely = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
        unlikely[..., -1:] = False
        scores = scores.masked_fill(unlikely.scatter(1, places, unlikely), -torch.inf)
    probabilities = scores.softmax(-1)
    return (probabilities / torch.empty_like(probabilities).exponential_(1)).argmax(-1)
