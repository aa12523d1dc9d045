"""Training steps on fixed batches: forward, backward and the optimizer. A user compiles the model and the update.

A step returns the loss; the parameters that are watched are compared too. Steps that draw random numbers are seeded
right before the first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.suite.inference import RESIDUAL_SCALE, floating
from benchmarks.suite.parts import Block, TokenModel, mlp
from benchmarks.workload import Compile, Training, Workload

__all__ = ["WORKLOADS"]

Sizes: TypeAlias = dict[str, Any]

Data: TypeAlias = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""Makes what a model is called with, and the classes that are right, on the device that is the default."""

Optimizing: TypeAlias = Callable[[Iterable[nn.Parameter], str], torch.optim.Optimizer]
"""Makes the optimizer of parameters that lie on a device."""

SEED = 1
"""Seed of random numbers that are drawn once the steps begin."""


def plain_sgd(parameters: Iterable[nn.Parameter], device: str) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def sgd(parameters: Iterable[nn.Parameter], device: str) -> torch.optim.Optimizer:
    """With its momentum made beforehand: ``reduce-overhead`` would overwrite what an update makes and keeps."""
    optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=1e-4)
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return optimizer


def adamw(parameters: Iterable[nn.Parameter], device: str) -> torch.optim.Optimizer:
    """With its counters on the GPU, where there is one: a capture by hand needs that."""
    return torch.optim.AdamW(parameters, lr=1e-4, capturable=device == "cuda")


def watched(*models: nn.Module) -> list[torch.Tensor]:
    """The first and the last matrix of each model: wrong gradients show there, steps later in the loss too.

    No vectors: biases that begin at zero are, under AdamW, little but the signs of gradients for some steps; so is the
    class token of a vision transformer.
    """
    found = []
    for model in models:
        first, *_, last = (parameter for parameter in model.parameters() if parameter.dim() in (2, 4))
        found += [first.detach(), last.detach()]
    return found


def stepping(
    compile: Compile, model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[], torch.Tensor]
) -> Training:
    """The usual step: loss, backward, update, gradients dropped."""
    update = compile(lambda: optimizer.step())
    torch.manual_seed(SEED)

    def step() -> torch.Tensor:
        loss = loss_of()
        loss.backward()
        update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Training(step, watched(model))


def classifying(
    compile: Compile,
    device: str,
    *,
    model: Callable[[], nn.Module],
    data: Data,
    optimizing: Optimizing,
    autocast: bool = False,
) -> Training:
    """Cross entropy of a model's logits [..., classes], in float32 or, on a GPU, under bfloat16 autocast."""
    torch.manual_seed(0)
    with torch.device(device):
        made, (x, y) = model().train(), data()
    forward = compile(made)

    def loss() -> torch.Tensor:
        # Without its cache, which make_graphed_callables refuses; no weight is cast twice in a step.
        with torch.autocast(device, torch.bfloat16, enabled=autocast and device == "cuda", cache_enabled=False):
            return nn.functional.cross_entropy(forward(x).flatten(0, -2), y.flatten())

    return stepping(compile, made, optimizing(made.parameters(), device), loss)


# -- what is classified ------------------------------------------------------------------------------------------------


def vectors(batch: int, width: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, width), torch.randint(0, classes, (batch,))


def images(batch: int, size: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch,))


def sequences(batch: int, length: int, words: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, words, (batch, length)), torch.randint(0, classes, (batch,))


