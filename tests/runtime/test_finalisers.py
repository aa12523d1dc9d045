"""Finalisers call compiled functions whenever garbage is collected: within any function of the runtime, on any thread.
Nothing waits there for what may wait for it."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import torch

from pygraph.compat import dispatch_mode_depth
from pygraph.runtime.host import HostDriver
from pygraph.runtime.region import Region, RegionOptions

EVERYWHERE = """
import faulthandler, gc, sys
from pathlib import Path
import torch
import pygraph.runtime
from pygraph.runtime.host import HostDriver
from pygraph.runtime.region import RegionOptions
from pygraph.runtime.region import Region

faulthandler.dump_traceback_later(200, exit=True)  # a deadlock fails
torch.set_grad_enabled(False)
ROOT = str(Path(pygraph.runtime.__file__).parent)
driver, options = HostDriver(), RegionOptions(measure=False, max_captures=2)


def fn(args):
    (x,) = args
    args.clear()
    return (torch.cumsum(x, 0) * 2,)


def region(due=()):
    made = Region(fn, driver, name="finalised", options=options)
    made._variants._max_tracked = 2
    for size in due:
        made([torch.ones(size)])
    return made


class Garbage:
    '''A cycle whose finaliser calls `call`.'''

    def __init__(self, call):
        self.call, self.self = call, self

    def __del__(self):
        self.call()


class Collection:
    '''Collects garbage as the function with number `target` of those that run is entered.'''

    def __init__(self, target=-1):
        self.target, self.number, self.met = target, 0, []

    def __call__(self, frame, event, arg):
        if event != "call" or not frame.f_code.co_filename.startswith(ROOT) or not gc.isenabled():
            return
        self.met.append(frame.f_code)
        if len(self.met) - 1 == self.target:
            sys.setprofile(None)
            gc.collect()
            sys.setprofile(self)


def calls(made, sizes=(5, 5, 5, 6, 6, 7, 7, 5, 8)):
    '''Misses, captures, compares, replays and evicts.'''
    for size in sizes:
        x = torch.arange(size) * 1.0
        assert torch.equal(made([x])[0], torch.cumsum(x, 0) * 2), size
    made.close()
    made([torch.ones(3)])


def run(collection):
    '''The answers of finalisers: of the region that is called, of one that is due, and of one that replays.'''
    made, due, replaying, found = region(), region((4,)), region((4, 4)), []
    for each, size in ((made, 9), (due, 4), (replaying, 4)):
        x = torch.arange(size) * 1.0
        Garbage(lambda each=each, x=x: found.append(torch.equal(each([x.clone()])[0], torch.cumsum(x, 0) * 2)))
    sys.setprofile(collection)
    try:
        calls(made)
    finally:
        sys.setprofile(None)
    for each in (due, replaying):
        calls(each, (4, 4, 4))
    return found


gc.collect()
gc.freeze()
gc.set_threshold(1 << 30)
everywhere = Collection()
run(everywhere)
first = {code: number for number, code in reversed(list(enumerate(everywhere.met)))}
assert len(first) > 100, len(first)
for code, number in first.items():
    found = run(Collection(number))
    assert found == [True] * 3, (code.co_qualname if hasattr(code, "co_qualname") else code.co_name, found)
print("done")
"""


def test_a_finaliser_may_call_regions_within_any_function_of_the_runtime() -> None:
    done = subprocess.run([sys.executable, "-c", EVERYWHERE], capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout == "done\n", done.stderr[-3000:]


def test_a_capture_of_another_thread_is_not_waited_for() -> None:
    """What the capturing thread runs may wait for the other one, as a finaliser does that takes a lock."""
    answered: list[torch.Tensor] = []
    options, x = RegionOptions(measure=False), torch.ones(4)
    other = Region(lambda args: (args[0] + 1,), HostDriver(), name="other", options=options)
    other([x])

    def fn(args: list[Any]) -> Any:
        if dispatch_mode_depth():
            thread = threading.Thread(target=lambda: answered.extend(other([x])), daemon=True)
            thread.start()
            thread.join(60)
            assert not thread.is_alive(), "the other thread waits for this capture"
        return (args[0] * 2,)

    region = Region(fn, HostDriver(), name="capturing", options=options)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(region([x])[0], x * 2)
        assert region.record.captures == 1, region.record
        assert len(answered) >= 2
        assert all(torch.equal(each, x + 1) for each in answered)
        assert other.record.captures == 0
        for _ in range(2):
            other([x])
    assert (other.record.captures, other.record.replays) == (1, 1)
