"""Finding a model, reading its config, and the Decoder that runs it.

Decoder and load_decoder are imported when asked for: the server's process resolves a model and must not pay for torch.
"""

from typing import TYPE_CHECKING, Any

from radixserve.models.config import ModelConfig, load_model_config
from radixserve.models.location import ModelLocation, resolve_model

if TYPE_CHECKING:
    from radixserve.models.decoder import Decoder
    from radixserve.models.weights import load_decoder

__all__ = ["Decoder", "ModelConfig", "ModelLocation", "load_decoder", "load_model_config", "resolve_model"]


def __getattr__(name: str) -> Any:
    if name == "Decoder":
        from radixserve.models.decoder import Decoder

        return Decoder
    if name == "load_decoder":
        from radixserve.models.weights import load_decoder

        return load_decoder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