def text(batch: int, length: int, words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and for each the next one."""
    tokens = torch.randint(0, words, (batch, length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


# -- models of ours and of torchvision ---------------------------------------------------------------------------------


def perceptron(inputs: int, hidden: int, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, classes),
    )  # fmt: skip


def resnet18() -> nn.Module:
    import torchvision

    model: nn.Module = torchvision.models.resnet18()
    return model


class Classifier(nn.Module):
    """Blocks over tokens [batch, length] and a class for each sequence; blocks may be checkpointed."""

    def __init__(self, words: int, longest: int, width: int, heads: int, layers: int, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(longest, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        made: torch.Tensor = self.head(self.norm(x).mean(1))
        return made


def drawn(make: Callable[[], nn.Module]) -> nn.Module:
    """The model, its matrices drawn with a deviation of 0.02, as those of GPT-2 and of ViT are."""
    model = make()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    return model


class Gpt(TokenModel):
    """GPT-2's architecture: logits [batch, length, words], by the weights of the embedding."""

    def __init__(self, words: int, longest: int, width: int, heads: int, layers: int) -> None:
        super().__init__(words, longest, width, heads, layers, causal=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return nn.functional.linear(self.norm(x), self.words.weight)


class Vit(nn.Module):
    """A vision transformer: patches of an image, a class token, blocks, a head on the class token."""

    def __init__(self, size: int, patch: int, width: int, heads: int, layers: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, width))
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        made: torch.Tensor = self.head(self.norm(x[:, 0]))
        return made


def convolution(inner: int, outer: int, size: int, stride: int = 1) -> nn.Sequential:
    """Without a bias, and a batch norm."""
    return nn.Sequential(nn.Conv2d(inner, outer, size, stride, size // 2, bias=False), nn.BatchNorm2d(outer))


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions. The last norm is small: rounding grows in no trained network either."""

    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        outer = 4 * width
        self.convolutions = nn.Sequential(
            convolution(inner, width, 1), nn.ReLU(), convolution(width, width, 3, stride), nn.ReLU(),
            convolution(width, outer, 1),
        )  # fmt: skip
        *_, last = (part for part in self.convolutions.modules() if isinstance(part, nn.BatchNorm2d))
        nn.init.constant_(last.weight, RESIDUAL_SCALE)
        same = inner == outer and stride == 1
        self.shortcut = nn.Identity() if same else convolution(inner, outer, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.convolutions(x) + self.shortcut(x))


def resnet(blocks: tuple[int, ...], width: int, classes: int) -> nn.Module:
    """A ResNet of bottlenecks, so many in each stage; each stage is twice as wide as the one before."""
    layers: list[nn.Module] = [convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inner = width
    for stage, count in enumerate(blocks):
        for place in range(count):
            layers.append(Bottleneck(inner, width * 2**stage, 2 if stage and not place else 1))
            inner = 4 * width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, classes))


class LstmModel(nn.Module):
    """A language model of torch's own LSTM: logits [batch, length, words]."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.words(tokens))
        made: torch.Tensor = self.head(states)
        return made


# -- steps that are not the usual one ----------------------------------------------------------------------------------


def accumulating(
    compile: Compile, device: str, *, model: Callable[[], nn.Module], data: Data, optimizing: Optimizing, batches: int
) -> Training:
    """The gradients of several micro-batches are accumulated before the update."""
    torch.manual_seed(0)
    with torch.device(device):
        made, given = model().train(), [data() for _ in range(batches)]
    optimizer = optimizing(made.parameters(), device)
    forward, update = compile(made), compile(lambda: optimizer.step())

    def step() -> torch.Tensor:
        total = torch.zeros((), device=device)
        for x, y in given:
            loss = nn.functional.cross_entropy(forward(x), y) / batches
            loss.backward()
            total += loss.detach()
        update()
        optimizer.zero_grad(set_to_none=True)
        return total

    return Training(step, watched(made))


class Critic(nn.Module):
    """Q function: value of (state, action)."""

    def __init__(self, states: int, actions: int, hidden: int) -> None:
        super().__init__()
        self.layers = mlp((states + actions, hidden, hidden, 1))

    def forward(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layers(torch.cat((state, action), 1))
        return made


def actor_critic(compile: Compile, device: str, *, states: int, actions: int, hidden: int, batch: int) -> Training:
    """An update of deep deterministic policy gradients on a batch of transitions."""
    torch.manual_seed(0)
    with torch.device(device):
        actor = nn.Sequential(mlp((states, hidden, hidden, actions)), nn.Tanh())
        critic = Critic(states, actions, hidden)
        before, after, action = torch.randn(batch, states), torch.randn(batch, states), torch.rand(batch, actions)
        reward = torch.randn(batch, 1)
    slow = [copy.deepcopy(model).requires_grad_(False) for model in (actor, critic)]
    actors, critics = adamw(actor.parameters(), device), adamw(critic.parameters(), device)
    followers: list[torch.Tensor] = [parameter for model in slow for parameter in model.parameters()]
    leaders: list[torch.Tensor] = [parameter for model in (actor, critic) for parameter in model.parameters()]

    def follow() -> None:
        with torch.no_grad():
            torch._foreach_lerp_(followers, leaders, 0.005)

    act, value, act_slowly, value_slowly = map(compile, (actor, critic, *slow))
    update_critic, update_actor = compile(lambda: critics.step()), compile(lambda: actors.step())
    following = compile(follow)

    def step() -> torch.Tensor:
        with torch.no_grad():
            expected = reward + 0.99 * value_slowly(after, act_slowly(after))
        critic_loss = nn.functional.mse_loss(value(before, action), expected)
        critic_loss.backward()
        update_critic()
        actor_loss = -value(before, act(before)).mean()
        actor_loss.backward()
        update_actor()
        following()
        critics.zero_grad(set_to_none=True)
        actors.zero_grad(set_to_none=True)
        return torch.stack((critic_loss.detach(), actor_loss.detach()))

    return Training(step, watched(actor, critic, *slow))


def per_sample(compile: Compile, device: str, *, inputs: int, hidden: int, classes: int, batch: int) -> Training:
    """The gradient of each sample, cut to a norm of 1, and their mean: what differentially private training does."""
    torch.manual_seed(0)
    with torch.device(device):
        model, (x, y) = mlp((inputs, hidden, hidden, classes)), vectors(batch, inputs, classes)
    weights = dict(model.named_parameters())

    def loss_of(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)

    def gradients(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        now = {name: weight.detach() for name, weight in weights.items()}
        found, losses = torch.vmap(torch.func.grad_and_value(loss_of), (None, 0, 0))(now, x, y)
        squares = [gradient.flatten(1).square().sum(1) for gradient in found.values()]
        scale = torch.stack(squares).sum(0).sqrt().reciprocal().clamp(max=1.0) / batch
        return losses.mean(), [torch.tensordot(scale, gradient, 1) for gradient in found.values()]

    optimizer = sgd(model.parameters(), device)
    private, update = compile(gradients), compile(lambda: optimizer.step())

    def step() -> torch.Tensor:
        loss: torch.Tensor
        loss, found = private(x, y)
        for weight, gradient in zip(weights.values(), found):  # noqa: B905 - Dynamo has no strict
            weight.grad = gradient
        update()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return Training(step, watched(model))


# -- models of transformers --------------------------------------------------------------------------------------------


def bert(
    compile: Compile,
    device: str,
    *,
    optimizing: Optimizing,
    batch: int,
    length: int,
    words: int,
    autocast: bool = False,
    **config: Any,
) -> Training:
    """Masked language modelling, with dropout of 0.1, in attention too, as BERT has it if ``config`` says nothing."""
    import transformers

    torch.manual_seed(0)
    model: Any = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=words, **config))
    model = model.to(device).train()
    tokens, labels = torch.randint(0, words, (2, batch, length), device=device).unbind()
    forward = compile(model)

    def loss() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=autocast, cache_enabled=False):
            made: torch.Tensor = forward(input_ids=tokens, labels=labels).loss
        return made

    return stepping(compile, model, optimizing(model.parameters(), device), loss)


def gpt2(compile: Compile, device: str, *, batch: int, length: int, words: int, **sizes: Any) -> Training:
    """Weights in float32, the forward under bfloat16 autocast, no dropout."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=words, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0, **sizes,
    )  # fmt: skip
    model: Any = transformers.GPT2LMHeadModel(config)
    model = model.to(device).train()
    tokens = torch.randint(0, words, (batch, length), device=device)
    forward = compile(model)

    def loss() -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            made: torch.Tensor = forward(input_ids=tokens, labels=tokens).loss
        return made

    return stepping(compile, model, adamw(model.parameters(), device), loss)


def llama(
    compile: Compile, device: str, *, optimizing: Optimizing, batch: int, length: int, words: int, **sizes: Any
) -> Training:
    """All in bfloat16 on a GPU: what the model's own memory leaves matters here."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=words, use_cache=False, **sizes)
    dtype = torch.float if floating(device) == torch.float else torch.bfloat16
    with torch.device(device):
        model: Any = transformers.LlamaForCausalLM(config)
        model = model.to(dtype).train()
    tokens = torch.randint(0, words, (batch, length), device=device)
    forward = compile(model)
    return stepping(
        compile, model, optimizing(model.parameters(), device), lambda: forward(input_ids=tokens, labels=tokens).loss
    )


# -- workloads ---------------------------------------------------------------------------------------------------------

DRIFT = "float32 gradients summed in another order, carried by a few optimizer steps"
ADAM_DRIFT = f"{DRIFT}; AdamW moves weights whose gradient is nearly zero by its sign"
ADAM_SMALL_WEIGHTS = (
    "AdamW moves a weight whose gradient is rounding noise by the whole rate, either way: apart by up to 2 · 1e-4 in "
    "each of 7 steps, where the largest weights are 0.09, drawn with a deviation of 0.02"
)
BFLOAT16 = "bfloat16 sums in another order; one step of its 8 bits is 0.8 %"
CONVOLUTIONS = "convolutions in TF32, cuDNN's default, by other algorithms, and batch norms on top of them"

LABELLED = partial(sequences, 16, length=128, words=32000, classes=16)
TINY_LABELLED = partial(sequences, 4, length=8, words=64, classes=16)
ENCODER = partial(Classifier, 32000, 128, width=512, heads=8, layers=6)
TINY_ENCODER = partial(Classifier, 64, 8, width=32, heads=2, layers=2)
TINY_LLAMA: Sizes = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TINY_BERT: Sizes = {**TINY_LLAMA, "max_position_embeddings": 16}
LLAMA: Sizes = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
}
BERT: Sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8}
NO_DROPOUT: Sizes = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
OPTIMIZERS: dict[str, Optimizing] = {"sgd": sgd, "adamw": adamw}


