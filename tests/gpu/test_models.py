"""Models of transformers, timm and torchvision on CUDA against eager, small enough to compile in seconds, with random
weights: outputs in inference, loss and gradients in training."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import pygraph
from pygraph.backend import pygraph as backend
from pygraph.program.order import Order
from pygraph.program.program import Program
from pygraph.runtime.cuda import executable
from tests.gpu.programs import assert_replayed

hf = pytest.importorskip("transformers")
timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("fresh")]

CALLS = 4
WORDS, LENGTH, BATCH = 503, 32, 2


@dataclass(frozen=True)
class Entry:
    """How to make a model and its keyword arguments; ``dtype`` is that of inference (training is in float32)."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, torch.Tensor]]
    dtype: torch.dtype = torch.float32


def tokens() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(0, WORDS, (BATCH, LENGTH))}


def pairs() -> dict[str, torch.Tensor]:
    source, target = torch.randint(0, WORDS, (2, BATCH, LENGTH))
    return {"input_ids": source, "decoder_input_ids": target}


def image(size: int = 64) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {"x": torch.randn(4 * BATCH, 3, size, size)}


def language(kind: str, **sizes: Any) -> Callable[[], nn.Module]:
    """A small ``<kind>ForCausalLM``, ``…ForMaskedLM`` or ``…LMHeadModel`` without a cache."""

    def make() -> nn.Module:
        config = getattr(hf, f"{kind}Config")(vocab_size=WORDS, **sizes)
        config.use_cache = False
        for name, value in vars(config).items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        for head in ("ForCausalLM", "ForMaskedLM", "LMHeadModel", "ForConditionalGeneration"):
            model = getattr(hf, kind + head, None)
            if model is not None:
                return model(config)
        raise LookupError(kind)

    return make


ENCODER = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
DECODER = {**ENCODER, "num_key_value_heads": 2}

HALF, BF16 = torch.float16, torch.bfloat16

SWEEP: dict[str, Entry] = {
    "bert": Entry(language("Bert", **ENCODER), tokens, HALF),
    "gpt2": Entry(language("GPT2", n_embd=64, n_layer=2, n_head=4), tokens, HALF),
    "gpt_neox": Entry(language("GPTNeoX", **ENCODER), tokens, HALF),
    "llama": Entry(language("Llama", **DECODER), tokens, BF16),
    "gemma": Entry(language("Gemma", **DECODER, head_dim=16), tokens, BF16),
    "phi": Entry(language("Phi", **DECODER), tokens, HALF),
    "t5": Entry(
        language("T5", d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0), pairs
    ),
    "resnet18": Entry(lambda: torchvision.models.resnet18(num_classes=10), image(), HALF),
    "mobilenet_v3": Entry(lambda: torchvision.models.mobilenet_v3_small(num_classes=10), image(), HALF),
    "vit": Entry(lambda: torchvision.models.VisionTransformer(32, 8, 2, 4, 64, 128, num_classes=10), image(32), HALF),
    "convnext": Entry(lambda: timm.create_model("convnext_atto", num_classes=10), image(), HALF),
    "mixer": Entry(lambda: timm.create_model("mixer_s32_224", img_size=64, num_classes=10), image(), HALF),
}


def outputs(result: Any) -> list[torch.Tensor]:
    """The floating tensors of whatever a model returns."""
    if hasattr(result, "logits"):
        result = result.logits
    leaves = torch.utils._pytree.tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def is_close(actual: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor) -> bool:
    """No further from the same model in float64 than a few times what ``expected`` is."""
    scale = exact.double().abs().max().clamp_min(1e-4)
    ours = (actual.double() - exact.double()).abs().max() / scale
    theirs = (expected.double() - exact.double()).abs().max() / scale
    return bool(ours <= 4 * theirs + max(8 * torch.finfo(expected.dtype).eps, 1e-5))


@pytest.mark.parametrize("name", SWEEP)
def test_inference_equals_eager(name: str) -> None:
    entry = SWEEP[name]
    model = entry.make().cuda().to(entry.dtype).eval()
    ours = torch.compile(model, backend=backend)
    reference = entry.make().cuda().double().eval()
    reference.load_state_dict({k: v.double() if v.is_floating_point() else v for k, v in model.state_dict().items()})
    with torch.no_grad():
        for seed in range(CALLS):
            torch.manual_seed(seed)
            inputs = entry.inputs()
            exact = outputs(reference(**_cast(inputs, torch.double)))
            actual, expected = outputs(ours(**_cast(inputs, entry.dtype))), outputs(model(**_cast(inputs, entry.dtype)))
            for index, three in enumerate(zip(actual, expected, exact, strict=True)):
                assert is_close(*three), f"output {index} of call {seed}"
    assert_replayed()


