"""What torch knows of an operator by its name in the IR: that it exists, and its signature. To import it registers it.

Custom operators are among them, once their library is imported.
"""

from __future__ import annotations

from typing import Any

import torch

from pygraph import compat
from pygraph.frontend.names import FrontendError, resolve_op
from pygraph.ir.operators import ANY, Signature, register_lookup


def signature_in_torch(op: str) -> Signature | None:
    """The signature of ``op``, or None where this torch has no such operator."""
    try:
        target = resolve_op(op)
    except FrontendError:
        return None
    return signature(target._schema) if isinstance(target, compat.OpOverload) else ANY


def signature(schema: Any) -> Signature:
    """A torch schema as the IR has it."""
    positional = tuple(argument.name for argument in schema.arguments if not argument.kwarg_only)
    keywords = tuple(argument.name for argument in schema.arguments if argument.kwarg_only)
    optional = frozenset(argument.name for argument in schema.arguments if argument.has_default_value())
    returned = [each.type for each in schema.returns]
    counted = all(type(each) is not torch.ListType for each in returned)
    fewer = len(returned) > 1 and any("mask" in argument.name for argument in schema.arguments)
    return Signature(positional, keywords, optional, len(returned) if counted else None, fewer)


register_lookup(signature_in_torch)