@dataclass(frozen=True)
class Model:
    """A model that each optimizer trains at a small and at a large batch. ``data`` and ``tiny_data`` take the batch."""

    name: str
    domain: str
    about: str
    model: Callable[[], nn.Module]
    data: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    tiny: Callable[[], nn.Module]
    tiny_data: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    batches: tuple[int, int]
    autocast: bool = False
    tolerance: float = 2e-2
    why_tolerance: str = BFLOAT16

    def workloads(self) -> Iterator[Workload]:
        build = partial(classifying, autocast=self.autocast)
        for name, optimizing in OPTIMIZERS.items():
            tiny = partial(
                build, model=partial(drawn, self.tiny), data=partial(self.tiny_data, 4), optimizing=optimizing
            )
            for batch, calls in zip(self.batches, (20, 5), strict=True):
                yield Workload(
                    f"{self.name}-{name}-{batch}",
                    "training",
                    self.domain,
                    f"{self.about}, {'SGD with momentum' if name == 'sgd' else 'AdamW'}, batch {batch}.",
                    partial(
                        build, model=partial(drawn, self.model), data=partial(self.data, batch), optimizing=optimizing
                    ),
                    tiny,
                    calls=calls,
                    tolerance=self.tolerance,
                    why_tolerance=self.why_tolerance,
                    whole_step=True,
                )


