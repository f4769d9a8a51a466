"""Which architectures the Decoder computes, and by which fields they differ. A new family is a new line here, not a new class."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """Facts about an architecture that its config.json does not spell out."""

    qkv_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k, before rotary
    default_head_dim: int | None = None  # None: hidden_size // num_heads
    windowed_by_default: bool = False  # a config.json without `sliding_window` means a window of 4096
    window_is_opt_in: bool = False  # `sliding_window` counts only with `use_sliding_window`


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),  # Llama 2 and 3, SmolLM2
    "MistralForCausalLM": Family(windowed_by_default=True),
    "Qwen2ForCausalLM": Family(qkv_bias=True, window_is_opt_in=True),  # Qwen2, Qwen2.5
    "Qwen3ForCausalLM": Family(qk_norm=True, default_head_dim=128, window_is_opt_in=True),
}
