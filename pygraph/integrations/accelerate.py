"""accelerate: its settings of ``torch.compile``, with a backend outside of its list.

    accelerator = Accelerator(dynamo_plugin=pygraph.integrations.accelerate.DynamoPlugin())

Interface: ``TorchDynamoPlugin`` of accelerate 1.15.
"""

from __future__ import annotations

from typing import Any

from accelerate.utils import TorchDynamoPlugin

__all__ = ["DynamoPlugin"]


class DynamoPlugin(TorchDynamoPlugin):  # type: ignore[misc]
    """Has ``prepare`` compile models with ``backend="pygraph"``. Settings are those of ``TorchDynamoPlugin`` except
    ``backend``: ``options`` are PyGraph's, ``use_regional_compilation`` compiles repeated blocks once."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(backend="inductor", **settings)

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of ``torch.compile``."""
        return {**super().to_kwargs(), "backend": "pygraph"}