MODELS = (
    Model(
        "gpt2-small",
        "language",
        "GPT-2 small, 12 layers of width 768, sequences of 256, under bfloat16 autocast",
        partial(Gpt, 50257, 1024, 768, 12, 12),
        partial(text, length=256, words=50257),
        partial(Gpt, 64, 16, 32, 2, 2),
        partial(text, length=8, words=64),
        (4, 32),
        autocast=True,
    ),
    Model(
        "vit-b",
        "vision",
        "ViT-B/16 on images of 224 pixels, under bfloat16 autocast",
        partial(Vit, 224, 16, 768, 12, 12, 1000),
        partial(images, size=224, classes=1000),
        partial(Vit, 32, 8, 32, 2, 2, 10),
        partial(images, size=32, classes=10),
        (4, 64),
        autocast=True,
    ),
    Model(
        "resnet50",
        "vision",
        "ResNet-50 on images of 224 pixels, in float32",
        partial(resnet, (3, 4, 6, 3), 64, 1000),
        partial(images, size=224, classes=1000),
        partial(resnet, (1, 1), 8, 10),
        partial(images, size=64, classes=10),
        (4, 64),
        tolerance=3e-2,
        why_tolerance=CONVOLUTIONS,
    ),
    Model(
        "lstm",
        "language",
        "A language model of two LSTM layers (torch's module) of width 650, 10,000 words, sequences of 35",
        partial(LstmModel, 10000, 650, 2),
        partial(text, length=35, words=10000),
        partial(LstmModel, 64, 32, 2),
        partial(text, length=8, words=64),
        (20, 256),
        why_tolerance=ADAM_SMALL_WEIGHTS,
    ),
)

