"""Codes of the reasons why a node cannot be captured, each with an explanation and advice for users."""

from __future__ import annotations

import re
from typing import NamedTuple


class Reason(NamedTuple):
    """The meaning of a code, and advice for users (for the report)."""

    explanation: str
    advice: str


_TABLE = """
forbidden: the option 'forbid' of the legality pass names the operator
  - take the operator off the list to have it captured
barrier: nothing may move across the node, so nothing can be captured together with it
  - move the call out of the compiled function
control-flow: which kernels run depends on data, in a way that a replay cannot decide
  - use torch.where, or a Python branch on a value that is known when the function is compiled
host-code: the node runs code on the host that a replay would not run again
  - move the call out of the compiled function
host-read: the host waits for the device and reads a value: nothing has run yet while a region is being captured
  - keep the value in a tensor, or read it after the function has returned
host-assert: the host checks a number each time, which a replay would skip
  - use torch._assert_async on a tensor, or check before the call
dynamic-shape: the shape of a result depends on data, and sizes are fixed in a captured region
  - use a form of fixed size: torch.where for a boolean mask, nonzero_static, bounds given by the caller
cudagraph-unsafe-tag: the operator's author tagged it cudagraph_unsafe
  - none, unless the operator is yours and the tag is out of date
unsafe-operator: the operator is known to synchronise, to allocate outside the capture, or to keep state on the host
  - use an equivalent that does not, where there is one
rng-state: the random state itself is read or set, which happens on the host
  - let replays draw from the generator, without saving and restoring its state in between
attention-dropout: fused attention with dropout keeps its random state on the CPU outside of a capture and on the
    device inside one, so that its forward and its backward must both be captured, or neither
  - set the dropout of attention to 0, or have it computed by torch.nn.attention.SDPBackend.MATH
stochastic: the node draws from the generator of another device than the captured one
  - draw on the captured device (this changes the random numbers)
generator-argument: the node draws from a generator of its own, whose state a replay would not advance
  - use the default generator of the device
opaque-operand: the node takes or returns an object that is no plain strided tensor: its addresses are not known
  - pass plain tensors
opaque-operator: the operator is no operator of torch's: what it keeps, prints or sends is not known, and on the CPU a
    replay would call it as any call does
  - none: a region calls it between two segments
storage-change: the node resizes or swaps the storage of a tensor, so that addresses change within the region
  - copy into the tensor instead of setting its data
stream-operator: the node records or waits on streams and events of its own
  - leave streams to the compiled function
collective: other processes take part, and neither a comparison nor a repeated capture may run it alone
  - none: a region calls it between two segments
subgraph: a node of the subgraph that the node runs cannot be captured
  - see the node that is named
unknown-higher-order: the higher-order operator is not known here
  - none
unsupported-device: the node works on a kind of device that is not the one being captured
  - move the tensors to the captured device
multi-device: the node touches another device than the rest of the graph, and a region belongs to one device
  - compile the work of each device separately
device-copy: the node copies between the host and the device, and the host's side of the copy changes without a trace
  - keep the tensor on the device
cpu-scalar: a kernel takes a CPU tensor of no dimensions, whose value is read on the host and fixed in the launch
  - make the scalar on the device, or pass a Python number
cpu-operand: a kernel on the device takes a CPU tensor
  - move the tensor to the device
cpu-operator: the node runs on the CPU while work of another device is captured
  - make its operands on the device
no-launch: the node launches nothing and no region is a user of it, so there is nothing to capture
  - none is needed
max-regions: the option 'max-regions' of the partitioning pass leaves it out in favour of heavier regions
  - raise the limit
not-partitioned: no pass of the pipeline put the node into a region
  - add partitioning to the pipeline
unknown-node: Inductor made the node and nothing is known of it
  - report it, with the dumped program
"""
_ENTRY = re.compile(r"^([a-z-]+): (.*?)\n  - (.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)

REASONS: dict[str, Reason] = {
    code: Reason(" ".join(explanation.split()), " ".join(advice.split()))
    for code, explanation, advice in _ENTRY.findall(_TABLE)
}
"""Every code that legality, partitioning and the inductor layer give, in the order in which the report lists them."""