@pytest.mark.parametrize("name", SWEEP)
def test_training_equals_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # convolutions in float32 proper, on both sides
    entry = SWEEP[name]
    model, reference = entry.make().cuda().train(), entry.make().cuda().double().train()
    for module in (*model.modules(), *reference.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    ours = torch.compile(model, backend=backend)
    with torch.enable_grad():
        for seed in range(CALLS):
            torch.manual_seed(seed)
            inputs = _cast(entry.inputs(), torch.float32)
            state = {k: v.clone() for k, v in model.state_dict().items()}
            reference.load_state_dict({k: v.double() if v.is_floating_point() else v for k, v in state.items()})
            exact = gradients(reference, reference, _cast(inputs, torch.double))
            expected = gradients(model, model, inputs)
            model.load_state_dict(state)
            actual = gradients(model, ours, inputs)
            far = [key for key, value in exact.items() if not is_close(actual[key], expected[key], value)]
            if far:  # a deep network with batch statistics may be as far from eager with Inductor alone
                model.load_state_dict(state)
                alone = gradients(model, torch.compile(model), inputs)
                far = [key for key in far if not is_close(actual[key], alone[key], exact[key])]
            assert not far, f"call {seed}: {far}"
    assert_replayed()


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("name", SWEEP)
def test_any_order_that_dependences_allow_has_the_same_bits(
    name: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches run in a row, in random orders: if a dependence were missing, some of them would give other bits, which
    each call is held against."""
    drawn, chained = random.Random(0), list[bool]()

    def chain(driver: object, graph: int, nodes: object, handles: Mapping[int, int], order: Order | None) -> None:
        if order is None:
            return
        left, row = dict(handles), list[int]()
        while left:
            ready = [launch for launch in left if not left.keys() & set(order.edges[launch])]
            row.append(left.pop(drawn.choice(ready)))
        chained.append(row != list(handles.values()))
        executable.replace_edges(graph, list(pairwise(row)))

    def check(program: Program, *_: object) -> None:
        assert program.order is not None

    monkeypatch.setattr(executable, "_reorder", chain)
    monkeypatch.setattr(executable, "verify_edges", check)  # an edge of a row may lead to an earlier launch
    entry, training = SWEEP[name], mode == "training"
    dtype = torch.float32 if training else entry.dtype
    model = entry.make().cuda().to(dtype).train(training)
    ours = torch.compile(model, backend=backend, options={"order": "dependences", "verify": "always"})
    for seed in range(CALLS):
        torch.manual_seed(seed)
        inputs = _cast(entry.inputs(), dtype)
        with torch.set_grad_enabled(training):
            if training:
                gradients(model, ours, inputs)
            else:
                ours(**inputs)
    assert_replayed()
    assert any(chained) or not chained  # some programs are a row


def gradients(model: nn.Module, call: Callable[..., Any], inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The loss, and the gradient of each parameter that has one."""
    model.zero_grad()
    loss = sum(out.square().mean() for out in outputs(call(**inputs)))
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def _cast(inputs: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {k: v.cuda().to(dtype) if v.is_floating_point() else v.cuda() for k, v in inputs.items()}


# -- mixtures of experts ----------------------------------------------------------------------------------------------


def test_decoding_with_experts_leaves_only_their_operator_outside() -> None:
    """It reads on the host how many tokens an expert has."""
    config = hf.MixtralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        experts_implementation="grouped_mm",
    )
    model = hf.MixtralForCausalLM(config).cuda().half().eval()
    compiled = torch.compile(model.forward, backend="pygraph")
    ours, plain = (hf.StaticCache(config=config, max_cache_len=32) for _ in range(2))
    for i, tokens in enumerate(torch.randint(0, 128, (12, 2, 1), device="cuda")):
        place = torch.tensor([i], device="cuda")
        logits = compiled(tokens, past_key_values=ours, cache_position=place).logits
        expected = model(tokens, past_key_values=plain, cache_position=place).logits
        torch.testing.assert_close(logits, expected, rtol=2e-2, atol=2e-2, msg=lambda text, i=i: f"step {i}: {text}")
    report = pygraph.reports()[-1]
    assert report.error is None
    assert {region.state for region in report.regions} == {"replay"}, [(r.state, r.why) for r in report.regions]
    left = [u for u in report.uncaptured() if u.reason == "host-read"]
    assert {u.op for u in left} == {"transformers.grouped_mm_fallback.default"}
    assert len(left) == 2 * config.num_hidden_layers
    assert report.emitted is not None
    assert set(report.emitted.outside) == {"transformers.grouped_mm_fallback.default"}, report.emitted.outside