WORKLOADS: tuple[Workload, ...] = (
    Workload(
        "mlp-training",
        "training",
        "perceptrons",
        "A perceptron 512-1024-1024-1024-10, batch 64, with dropout, SGD and cross entropy: host-bound.",
        partial(
            classifying,
            model=partial(perceptron, 512, 1024, 10),
            data=partial(vectors, 64, 512, 10),
            optimizing=plain_sgd,
        ),
        partial(
            classifying, model=partial(perceptron, 32, 48, 10), data=partial(vectors, 8, 32, 10), optimizing=plain_sgd
        ),
        calls=50,
        tolerance=1e-3,
        why_tolerance=DRIFT,
        random=True,
        whole_step=True,
    ),
    Workload(
        "bert-small-training",
        "training",
        "language",
        "A BERT of 4 layers, width 512, batch 16, with dropout, also in attention, and AdamW.",
        partial(bert, optimizing=adamw, batch=16, length=128, words=30522, **BERT),
        partial(bert, optimizing=adamw, batch=2, length=8, words=64, **TINY_BERT),
        tolerance=2e-2,
        why_tolerance=ADAM_SMALL_WEIGHTS,
        random=True,
        packages=("transformers",),
        imports=("transformers.models.bert.modeling_bert",),
    ),
    Workload(
        "bert-base-training",
        "training",
        "language",
        "BERT-base without dropout, one sequence of 128, under bfloat16 autocast with SGD and momentum: short kernels.",
        partial(bert, optimizing=sgd, batch=1, length=128, words=30522, autocast=True, **NO_DROPOUT),
        partial(bert, optimizing=sgd, batch=2, length=8, words=64, **TINY_BERT, **NO_DROPOUT),
        calls=20,
        tolerance=2e-2,
        why_tolerance=BFLOAT16,
        whole_step=True,
        packages=("transformers",),
        imports=("transformers.models.bert.modeling_bert",),
    ),
    Workload(
        "resnet18-training",
        "training",
        "vision",
        "ResNet-18, batch 32, in float32 with SGD and momentum; batch statistics change in place.",
        partial(classifying, model=resnet18, data=partial(images, 32, 224, 1000), optimizing=sgd),
        partial(classifying, model=resnet18, data=partial(images, 4, 32, 1000), optimizing=sgd),
        calls=15,
        tolerance=3e-2,
        why_tolerance=CONVOLUTIONS,
        whole_step=True,
        packages=("torchvision",),
        imports=("torchvision",),
    ),
    Workload(
        "llama-1b-training",
        "training",
        "language",
        "A Llama of a billion parameters in bfloat16, four sequences of 1,024, SGD: peak memory is what matters.",
        partial(llama, optimizing=plain_sgd, batch=4, length=1024, words=32000, **LLAMA),
        partial(llama, optimizing=plain_sgd, batch=2, length=8, words=64, **TINY_LLAMA),
        calls=3,
        tolerance=2e-2,
        why_tolerance=BFLOAT16,
        packages=("transformers",),
        imports=("transformers.models.llama.modeling_llama",),
    ),
    Workload(
        "llama-1b-adamw",
        "training",
        "language",
        "The same Llama with AdamW, whose state is twice the model: peak memory again.",
        partial(llama, optimizing=adamw, batch=4, length=1024, words=32000, **LLAMA),
        partial(llama, optimizing=adamw, batch=2, length=8, words=64, **TINY_LLAMA),
        calls=3,
        tolerance=2e-2,
        why_tolerance=BFLOAT16,
        packages=("transformers",),
        imports=("transformers.models.llama.modeling_llama",),
    ),
    Workload(
        "gpt2-small-training",
        "training",
        "language",
        "A GPT-2 of 6 layers, width 768, eight sequences of 512, under bfloat16 autocast, AdamW.",
        partial(gpt2, batch=8, length=512, words=50257, n_embd=768, n_layer=6, n_head=12),
        partial(gpt2, batch=2, length=8, words=64, n_embd=32, n_layer=2, n_head=2),
        calls=10,
        tolerance=2e-2,
        why_tolerance=BFLOAT16,
        packages=("transformers",),
        imports=("transformers.models.gpt2.modeling_gpt2",),
    ),
    Workload(
        "accumulation-training",
        "training",
        "language",
        "A transformer classifier of 6 layers, width 512: two micro-batches of 16 whose gradients are accumulated.",
        partial(accumulating, model=partial(ENCODER, checkpointed=False), data=LABELLED, optimizing=adamw, batches=2),
        partial(
            accumulating,
            model=partial(TINY_ENCODER, checkpointed=False),
            data=TINY_LABELLED,
            optimizing=adamw,
            batches=2,
        ),
        why_tolerance=ADAM_DRIFT,
        whole_step=True,
    ),
    Workload(
        "checkpoint-training",
        "training",
        "language",
        "The same classifier at batch 16 with every block checkpointed: activations are computed a second time.",
        partial(classifying, model=partial(ENCODER, checkpointed=True), data=LABELLED, optimizing=adamw),
        partial(classifying, model=partial(TINY_ENCODER, checkpointed=True), data=TINY_LABELLED, optimizing=adamw),
        why_tolerance=ADAM_DRIFT,
    ),
    *(workload for model in MODELS for workload in model.workloads()),
    Workload(
        "actor-critic-training",
        "training",
        "reinforcement",
        "An update of deep deterministic policy gradients, width 256, batch 256: two losses, two AdamWs, slow copies.",
        partial(actor_critic, states=17, actions=6, hidden=256, batch=256),
        partial(actor_critic, states=5, actions=2, hidden=16, batch=8),
        calls=50,
        tolerance=1e-2,
        why_tolerance=ADAM_DRIFT,
        whole_step=True,
    ),
    Workload(
        "per-sample-training",
        "training",
        "perceptrons",
        "The clipped gradient of each of 64 samples, by torch.func, for a perceptron 512-512-512-10, and SGD.",
        partial(per_sample, inputs=512, hidden=512, classes=10, batch=64),
        partial(per_sample, inputs=32, hidden=24, classes=10, batch=8),
        calls=50,
        tolerance=1e-3,
        why_tolerance=DRIFT,
        whole_step=True,
    ),
)
