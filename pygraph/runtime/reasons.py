"""Reason codes of refusals: whether the reason may pass, its meaning, and advice for the user.

A capture that is refused for a reason that may pass is tried again after a while. Any other refusal leaves calls of the
same sizes, or the whole region, uncaptured for good. A code that is not listed is a mistake in PyGraph, and counts so.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Lasting(Enum):
    """How long the reason of a refusal lasts."""

    PASSES = "it passes: tried again, however often"
    DOUBTFUL = "it may pass: tried again, so many times in a row"
    SIZES = "for good, for calls of the same sizes and scalars"
    REGION = "for good, for the whole region"


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason code's facts.

    Args:
        lasting: How long it lasts.
        explanation: Its meaning.
        advice: Advice for the user.
    """

    lasting: Lasting
    explanation: str
    advice: str

    @property
    def may_pass(self) -> bool:
        """True if a capture may succeed later."""
        return self.lasting in (Lasting.PASSES, Lasting.DOUBTFUL)


BUILDING = "native-building"
"""The refusal of captures until the driver's native library is built."""

CLOSED = "closed"
"""The refusal of a region that is closed: its process group is shut down, or its owner is closed."""

MEMORY = ("no-address-space", "out-of-memory")
"""Refusals for lack of memory, of which captures hold some."""

FROZEN = "frozen"
"""The refusal of captures in a session that makes no more."""

OVER_LIMIT = "memory-limit"
"""Reason for which captures are evicted or refused if all of them would take more memory than allowed."""

_MISTAKE = Reason(Lasting.SIZES, "a mistake in PyGraph", "report it, with the dumps")

_GROUPS = {
    "capture-busy generator-busy": Reason(
        Lasting.PASSES, "another thread captured, or a replay that draws was under way", "nothing is needed"
    ),
    "out-of-memory no-address-space comparison-budget": Reason(
        Lasting.PASSES,
        "memory was short, for the capture or for the copies that it is compared on",
        "leave more of the device free, or lower memory_limit",
    ),
    OVER_LIMIT: Reason(
        Lasting.SIZES, "a capture takes more memory than all of them may", "raise memory_limit, or compile less at once"
    ),
    "dispatch-mode outer-capture": Reason(
        Lasting.PASSES,
        "a mode that watches operators, or a capture of the caller's own, was active",
        "call the function outside of it",
    ),
    FROZEN: Reason(
        Lasting.PASSES,
        "the session makes no more captures, and there was none for these sizes",
        "prepare them before Session.freeze(), or call Session.thaw()",
    ),
    BUILDING: Reason(
        Lasting.PASSES, "the native library is being built", "nothing is needed: it is used once it is there"
    ),
    "native-unavailable": Reason(
        Lasting.PASSES,
        "the native library cannot be built here, or loaded",
        "see what the compiler says; if that has passed, call pygraph.retry()",
    ),
    "odd-replay": Reason(
        Lasting.PASSES,
        "of runs that vary, the replay was the odd one",
        "nothing is needed: the second in a row counts as comparison-failed",
    ),
    "capture-failed capture-raised driver-error comparison-raised": Reason(
        Lasting.DOUBTFUL,
        "something raised while the region was captured or compared",
        "see the error; if it has passed, call pygraph.retry()",
    ),
    "argument-misaligned replay-declined random-state": Reason(
        Lasting.DOUBTFUL,
        "arguments overlapped or were misaligned, or another thread replayed the region or drew numbers meanwhile",
        "give each argument memory of its own; if it has passed, call pygraph.retry()",
    ),
    "uncaptured-work host-read host-memcpy host-memory host-random dynamic-output metadata-mutation pinned-memory"
    " collective only-eager aliasing-operator generator-argument eager-calls": Reason(
        Lasting.SIZES,
        "an operator does what a graph, or this driver, cannot hold",
        "move the operator out of the compiled function, or use one that stays on the device",
    ),
    "control-flow": Reason(
        Lasting.SIZES,
        "a body of torch.cond or torch.while_loop does what only the host can",
        "move the call out of the body, or out of the compiled function",
    ),
    "host-loop": Reason(
        Lasting.SIZES,
        "an iteration of a loop needs the host",
        "move what needs it out of the loop",
    ),
    "survivor": Reason(
        Lasting.SIZES,
        "a custom operator, or a callable, keeps memory that was allocated during the capture",
        "have the operator allocate what it keeps before its first call; hold what the callable keeps",
    ),
    "foreign-address half-address unpaired-address ambiguous-address stray-address unmoved-address outside-allocation"
    " captures-overlap": Reason(
        Lasting.SIZES,
        "a parameter may be an address, and not of the region's memory",
        "pass all memory that an operator uses as tensors",
    ),
    "unstable-launches unstable-allocations unstable-order unstable-outputs": Reason(
        Lasting.SIZES,
        "captures of one call did not do the same",
        "move what differs from call to call out of the compiled function",
    ),
    "unstable-number stateful-operator": Reason(
        Lasting.REGION,
        "an operator has a state of its own, which a replay would repeat",
        "keep the state in a tensor that the operator is given",
    ),
    "comparison-failed": Reason(
        Lasting.REGION,
        "a replay was not what the uncaptured run was",
        "find the operator with verify='always', and keep it out with legality{forbid=[…]}",
    ),
    "replay-failed": Reason(
        Lasting.REGION, "a replay broke its contract", "find the launch with verify='always', and report it"
    ),
    "replay-raised": Reason(
        Lasting.SIZES, "a replay raised while it was compared", "see the error: a kernel may need what no replay has"
    ),
    "argument-type unsupported-argument unsupported-copy unsupported-fill unsupported-node unsupported-operator"
    " unsupported-output unsupported-region unsupported-tensor unsupported-held unknown-kernel unknown-parameters"
    " too-many-parameters unordered-nodes": Reason(
        Lasting.SIZES,
        "arguments, kernels or nodes are of a kind that the driver does not know",
        "pass plain strided tensors and Python numbers, and keep other operators out of the compiled function",
    ),
    "unknown-memory": Reason(
        Lasting.SIZES,
        "an operator uses memory that is neither an argument, nor held, nor a constant, nor made inside",
        "pass the tensor, or name it in held",
    ),
    "unsupported-result open-graph outer-graph": Reason(
        Lasting.SIZES,
        "a callable is given, or leaves behind, what a replay cannot make",
        "return tensors, plain values and containers of them; detach tensors that autograd follows, or use no_grad",
    ),
    "several-devices foreign-device": Reason(
        Lasting.SIZES, "arguments or results are on another device", "compile the work of each device separately"
    ),
    "bindings-unavailable no-device no-driver": Reason(
        Lasting.SIZES, "the machine lacks cuda.bindings or a device, or no driver captures on it", "see the message"
    ),
    "ranks-differ": Reason(
        Lasting.SIZES, "another rank did not replay the call", "see how ranks differ with pygraph explain"
    ),
    "unverified": Reason(Lasting.SIZES, "a replay could not be compared in this call", "nothing is needed"),
    "pass-failed": Reason(
        Lasting.SIZES,
        "a launch pass raised, or made a program that breaks a rule",
        "run the reproducer that the message names, with pygraph opt",
    ),
    CLOSED: Reason(Lasting.REGION, "the region is closed", "nothing is needed"),
    "invalid-program unordered-launches foreign-recording already-instantiated": _MISTAKE,
}

REASONS = {code: reason for codes, reason in _GROUPS.items() for code in codes.split()}
"""Every code that the runtime uses."""


def reason_of(code: str) -> Reason:
    """The facts of a code."""
    return REASONS.get(code, _MISTAKE)
