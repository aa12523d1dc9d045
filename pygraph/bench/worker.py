"""The process of one side: ``python -m pygraph.bench.worker SPEC``, with commands on stdin and answers on stdout.

It imports what it will need, opens the GPU, and says that it is ready; until it is told to compile, it does nothing
there. What the program prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pygraph.bench.protocol import Channel, Failure, Spec

if TYPE_CHECKING:
    from pygraph.bench.choices import QuietGpu
    from pygraph.bench.choosing import Chooser
    from pygraph.bench.serving import Serving
    from pygraph.bench.workload import Workload

__all__ = ["main", "open_channel", "serve"]

_PARENT_SECONDS = 0.5
"""Between two looks whether the coordinator is still there: a thread that sleeps disturbs nothing."""


def main() -> None:
    """Serve until told to finish; whatever the program raises is answered, and ends the process with status 1."""
    spec = Spec.read(sys.argv[1])
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    status = serve(spec, open_channel())
    sys.stderr.flush()
    os._exit(status)  # a script's threads and handlers are no part of what is measured


def _end_with_parent(parent: int) -> None:
    """Without a coordinator nobody wants the answer, and whatever goes on would disturb what is measured next."""
    while os.getppid() == parent:
        time.sleep(_PARENT_SECONDS)
    if os.getpgrp() == os.getpid():  # with the compilers that were started
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def open_channel() -> Channel:
    """The pipes that the process was started with, out of the way of what the program reads and prints."""
    commands = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return Channel(commands, answers)


def serve(spec: Spec, channel: Channel) -> int:
    """Run the side of ``spec``; returns the exit status."""
    try:
        run = _prepared(spec, channel)
        channel.answer({"ready": True})
        run()
    except Exception as error:  # noqa: BLE001 - a side runs anybody's program: whatever it raises is the answer
        traceback.print_exc()
        channel.fail(_kind(error), "".join(traceback.format_exception_only(error)).strip())
        return 1
    return 0


def _prepared(spec: Spec, channel: Channel) -> Callable[[], None]:
    """What is to be done, with everything imported that it needs."""
    import torch

    from pygraph.backend import pygraph as _backend  # noqa: F401 - imported on every side alike
    from pygraph.bench.choices import Choices, QuietGpu
    from pygraph.bench.choosing import Chooser
    from pygraph.compat import inductor_config

    if spec.phase == "check":
        inductor_config.fallback_random = True
    quiet = QuietGpu(Path(spec.gpu_lock))
    chooser = Chooser(Choices(Path(spec.choices)), quiet, fresh=spec.fresh)
    serving = _serving(spec, channel, chooser, quiet)
    program = _script(spec, channel, serving) if spec.script else _workload(spec, serving)
    if spec.device == "cuda":
        torch.zeros(1, device="cuda")

    def run() -> None:
        if next(serving.calls, None) is None:  # nobody wants it any more
            return
        random.seed(0)
        torch.manual_seed(0)
        with chooser.installed():
            program()

    return run


def _serving(spec: Spec, channel: Channel, chooser: Chooser, quiet: QuietGpu) -> Serving:
    """Where nothing is timed but kernels, calls give way to whoever times them."""
    from pygraph.bench.serving import Serving
    from pygraph.bench.sides import measures
    from pygraph.bench.watching import settling

    return Serving(
        channel,
        spec.device,
        Path(spec.result) if spec.result else None,
        settling if spec.phase == "time" and measures(spec.side) else None,
        quiet.held if spec.device == "cuda" and spec.phase != "time" else contextlib.nullcontext,
        lambda: {"chosen": chooser.used()},
    )


def _script(spec: Spec, channel: Channel, serving: Serving) -> Callable[[], None]:
    from pygraph.bench.script import run_script

    return lambda: run_script(spec, channel, serving)


def _workload(spec: Spec, serving: Serving) -> Callable[[], None]:
    from pygraph.bench.registry import workloads

    workload = workloads(spec.suite)[spec.program]
    for module in workload.imports:
        importlib.import_module(module)
    return lambda: _run(spec, workload, serving)


def _run(spec: Spec, workload: Workload, serving: Serving) -> None:
    """Call the step as often as the coordinator wants. Results are dropped before the next call."""
    from pygraph.bench.sides import cloning, compile_as, step_as

    build = workload.tiny if spec.tiny else workload.build
    keeps = cloning if workload.feeds_back and spec.side == "reduce-overhead" else _same
    step = step_as(spec.side, build(lambda target: keeps(compile_as(spec.side, target)), spec.device))
    serving.began = time.perf_counter()
    serving.keep(step())
    for keep in serving.calls:
        if keep:
            serving.keep(step())
        else:
            step()


def _same(target: Any) -> Any:
    return target


def _kind(error: BaseException) -> Failure:
    import torch

    from pygraph.bench.graphed import Inapplicable

    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, Inapplicable):
            return "inapplicable"
        if isinstance(chain, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in str(chain):
            return "memory"
        chain = chain.__cause__ or chain.__context__
    return "failed"


if __name__ == "__main__":
    main()
