"""A small server: continuous batches of decoding over a tiny Llama, captured before the first request comes.

    pip install fastapi uvicorn
    uvicorn --factory examples.serve:app --port 8000
    curl -d '{"prompt": [3, 14, 15], "tokens": 8}' -H 'content-type: application/json' localhost:8000/generate

One thread decodes. Each step feeds one token to every sequence that is served, of its prompt first; sequences come and
go between steps. A batch is filled up to the next of BATCHES, so that its size is one that was prepared. Weights may
be reloaded while requests are served: the next step uses them, and nothing is captured anew.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import pygraph

BATCHES = (1, 2, 4, 8)
LENGTH, VOCABULARY = 64, 128
"""Tokens of the longest sequence, and tokens that there are."""


class Layer(nn.Module):
    """A decoder's layer with a cache for each sequence that is served, and for each that fills a batch up."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        shape = (2 * max(BATCHES), LENGTH, heads, width // heads)
        self.register_buffer("keys", torch.zeros(shape), persistent=False)
        self.register_buffer("values", torch.zeros(shape), persistent=False)

    def forward(self, x: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.before(x)).view(len(x), 3, self.heads, -1).unbind(1)
        self.keys[rows, at] = k
        self.values[rows, at] = v
        seen = torch.arange(LENGTH, device=x.device) <= at[:, None]
        scores = torch.einsum("bhd,blhd->bhl", q, self.keys[rows]) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
        x = x + self.out(torch.einsum("bhl,blhd->bhd", weights, self.values[rows]).flatten(1))
        return x + self.down(nn.functional.silu(self.up(self.between(x))))


class Decoder(nn.Module):
    """One token of each sequence, in the cache of a row and at a position, to the next."""

    def __init__(self, layers: int = 2, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.places(at)
        for layer in self.layers:
            x = layer(x, rows, at)
        return self.head(self.norm(x)).argmax(-1)


@dataclass(eq=False)
class Sequence:
    """A request that is served in the cache of ``row``: all its tokens so far, of which ``at`` were fed. It is over
    once ``wanted`` follow the first ``given``."""

    tokens: list[int]
    given: int
    wanted: int
    answer: Future[list[int]] = field(default_factory=Future)
    row: int = -1
    at: int = 0


class Engine:
    """Serves requests on a thread of its own. ``step`` runs the model: compiled in a session, or what is given."""

    def __init__(self, model: Decoder, step: Callable[..., torch.Tensor] | None = None) -> None:
        self.model, self.device = model.eval(), next(model.parameters()).device
        self.session = pygraph.Session(memory_limit="1GiB")
        self.steps = 0
        self._step = step or self._prepared()
        self._free = list(range(max(BATCHES)))
        self._waiting: queue.SimpleQueue[Sequence | None] = queue.SimpleQueue()
        self._serving: list[Sequence] = []
        self._closing = False
        self._between_steps = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="decode")
        self._thread.start()

    def _prepared(self) -> Callable[..., torch.Tensor]:
        """The compiled model, all of its sizes captured; no other will be."""
        step: Callable[..., torch.Tensor] = torch.compile(self.model, backend="pygraph", dynamic=True)
        sizes = {((0, 0), (1, 0), (2, 0)): BATCHES}
        with torch.no_grad():
            prepared = self.session.prepare(step, sizes, args=self._batch([]))
        if prepared.refused:
            raise RuntimeError(str(prepared))
        self.session.freeze()
        return step

    def submit(self, prompt: list[int], tokens: int) -> Future[list[int]]:
        """The tokens that follow ``prompt``. Raises ValueError for what has no room."""
        if not prompt or len(prompt) + tokens > LENGTH or not all(0 <= token < VOCABULARY for token in prompt):
            raise ValueError(f"a prompt has tokens below {VOCABULARY}: {LENGTH} at most, with those that are asked for")
        sequence = Sequence(list(prompt), len(prompt), tokens)
        self._waiting.put(sequence)
        return sequence.answer

    def reload(self, state: Mapping[str, torch.Tensor]) -> None:
        """Other weights, from the next step on."""
        with self._between_steps:
            self.model.load_state_dict(state)

    def close(self) -> None:
        """Serve what was submitted, then end."""
        self._waiting.put(None)
        self._thread.join()
        self.session.close()

    def metrics(self) -> str:
        """Counters of all regions, and bytes of captures, in the text format of Prometheus."""
        lines = [f"decode_steps_total {self.steps}", f"pygraph_captures_bytes {self.session.memory().instances}"]
        for region, counted in self.session.stats().items():
            lines += [f'pygraph_{name.replace(".", "_").replace("-", "_")}_total{{region="{region}"}} {count}'
                      for name, count in counted.items()]  # fmt: skip
        return "\n".join(lines) + "\n"

    # -- the thread ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _serve(self) -> None:
        while not self._closing or self._serving:
            self._admit()
            try:
                self._decode()
            except Exception as error:  # noqa: BLE001 - whoever waits is told
                self._end(self._serving[:], error)

    def _admit(self) -> None:
        """Begin to serve what waits, as far as there is room; wait where nothing is served."""
        while self._free and not self._closing:
            try:
                sequence = self._waiting.get(block=not self._serving)
            except queue.Empty:
                return
            if sequence is None:
                self._closing = True
            else:
                sequence.row = self._free.pop()
                self._serving.append(sequence)

    def _decode(self) -> None:
        """One step of all sequences."""
        served = list(self._serving)
        if not served:
            return
        with self._between_steps:
            following = self._step(*self._batch(served)).tolist()
        self.steps += 1
        for sequence, token in zip(served, following[: len(served)], strict=True):
            sequence.at += 1
            if sequence.at == len(sequence.tokens):
                sequence.tokens.append(token)
        self._end([each for each in served if len(each.tokens) == each.given + each.wanted])

    def _end(self, over: list[Sequence], error: Exception | None = None) -> None:
        for sequence in over:
            self._serving.remove(sequence)
            self._free.append(sequence.row)
            if error is None:
                sequence.answer.set_result(sequence.tokens[sequence.given :])
            else:
                sequence.answer.set_exception(error)

    def _batch(self, served: list[Sequence]) -> tuple[torch.Tensor, ...]:
        """Tokens, rows and positions of a step, filled up to the next size: in rows of nobody's."""
        size = next(batch for batch in BATCHES if batch >= len(served))
        facts = [(sequence.tokens[sequence.at], sequence.row, sequence.at) for sequence in served]
        facts += [(0, max(BATCHES) + number, 0) for number in range(size - len(served))]
        return tuple(torch.tensor(column, device=self.device) for column in zip(*facts, strict=True))


def app() -> Any:
    """The server, for uvicorn."""
    from contextlib import asynccontextmanager

    from fastapi import Body, FastAPI, HTTPException
    from fastapi.responses import PlainTextResponse

    torch.manual_seed(0)
    engine = Engine(Decoder().to("cuda" if torch.cuda.is_available() else "cpu"))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> Any:
        yield
        await asyncio.to_thread(engine.close)

    server = FastAPI(lifespan=lifespan)

    @server.post("/generate")
    async def generate(prompt: list[int] = Body(), tokens: int = Body(ge=1)) -> list[int]:  # noqa: B008
        try:
            return await asyncio.wrap_future(engine.submit(prompt, tokens))
        except ValueError as error:
            raise HTTPException(422, str(error)) from error

    @server.post("/reload")
    async def reload(path: str = Body(embed=True)) -> None:
        state = await asyncio.to_thread(torch.load, path, weights_only=True)
        await asyncio.to_thread(engine.reload, state)

    @server.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> str:
        return engine.metrics()

    return server
