"""What an engine says about itself once it is ready: fixed for its life, told to the server and to whoever asks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Token figures are tokens, not pages; pool_size_bytes counts K and V of the whole pool, on all ranks together."""

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
    tp_size: int = 1
    kv_cache_dtype: str = "auto"  # of stored K and V; auto: dtype
    radix_eviction_policy: str = "lru"
    overlap_schedule: str = "off"  # on or off: what "auto" came to

    def banner(self) -> str:
        return (
            f"model={self.model_name}, dtype={self.dtype}, kv_cache_dtype={self.kv_cache_dtype}, device={self.device}, "
            f"attention_backend={self.attention_backend}, "
            f"linear_backend={self.linear_backend}, quantization={self.quantization}, "
            f"max_total_num_tokens={self.max_total_tokens} ({self.pool_size_bytes / 2**30:.2f} GiB), page_size={self.page_size}, "
            f"radix_cache={'off' if self.is_radix_cache_disabled else 'on'}, schedule_policy={self.schedule_policy}, "
            f"radix_eviction_policy={self.radix_eviction_policy}, overlap_schedule={self.overlap_schedule}, "
            f"chunked_prefill_size={self.chunked_prefill_size}, max_running_requests={self.max_running_requests}, "
            f"context_len={self.context_length}, tp_size={self.tp_size}"
        )

    def about_small_pool(self) -> str:
        """A sentence where one request may need more than the pool holds, else nothing."""
        if self.max_total_tokens >= self.context_length:
            return ""
        return (
            f"the pool's {self.max_total_tokens} tokens are less than the context of {self.context_length}: a request that needs more "
            "is refused (--max-total-tokens, --context-length)"
        )
