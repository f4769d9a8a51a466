"""Whether the kernels that came of a config are those it needs: refused by the reason, or told in one warning where plain torch serves."""

import logging

from radixserve.config import EngineConfig
from radixserve.errors import ConfigError
from radixserve.models.config import ModelConfig
from radixserve.models.decoder import Decoder
from radixserve.models.packed_decoder import PackedDecoder, why_not_packed
from radixserve.native import reason_without_library

logger = logging.getLogger("radixserve.engine")


def settle_kernels(config: EngineConfig, model: ModelConfig, decoder: Decoder | PackedDecoder, attention: str) -> None:
    """Once all are made, and not before: who has asked for one by name gets the refusal alone. ConfigError for --deterministic."""
    falls_back = config.linear_backend == "auto" and decoder.linear_backend == "torch" and decoder.device.type == "cpu"
    why_torch = why_not_packed(model, decoder.dtype, decoder.device) if falls_back else ""
    if config.deterministic:
        if why_torch:
            raise ConfigError(f"--deterministic: its kernels cannot be had here: {why_torch}")
        check_deterministic(config.device, attention, decoder.linear_backend)
    if reason := reason_without_library():
        logger.warning("no CPU kernels, so plain torch does their work, several times slower: %s", reason)
    elif why_torch:
        logger.warning("linears run on plain torch, slower than native ones: %s", why_torch)


def check_deterministic(device: str, attention: str, linear: str) -> None:
    """ConfigError for kernels whose rounding depends on what else is in a step; "auto" passes, until it is known what came of it."""
    sentence = "--deterministic: expected {}, got {}: its results depend on the rows beside it and on where a cached part ended"
    if device != "cpu":
        raise ConfigError(sentence.format("--device cpu", device))
    if attention not in ("auto", "cpu"):
        raise ConfigError(sentence.format("--attention-backend cpu", attention))
    if linear not in ("auto", "native"):
        raise ConfigError(sentence.format("--linear-backend native", linear))


def check_quantization(quantization: str, device: str, linear: str) -> None:
    """ConfigError for what has no products of integers. What "auto" comes to is load_decoder's to refuse."""
    if quantization == "none":
        return
    if device != "cpu":
        raise ConfigError(f"--quantization {quantization}: expected --device cpu, got {device}")
    if linear not in ("auto", "native"):
        raise ConfigError(f"--quantization {quantization}: expected --linear-backend native, got {linear}")
