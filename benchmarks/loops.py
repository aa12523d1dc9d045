"""Loops on the device, by ``pygraph.loop``, against loops of the host.

    python benchmarks/loops.py [--device cuda] [--tiny] [--only integrator generate-1 …] [--seconds 200] [--out FILE]

    integrator   1,000 steps of rk4 with a small network: the host replays one step, captured by hand or by ours
    unrolled     100 iterations of 5 launches: one graph of 500 launches, by hand; and memory of both
    rollout      256 steps of a policy in 1,024 environments: a step compiled by default, and with reduce-overhead
    diffusion    20 steps of DDIM with a UNet: the network compiled with reduce-overhead
    early-exit   16 layers, of which a ``torch.cond`` skips the latter half: compiled by default
    while        ``torch.while_loop`` of 100 iterations of 5 launches: one graph of 100 bodies, by hand; and memory
    generate-1, generate-8, generate-3b
                 128 new tokens of a Llama of 1 B parameters, greedy, by batch, and of one of 3 B: ``model.generate`` of
                 transformers with reduce-overhead

Sides take turns in one process, and each is drained. Results are compared before anything is timed, but for texts:
products in half precision, summed in another order, choose other words of a network without training. Above 1, the
loop on the device takes less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pygraph
from benchmarks.capture_cost import assert_close, drain
from benchmarks.suite.diffusion import tiny_unet, unet
from benchmarks.suite.inference import made
from benchmarks.suite.parts import Perceptron
from pygraph.bench.worker import settling
from pygraph.runtime.native_build import waiting_for_builds

__all__ = ["ROWS", "measure"]

OURS = "loop"
WARM, LONGEST_CONTEST = 6, 200
"""Minimum number of untimed calls, and limit on calls while orders of launches are undecided."""
TOLERANCE = 1e-2
"""Tolerance, relative to the largest magnitude: half-precision sums may be in another order."""

Run = Callable[[], Any]
Sides = dict[str, Run]
Row = dict[str, Any]


def by_hand(function: Callable[..., Any], *args: torch.Tensor) -> tuple[Run, Any]:
    """Capture a call with these tensors as in torch's documentation. Returns the graph's replay, and the results."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function(*args)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function(*args)
    return graph.replay, result


def integrator(device: str, tiny: bool) -> Sides:
    width, steps, h = (8, 10, 1e-3) if tiny else (64, 1000, 1e-3)
    net = made(lambda: nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)), device)
    net.float()
    first = torch.randn(32, width, device=device)

    def step(x: torch.Tensor) -> torch.Tensor:
        a = net(x)
        b = net(x + h / 2 * a)
        c = net(x + h / 2 * b)
        d = net(x + h * c)
        new: torch.Tensor = x + h / 6 * (a + 2 * b + 2 * c + d)
        return new

    graph = pygraph.graph(step, held=net)

    def replays() -> torch.Tensor:
        x = first
        for _ in range(steps):
            x = graph(x)
        return x

    sides: Sides = {OURS: lambda: pygraph.loop(step, first, steps=steps, held=net).state, "replays": replays}
    if device == "cuda":
        static = first.clone()
        replay, _ = by_hand(lambda x: x.copy_(step(x)), static)

        def hand() -> torch.Tensor:
            static.copy_(first)
            for _ in range(steps):
                replay()
            return static.clone()

        sides["by hand"] = hand
    return sides


def unrolled(device: str, tiny: bool) -> Sides:
    width, steps = (8, 5) if tiny else (256, 100)
    weight, first = (torch.randn(width, width, device=device) / width**0.5 for _ in range(2))

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight).mul(0.5).add(first).sin()

    def every(x: torch.Tensor) -> torch.Tensor:
        for _ in range(steps):
            x = step(x)
        return x

    sides: Sides = {OURS: lambda: pygraph.loop(step, first, steps=steps, held=[weight, first]).state}
    if device == "cuda":
        replay, result = by_hand(every, first)
        sides["by hand"] = lambda: (replay(), result)[1]
    else:
        sides["eager"] = lambda: every(first)
    return sides


