"""Every private torch symbol in use, in one place. Each was checked on the versions named beside it.

Only imports live here; what is done with them lives where it belongs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

# -- Inductor: compilation (2.11, 2.13) ----------------------------------------------------------------------------
from torch._inductor import config as inductor_config
from torch._inductor import ir as inductor_ir
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

# -- torch.compile: configuration (2.11, 2.13) ------------------------------------------------------------------------
compiler_config: Any = torch.compiler.config  # a config module: patch() is added when it is installed

# -- Inductor: scheduling (2.11, 2.13) -----------------------------------------------------------------------------
from torch._inductor.graph import SubgraphLowering
from torch._inductor.memory import estimate_peak_memory, prepare_planning_info
from torch._inductor.scheduler import NopKernelSchedulerNode, Scheduler
from torch._inductor.virtualized import V as inductor_virtualized

# -- AOTAutograd and Dynamo (2.11, 2.13) ---------------------------------------------------------------------------
from torch._functorch import config as functorch_config
from torch._dynamo.convert_frame import compile_lock
from torch._guards import CompileContext, TracingContext, compile_context, detect_fake_mode, tracing

# -- AOTAutograd's cache (2.13) ------------------------------------------------------------------------------------
from torch._inductor.runtime.cache_dir_utils import cache_dir as inductor_cache_dir

FxGraphCacheLoadable: Any
FXGraphCacheMiss: Any
try:
    from torch._functorch._aot_autograd.aot_autograd_result import FxGraphCacheLoadable
    from torch._functorch._aot_autograd.autograd_cache import FXGraphCacheMiss
except ImportError:
    FxGraphCacheLoadable = FXGraphCacheMiss = None

# -- operators in FX graphs (2.11, 2.13) ---------------------------------------------------------------------------
from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._ops import _higher_order_ops as higher_order_operators

# -- interposed calls: dispatch modes and function transforms (2.11, 2.13) ------------------------------------------
from torch._C import _len_torch_dispatch_stack as dispatch_mode_depth
from torch._C._functorch import peek_interpreter_stack as functorch_level

__all__ = [
    "CompileContext",
    "FXGraphCacheMiss",
    "FxGraphCacheLoadable",
    "HigherOrderOperator",
    "NopKernelSchedulerNode",
    "OpOverload",
    "OpOverloadPacket",
    "Scheduler",
    "SubgraphLowering",
    "TracingContext",
    "compile_context",
    "compile_fx",
    "compile_fx_inner",
    "compile_lock",
    "compiler_config",
    "detect_fake_mode",
    "dispatch_mode_depth",
    "estimate_peak_memory",
    "functorch_config",
    "functorch_level",
    "get_mutated_tensors",
    "higher_order_operators",
    "inductor_cache_dir",
    "inductor_config",
    "inductor_ir",
    "inductor_virtualized",
    "prepare_planning_info",
    "tracing",
]

# -- Host driver: capture; both drivers: stepping (2.11, 2.13) ------------------------------------------------------
from torch._C import DispatchKey
from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel
from torch._C import _pop_torch_dispatch_stack as pop_dispatch_mode
from torch._C._dynamo import guards as dynamo_guards
from torch.library import _impls as python_kernels
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes

__all__ += [
    "DataDependentOutputException",
    "DispatchKey",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "dispatch_mode_flags",
    "dynamo_guards",
    "has_kernel",
    "pop_dispatch_mode",
    "python_kernels",
    "set_dispatch_mode_flags",
    "without_dispatch_modes",
]

_MODE_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",  # Dynamo has a copy of the last one
)


def dispatch_mode_flags() -> tuple[bool, ...]:
    """What a dispatch mode notes when it is entered, besides being pushed."""
    return tuple(getattr(_python_dispatch, name) for name in _MODE_FLAGS)


def set_dispatch_mode_flags(flags: tuple[bool, ...]) -> None:
    """Bring back what ``dispatch_mode_flags`` returned."""
    for name, flag in zip(_MODE_FLAGS, flags, strict=True):
        setattr(_python_dispatch, name, flag)
    dynamo_guards.set_is_in_mode_without_ignore_compile_internals(flags[-1])


# -- CUDA driver: capture (2.11) -----------------------------------------------------------------------------------
# A torch built without CUDA has neither; the driver is not made there.
storage_from_address: Any = getattr(torch._C, "_construct_storage_from_data_pointer", None)
clear_cublas_workspaces: Any = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)

__all__ += ["clear_cublas_workspaces", "storage_from_address"]

# -- calibration: a kernel bound as Inductor binds them, and operators traced to FX (2.11, 2.13) --------------------
from torch._inductor.async_compile import AsyncCompile
from torch.fx.experimental.proxy_tensor import make_fx

__all__ += ["AsyncCompile", "make_fx"]

# -- Inductor: choosing by timing (2.11, 2.13) ---------------------------------------------------------------------
from torch._dynamo.callback import callback_handler as compile_callbacks


class InductorTiming(NamedTuple):
    """Where Inductor times kernels: ``autotuner.benchmark_all_configs`` times all configurations of one, everything
    on a GPU goes through ``benchmarker.benchmark_gpu``, and ``padding`` decides which matrix products to pad.

    What ``kernel.inductor_meta_common`` returns goes into the source of a kernel, and says which caches it uses.
    """

    kernel: Any
    autotuner: Any
    benchmarker: Any
    padding: Any


def inductor_timing() -> InductorTiming:
    """The places above; imported when asked for, since they take a while and only a benchmark wants them."""
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.runtime.benchmarking import benchmarker
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    return InductorTiming(TritonKernel, CachingAutotuner, benchmarker, pad_mm)


__all__ += ["InductorTiming", "compile_callbacks", "inductor_timing"]
