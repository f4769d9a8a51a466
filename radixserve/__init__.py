"""radixserve: a serving runtime for language models whose core is a radix tree over token ids, mapped to a paged KV pool."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radixserve.core import FinishReason, Namespace, SamplingParams
    from radixserve.engine.engine import Engine
    from radixserve.engine.llm import LLM, Completion
    from radixserve.errors import RadixServeError

__all__ = ["LLM", "Completion", "Engine", "FinishReason", "Namespace", "RadixServeError", "SamplingParams"]

_LAZY = {
    "LLM": "radixserve.engine.llm",
    "Completion": "radixserve.engine.llm",
    "Engine": "radixserve.engine.engine",
    "FinishReason": "radixserve.core",
    "Namespace": "radixserve.core",
    "SamplingParams": "radixserve.core",
    "RadixServeError": "radixserve.errors",
}


def __getattr__(name: str) -> Any:
    """torch is loaded when it is needed, not by `import radixserve`; nor is anything else, which no Ctrl-C could interrupt in peace."""
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'radixserve' has no attribute {name!r}")