def rollout(device: str, tiny: bool) -> Sides:
    """Gym's cart-pole environments, in tensors."""
    count, steps = (16, 8) if tiny else (1024, 256)
    policy = made(
        lambda: nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)), device
    )
    policy.float()
    first = torch.randn(count, 4, device=device) * 0.05, torch.zeros(count, device=device)

    def step(state: Any) -> Any:
        world, reward = state
        x, speed, angle, turning = world.unbind(-1)
        force = 10 * torch.tanh(policy(world)[:, 0])
        pull = (force + 0.05 * turning**2 * angle.sin()) / 1.1
        falling = (9.8 * angle.sin() - angle.cos() * pull) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
        moving = pull - 0.05 * falling * angle.cos() / 1.1
        new = (x + 0.02 * speed, speed + 0.02 * moving, angle + 0.02 * turning, turning + 0.02 * falling)
        world = torch.stack(new, -1)
        fallen = (world[:, 0].abs() > 2.4) | (world[:, 2].abs() > 0.21)
        return torch.where(fallen[:, None], first[0], world), reward + ~fallen

    def host(compiled: Callable[..., Any]) -> Run:
        def run() -> Any:
            state = first
            for _ in range(steps):
                torch.compiler.cudagraph_mark_step_begin()
                state = compiled(tuple(each.clone() for each in state))
            return tuple(each.clone() for each in state)

        return run

    fused = torch.compile(step, dynamic=False, backend="pygraph")
    return {
        OURS: lambda: pygraph.loop(fused, first, steps=steps, held=[policy, first]).state,
        "default": host(torch.compile(step, dynamic=False)),
        "reduce-overhead": host(torch.compile(step, dynamic=False, mode="reduce-overhead")),
    }


def diffusion(device: str, tiny: bool) -> Sides:
    model, size, steps = made(tiny_unet if tiny else unet, device), 8 if tiny else 64, 4 if tiny else 20
    kind = next(model.parameters()).dtype
    kept = torch.linspace(0.01, 0.999, steps + 1, device=device).to(kind)
    times = torch.linspace(999, 0, steps, device=device)
    first = torch.randn(2, 4, size, size, device=device, dtype=kind)

    def made_of(network: Callable[..., torch.Tensor]) -> Callable[[Any], Any]:
        def step(state: Any) -> Any:
            x, at = state
            noise = network(x, times.index_select(0, at)[0])
            now, then = kept.index_select(0, at), kept.index_select(0, at + 1)
            clean = (x - (1 - now).sqrt() * noise) / now.sqrt()
            return then.sqrt() * clean + (1 - then).sqrt() * noise, at + 1

        return step

    def begin() -> Any:
        return first, torch.zeros(1, dtype=torch.int64, device=device)

    fused = torch.compile(model, dynamic=False, backend="pygraph")
    ours, theirs = made_of(fused), made_of(torch.compile(model, dynamic=False, mode="reduce-overhead"))

    def host() -> Any:
        state = begin()
        for _ in range(steps):
            torch.compiler.cudagraph_mark_step_begin()
            state = theirs(state)
        return state

    return {
        OURS: lambda: pygraph.loop(ours, begin(), steps=steps, held=[model, times, kept]).state,
        "reduce-overhead": host,
    }


def early_exit(device: str, tiny: bool) -> Sides:
    """On the other side, the host reads the condition."""
    width, layers = (16, 4) if tiny else (512, 16)
    net = made(lambda: nn.Sequential(*(Perceptron(width) for _ in range(layers))), device).float()
    first, last = net[: layers // 2], net[layers // 2 :]
    x = torch.randn(8, width, device=device)

    def model(x: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
        x = first(x)
        done: torch.Tensor = torch.cond(x.square().mean() < bound, lambda x: x.clone(), lambda x: last(x), (x,))
        return done * 2

    skips = torch.tensor(1e9, device=device)
    ours = torch.compile(model, dynamic=False, backend="pygraph")
    return {OURS: lambda: ours(x, skips), "default": (lambda run: lambda: run(x, skips))(torch.compile(model))}


def whiles(device: str, tiny: bool) -> Sides:
    width, steps = (8, 5) if tiny else (256, 100)
    one, other, first = (torch.randn(width, width, device=device) / width**0.5 for _ in range(3))
    end = torch.tensor(steps, device=device)

    def body(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.sin(torch.tanh(x @ one) @ other) @ one)

    def loop(x: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros((), dtype=torch.int64, device=device)
        found = torch.while_loop(lambda i, x: i < end, lambda i, x: (i + 1, body(x)), (zero, x.clone()))
        result: torch.Tensor = found[1]
        return result

    def every(x: torch.Tensor) -> torch.Tensor:
        for _ in range(steps):
            x = fused(x)
        return x

    fused, ours = torch.compile(body, dynamic=False), torch.compile(loop, dynamic=False, backend="pygraph")
    sides: Sides = {OURS: lambda: ours(first)}
    if device == "cuda":
        replay, result = by_hand(every, first)
        sides["by hand"] = lambda: (replay(), result)[1]
    else:
        sides["default"] = lambda: every(first)
    return sides


BILLION = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 32}
THREE_BILLION = {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24}
TINY = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 2}


def generating(batch: int, sizes: Mapping[str, int] = BILLION, words: int = 32000) -> Callable[[str, bool], Sides]:
    def sides(device: str, tiny: bool) -> Sides:
        from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

        from pygraph.integrations.transformers import generate

        new = 8 if tiny else 128
        config = LlamaConfig(
            **(TINY if tiny else sizes),
            vocab_size=512 if tiny else words,
            num_key_value_heads=2 if tiny else 8,
            max_position_embeddings=512,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=None,
        )
        with torch.device(device):
            model: Any = LlamaForCausalLM(config).to(torch.bfloat16 if device == "cuda" else torch.float32).eval()
        prompt = torch.randint(3, 250, (batch, 32), device=device)
        compiled: Any = CompileConfig(mode="reduce-overhead")

        def host() -> torch.Tensor:
            found: torch.Tensor = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                cache_implementation="static",
                compile_config=compiled,
            )
            return found

        return {OURS: lambda: generate(model, prompt, max_new_tokens=new), "reduce-overhead": host}

    return sides


