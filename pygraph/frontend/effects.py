"""Effects of operators: from their schemas and tags, and from what torch's kernels do that no schema says.

Higher-order operators are in ``hops``. Where nothing is known the answer is the careful one.
"""

from __future__ import annotations

from dataclasses import replace

from pygraph.frontend.call import Call, tags_of
from pygraph.frontend.names import HOP, is_symbolic
from pygraph.frontend.views import HIDDEN_VIEWS, VIEWS
from pygraph.ir import PURE, Arg, DType, Effects, TensorType, Type, Value

__all__ = ["effects_of", "tags_text"]

_REPORTED_TAGS = frozenset(
    {
        "cudagraph_unsafe",
        "data_dependent_output",
        "dynamic_output_shape",
        "maybe_aliasing_or_mutating",
        "nondeterministic_bitwise",
        "nondeterministic_seeded",
    }
)

_PURE_RANDOM = frozenset(
    {"prims.inductor_lookup_seed", "prims.inductor_random", "prims.inductor_randint", "rngprims.philox_rand"}
)
"""Functions of a seed that they are given: nothing is drawn from a generator."""

_DRAWS = frozenset({"prims.inductor_seed", "prims.inductor_seeds"})
"""Operators that draw from the generator of the device that they are given, whatever their tags say."""

_MASKABLE = frozenset({"aten.index", "aten._unsafe_index", "aten.index_put", "aten.index_put_"})
"""Indexing: boolean masks among the indices are turned into positions first, as ``nonzero`` does."""

_WAITING_SHAPES = frozenset(
    {
        "aten._unique",
        "aten._unique2",
        "aten.argwhere",
        "aten.bincount",
        "aten.masked_select",
        "aten.nonzero",
        "aten.one_hot",
        "aten.repeat_interleave",
        "aten.unique_consecutive",
        "aten.unique_dim",
        "aten.unique_dim_consecutive",
    }
)
"""Operators that read the size of their result back from the device."""

_WAITING = frozenset(
    {
        "aten._linalg_check_errors",
        "aten._ctc_loss",
        "aten._cudnn_ctc_loss",
        "aten.histogramdd",
        "aten.is_nonzero",
        "aten.linalg_eig",
        "aten.linalg_lstsq",
    }
)
"""Operators whose accelerator kernels read a device value on the host, though their shapes do not depend on it."""

_COPIES = frozenset({"aten._to_copy", "aten.to", "aten.copy_", "aten.copy", "prims.device_put", "prims.copy_to"})
"""Copies that may go from an accelerator to the host."""

_CHECKS = frozenset(
    {
        "aten._assert_async",
        "aten._assert_scalar",
        "aten._assert_tensor_metadata",
        "aten._functional_assert_async",
        "aten._functional_assert_scalar",
        "aten._linalg_check_errors",
        "aten.sym_constrain_range",
        "aten.sym_constrain_range_for_size",
        "aten._functional_sym_constrain_range",
        "aten._functional_sym_constrain_range_for_size",
    }
)
"""Checks: they may raise, so they are never removed, but they order nothing."""

_STORAGE = frozenset({"aten.resize_", "aten.resize_as_", "aten.set_", "inductor.resize_storage_bytes_", "prims.resize"})
"""Operators that change which memory a tensor has, which neither writes nor aliases can say."""

_LOWERINGS = "py.torch._inductor."
"""Functions that Inductor's patterns put in place of operators: they build what Inductor makes of them, no more."""

_COLLECTIVES = ("_c10d_functional.", "_c10d_functional_autograd.", "_dtensor.", "symm_mem.", "c10d.")


def effects_of(call: Call) -> Effects:
    """The effects of ``call``, which is no higher-order operator."""
    if is_symbolic(call.op):
        return PURE
    if call.facts is None:
        return replace(PURE, barrier=not call.op.startswith(_LOWERINGS))
    effects = Effects(
        writes=_writes(call),
        aliases=_aliases(call),
        reads=_reads(call),
        rng=_rng(call),
        sync=_sync(call),
        dynamic=_dynamic(call),
    )
    if call.op.startswith(_COLLECTIVES):
        effects = _collective(call, effects)
    return replace(effects, barrier=effects.barrier or _is_barrier(call, effects))


def tags_text(target: object) -> str:
    """The tags of an operator that bear on capture, sorted and separated by commas."""
    return ",".join(sorted(tags_of(target) & _REPORTED_TAGS))


# -- memory --------------------------------------------------------------------------------------------------------


def _writes(call: Call) -> tuple[int, ...]:
    assert call.facts is not None
    written = [p for name in call.facts.names if name in call.facts.written for p in call.tensors(name)]
    return tuple(sorted(dict.fromkeys(written)))


def _aliases(call: Call) -> tuple[tuple[int, int], ...]:
    assert call.facts is not None
    pairs: list[tuple[int, int]] = []
    for result, name in call.facts.aliases:
        pairs += _pairs(_outputs_of(call, result), list(call.tensors(name)))
    if not pairs and (call.facts.composite or call.base in HIDDEN_VIEWS):
        pairs += _possible_views(call)
    return tuple(sorted(dict.fromkeys(pairs)))


