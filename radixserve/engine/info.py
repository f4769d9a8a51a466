"""What an engine says about itself once it is ready: fixed for its life, told to the server and to whoever asks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Token figures are tokens, not pages; pool_size_bytes counts K and V of the whole pool."""

    model_name: str
    model_path: str
    dtype: str
    device: str
    attention_backend: str
    linear_backend: str
    quantization: str  # of the weights: none or int8
    context_length: int
    max_total_tokens: int
    pool_size_bytes: int
    page_size: int
    schedule_policy: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    is_radix_cache_disabled: bool
    max_running_requests: int
    chunked_prefill_size: int