ROWS: dict[str, Callable[[str, bool], Sides]] = {
    "integrator": integrator,
    "unrolled": unrolled,
    "rollout": rollout,
    "diffusion": diffusion,
    "early-exit": early_exit,
    "while": whiles,
    "generate-1": generating(1),
    "generate-8": generating(8),
    "generate-3b": generating(1, THREE_BILLION, 128256),
}


def taken(device: str, run: Run) -> tuple[Any, int]:
    """Make the first calls. Returns the last result, and the bytes of the device that they keep."""
    before = torch.cuda.mem_get_info()[0] if device == "cuda" else 0
    result = run()
    for call in range(1, LONGEST_CONTEST):
        if call >= WARM and not settling():
            break
        result = run()
    drain(device)
    return result, before - torch.cuda.mem_get_info()[0] if device == "cuda" else 0


def measure(name: str, device: str, tiny: bool, rounds: int) -> Row:
    """Median time of a loop on each side, ms, and the smallest ratio of any side to PyGraph."""
    torch.manual_seed(0)
    pygraph.reset()
    torch.compiler.reset()
    sides = ROWS[name](device, tiny)
    results, found = dict[str, Any](), dict[str, Row]()
    for side, run in sides.items():
        start = time.perf_counter()
        results[side], kept = taken(device, run)
        found[side] = {"first calls s": time.perf_counter() - start, "bytes": kept}
    ours = results[OURS]
    if name.startswith("generate"):
        same = min((one == ours).float().mean().item() for one in results.values())
        found[OURS]["words that are the same"] = same
        assert all(one.shape == ours.shape for one in results.values())
    else:
        for side in sides:
            assert_close(ours, results[side], TOLERANCE)
    times: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(rounds):
        for side in sorted(sides, reverse=turn % 2 == 1):
            drain(device)
            start = time.perf_counter()
            sides[side]()
            drain(device)
            times[side].append((time.perf_counter() - start) * 1e3)
    for side, each in times.items():
        found[side]["ms"] = statistics.median(each)
    counters = pygraph.counters()
    found[OURS] |= {kind: counters.get(kind, 0) for kind in ("captures", "replays", "uncaptured")}
    found[OURS]["reasons"] = sorted({note for report in pygraph.reports() for note in report.notes})
    return {
        "ratio": min(each["ms"] for side, each in found.items() if side != OURS) / found[OURS]["ms"],
        "sides": found,
    }


def main() -> None:
    """Measure, print, and write all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the same programs, so small that a CPU runs them")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=200, help="no row is begun later")
    parser.add_argument("--out", type=Path, help="write all figures as JSON, after each row")
    chosen = parser.parse_args()
    run_all(
        chosen.only, chosen.device, chosen.tiny or chosen.device == "cpu", chosen.rounds, chosen.seconds, chosen.out
    )


def run_all(
    names: Sequence[str], device: str, tiny: bool, rounds: int, seconds: float, out: Path | None
) -> Mapping[str, Row]:
    """All rows, while there is time; a row that fails has the error."""
    began, rows = time.perf_counter(), dict[str, Row]()
    with torch.no_grad(), waiting_for_builds():
        for name in names:
            if time.perf_counter() - began > seconds:
                break
            try:
                rows[name] = measure(name, device, tiny, rounds)
            except Exception as error:  # noqa: BLE001 - the other rows are still measured
                rows[name] = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
            print(f"{name}: {json.dumps(rows[name])}", flush=True)
            if out is not None:
                out.write_text(json.dumps({"torch": torch.__version__, "tiny": tiny, "rows": rows}, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