def _possible_views(call: Call) -> list[tuple[int, int]]:
    """Pairs of a result and an operand that could share memory, as far as device and dtype allow."""
    return [
        (output, position)
        for output, result in enumerate(call.results)
        for position in call.tensors()
        if isinstance(result, TensorType) and _alike(result, call.operands[position].type)
    ]


def _alike(result: TensorType, operand: Type) -> bool:
    return isinstance(operand, TensorType) and (result.device, result.dtype) == (operand.device, operand.dtype)


def _outputs_of(call: Call, result: int) -> list[int]:
    """Tensor outputs that belong to result number ``result`` of the schema."""
    assert call.facts is not None
    tensors = [i for i, type in enumerate(call.results) if isinstance(type, TensorType)]
    if call.facts.single:
        return tensors
    return [i for i in tensors if call.paths[i][:1] == (result,)]


def _pairs(outputs: list[int], operands: list[int]) -> list[tuple[int, int]]:
    if len(outputs) == len(operands):
        return list(zip(outputs, operands, strict=True))
    return [(output, operand) for output in outputs for operand in operands]


def _reads(call: Call) -> tuple[int, ...] | None:
    if call.base in VIEWS:
        return ()
    if call.base == "aten.copy_":
        return tuple(call.spans.get("src", range(0)))
    if call.base in _CHECKS:
        return tuple(call.tensors())
    return None


# -- generators, the host, shapes ----------------------------------------------------------------------------------


def _rng(call: Call) -> str | None:
    if call.base in _PURE_RANDOM or (call.base not in _DRAWS and "nondeterministic_seeded" not in tags_of(call.target)):
        return None
    if call.argument("dropout_p") in (0, 0.0) and "dropout_p" in _names(call):
        return None
    return "cpu" if call.device is None else str(call.device)


def _names(call: Call) -> tuple[str, ...]:
    return () if call.facts is None else call.facts.names


def _sync(call: Call) -> bool:
    if "data_dependent_output" in tags_of(call.target) or call.base in ("aten.item", "prims.item"):
        return True
    if all(device.is_host for device in call.operand_devices):
        return False
    if call.base in _COPIES:
        return _copies_to_host(call)
    if call.base in _MASKABLE:
        return _reads_mask_positions(call)
    if call.base == "aten.repeat_interleave" and call.argument("output_size") is not None:
        return False
    return call.base in _WAITING or call.base in _WAITING_SHAPES


def _copies_to_host(call: Call) -> bool:
    to_host = call.result_device is not None and call.result_device.is_host
    return to_host and call.argument("non_blocking") is not True


def _reads_mask_positions(call: Call) -> bool:
    """Whether an index operator has to find the positions of a mask (a masked fill with one value does not)."""
    masks = [value for value in _indices(call) if _is_mask(value)]
    if not masks:
        return False
    values = call.argument("values")
    fills = isinstance(values, Value) and isinstance(values.type, TensorType) and values.type.numel == 1
    return not (fills and len(_indices(call)) == 1)


def _indices(call: Call) -> list[Value]:
    indices: Arg = call.argument("indices")
    return [item for item in indices if isinstance(item, Value)] if isinstance(indices, tuple) else []


def _is_mask(value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.type.dtype in (DType.B8, DType.U8)


def _dynamic(call: Call) -> bool:
    shaped = any(isinstance(type, TensorType) for type in call.results)
    if call.binds and shaped:
        return True
    if "dynamic_output_shape" not in tags_of(call.target):
        return False
    if call.base in _MASKABLE:
        return any(_is_mask(value) for value in _indices(call))
    return not (call.base == "aten.repeat_interleave" and call.argument("output_size") is not None)


# -- order -----------------------------------------------------------------------------------------------------------


def _collective(call: Call, effects: Effects) -> Effects:
    group = _group(call)
    if call.base == "_c10d_functional.wait_tensor":
        tensors = list(call.tensors())
        aliases = tuple((output, tensors[0]) for output in range(len(call.results)) if tensors)
        effects = replace(effects, writes=tuple(tensors), aliases=aliases)
    return replace(effects, collective=group or "unknown", barrier=group is None)


def _group(call: Call) -> str | None:
    for name in ("group_name", "group"):
        group = call.argument(name)
        if isinstance(group, str):
            return group
    for value in call.operands:
        if value.producer is not None and value.producer.effects.collective is not None:
            return value.producer.effects.collective
    return None


def _is_barrier(call: Call, effects: Effects) -> bool:
    """An operator that returns nothing and writes nothing exists for a side effect that the schema does not tell."""
    if call.base in _CHECKS or call.op.startswith(HOP):
        return False
    if call.base in _STORAGE or "maybe_aliasing_or_mutating" in tags_of(call.target):
        return True
    return not call.results and not effects.writes and not effects.sync
