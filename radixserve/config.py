"""Every setting, once: default, sentence, check. The command line is generated from these classes (cli.py).

Nothing writes to a config after it is made; `None` in a field means "decide at start", and resolve() in engine/build.py returns
a new config in which nothing is None.
"""

import dataclasses
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from radixserve.errors import ConfigError, shown


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    low: float | None = None,
    high: float | None = None,
    is_secret: bool = False,
) -> Any:
    """A config field: its default, one sentence of help, and the values it may take. A secret is in no repr."""
    metadata = {"help": help, "choices": tuple(choices), "low": low, "high": high, "is_secret": is_secret}
    return field(default=default, repr=not is_secret, metadata=metadata)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


MAX_INT = 2**31 - 1
EVICTION_CHOICES = ("lru", "lfu", "slru", "fifo", "priority", "adaptive")


class _Checked:
    """Checks each field against its own metadata when the config is made."""

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, spec.name)
            _check_type(spec.name, spec.type, value)
            if value is None or "help" not in spec.metadata:
                continue
            choices, low, high = spec.metadata["choices"], spec.metadata["low"], spec.metadata["high"]
            if high is None and type(value) is int:
                high = MAX_INT  # counts of tokens, rows and bytes are int32 in the page table and below
            if choices and value not in choices:
                raise ConfigError(f"{flag_of(spec.name)}: expected one of {', '.join(choices)}, got {value!r}")
            if low is not None and not value >= low:
                raise ConfigError(f"{flag_of(spec.name)}: expected at least {low}, got {value}")
            if high is not None and not value <= high:
                raise ConfigError(f"{flag_of(spec.name)}: expected at most {high}, got {value}")


_TYPE_NAMES = {int: "an integer", float: "a number", bool: "True or False", str: "a string", types.NoneType: "None"}


def _check_type(name: str, hint: Any, value: Any) -> None:
    """`hint` is the field's annotation: a type, or several joined by |. An integer will do for a float; a bool is no integer here."""
    given = type(value)
    if typing.get_origin(hint) is tuple:
        if given is not tuple or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{flag_of(name)}: expected a tuple of strings, got {shown(value)}")
        return
    kinds = typing.get_args(hint) or (hint,)
    if given not in kinds and not (given is int and float in kinds) and not (given is not bool and isinstance(value, kinds)):
        expected = " or ".join(_TYPE_NAMES.get(kind, kind.__name__) for kind in kinds)
        raise ConfigError(f"{flag_of(name)}: expected {expected}, got {shown(value)}")


@dataclass(frozen=True, slots=True)
class CacheConfig(_Checked):
    """The tree and the pool."""

    page_size: int = option(1, "tokens per KV page; a prefix is re-used in whole pages", low=1, high=1024)
    kv_cache_dtype: str = option(
        "auto",
        "type of stored K and V; auto: as they are computed; fp8_e4m3: 8 bits without a scale, half of the memory, and results change "
        "(with flashinfer, heads of 128 or 256 dimensions)",
        choices=("auto", "fp8_e4m3"),
    )
    disable_radix_cache: bool = option(False, "share nothing between requests: the baseline, everything else equal")
    radix_eviction_policy: str = option(
        "lru",
        "which prefix goes first; adaptive: lru, or what was seen once first, whichever hits more",
        choices=EVICTION_CHOICES,
    )
    max_pinned_fraction: float = option(
        0.25, "share of the pool that pins (cache_control, /pin) may hold; 0 refuses them", low=0.0, high=1.0
    )
    max_total_tokens: int | None = option(None, "size of the KV pool in tokens (default: from free memory)", low=2)
    mem_fraction_static: float | None = option(
        None,
        "share of the memory for weights and pool together (GPU; on a CPU the pool is min(4 GiB, half of the free memory))",
        low=0.01,
        high=0.99,
    )


@dataclass(frozen=True, slots=True)
class SchedulerConfig(_Checked):
    """Who runs in a step."""

    schedule_policy: str = option(
        "lpm",
        "order of the waiting queue: lpm (longest cached prefix first), fcfs (first come, first served), dfs-weight (the heaviest cached "
        "branch of the waiting prompts first, each to its end) or cost (least estimated work first); priority comes first, and the wait is "
        "bounded, in all",
        choices=("lpm", "fcfs", "dfs-weight", "cost"),
    )
    lpm_age_credit: int = option(
        64, "cached tokens (for cost: prompt tokens computed) that count as much as one pass of admissions waited", low=1
    )
    lpm_max_overtaken: int = option(
        64, "a request that so many later arrivals were admitted before, since it began to wait, is passed by no more, in any policy", low=1
    )
    priority_aging_passes: int = option(
        256, "passes of admissions that one step of priority is worth: a lower one that has waited longer goes first", low=1
    )
    priority_scheduling_preemption_threshold: int = option(
        10, "a request that finds no room has those retracted whose priority is lower by more than this", low=0
    )
    disable_priority_preemption: bool = option(False, "never retract a running request in favour of a more urgent one")
    chunked_prefill_size: int | None = option(
        None, "token budget of one step, shared by decode rows and prompt chunks (default: 512 on a CPU, 8192 on a GPU)", low=1
    )
    max_queued_requests: int | None = option(None, "refuse further requests (429) while so many wait (default: no limit)", low=1)
    queue_timeout_s: float | None = option(None, "give up on a request that waits longer (503)", low=0.001)
    request_timeout_s: float | None = option(None, "give up on a request that takes longer, waiting included (503)", low=0.001)
    schedule_conservativeness: float = option(
        1.0,
        "expect running requests to use 0.7 times this of their max_tokens at first, and down to a seventh of that while nobody is "
        "retracted: lower admits more at once, higher retracts less; one with ignore_eos and no stop counts in full",
        low=0.0,
        high=100.0,
    )
    max_retractions: int = option(
        4,
        "a request that gave way so often, for lack of memory or to a more urgent one, runs on only once all of its output fits, and to "
        "its end; 0: nobody is retracted, nor preempted",
        low=0,
    )
    target_step_ms: float | None = option(
        None, "shorten prompt chunks so that a step lasts about so long (default: off; --chunked-prefill-size stays the limit)", low=0.1
    )
    max_running_requests: int | None = option(None, "rows of the page table (default: 64 on a CPU, 256 on a GPU)", low=1, high=65536)


@dataclass(frozen=True, slots=True)
class EngineConfig(_Checked):
    """One model and what runs it."""

    model_path: str | None = option(
        None, "Hugging Face directory, .gguf file, or hub name (default: SmolLM2-135M-Instruct, fetched once, from weights of 4 bits)"
    )
    load_format: str = option("auto", "auto reads weights; dummy makes random ones from config.json alone", choices=("auto", "dummy"))
    dtype: str = option(
        "auto",
        "auto: bfloat16 where the processor has it natively, else float32",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    device: str = option("auto", "auto: cuda where there is one, else cpu", choices=("auto", "cpu", "cuda"))
    tp_size: int = option(
        1,
        "tensor parallelism: split each layer over so many GPUs of this machine, or processes on a CPU; must divide the model's heads",
        low=1,
        high=64,
    )
    context_length: int | None = option(None, "lower the context length of the model's config", low=2)
    attention_backend: str = option(
        "auto",
        "attention kernels; auto: flashinfer, else triton, on an NVIDIA GPU, and cpu on a CPU, where they can be had, else torch",
        choices=("auto", "flashinfer", "triton", "torch", "cpu"),
    )
    cuda_graph_max_bs: int = option(
        64, "decode steps of up to so many rows run as CUDA graphs, captured at start (with flashinfer)", low=1, high=512
    )
    disable_cuda_graph: bool = option(False, "launch every kernel of a decode step one by one")
    disable_cascade_attention: bool = option(
        False, "never read a beginning that decode rows share once for all of them (with flashinfer, which does so where it should pay)"
    )
    repeatable_attention: bool = option(
        False,
        "cut long rows of keys at fixed places and share no reads (flashinfer), so that a row's result depends less on the rows beside "
        "it: slower; equal batches give equal bits, others may still differ",
    )
    linear_backend: str = option(
        "auto",
        "matrix products: native packs the weights once (CPU with AVX-512, a C++ compiler); torch; auto: native where it can be",
        choices=("auto", "native", "torch"),
    )
    quantization: str = option(
        "none",
        "int8: weights of 8 bits with a scale for each output, made at load: a decode step reads half of the bytes, and results change "
        "slightly; native products (CPU) only",
        choices=("none", "int8"),
    )
    deterministic: bool = option(
        False,
        "start only where a text's bits depend on its prompt, seed and sampling alone, not on hits, chunks, batch or retraction: native "
        "attention and products on a CPU, which are the default there and need not be slower for it",
    )
    overlap_schedule: str = option(
        "auto",
        "plan the next step while the device computes this one; auto: on a GPU",
        choices=("auto", "on", "off"),
    )
    random_seed: int = option(0, "seed of dummy weights (--load-format dummy); sampling takes the field seed of a request", low=0)
    decode_log_interval: int = option(40, "log one line every so many decode steps", low=1)
    profile_steps: int = option(
        0, "print where the time of the first so many steps went, by part; they are taken one by one, without overlap", low=0
    )
    check_account_every_step: bool = option(False, "recount every page after every step (slow; tests do it; production recounts when idle)")
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)


@dataclass(frozen=True, slots=True)
class ServerConfig(_Checked):
    """The HTTP side."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(30000, "port to listen on; 0 takes a free one", low=0, high=65535)
    served_model_name: str | None = option(None, "name in /v1/models (default: the model's own)")
    drain_timeout_s: float = option(30.0, "on SIGTERM, let running requests finish for so long before cutting them", low=0)
    api_key: str | None = option(None, "key that every route but /health and /ready asks for (or RADIXSERVE_API_KEY)", is_secret=True)
    admin_api_key: str | None = option(
        None, "key that flush, abort and other admin routes ask for instead (or RADIXSERVE_ADMIN_API_KEY)", is_secret=True
    )
    cors_allow_origin: tuple[str, ...] = option((), "origin whose pages may call this server, or *; repeat it or separate by commas")
    accept_any_model: bool = option(False, "serve a request whatever model it names, instead of a 404")
    max_client_priority: int = option(
        0, "a request's priority above this is lowered to it; below, it counts as sent", low=0, high=2**31 - 1
    )
    max_body_bytes: int = option(32 * 2**20, "refuse request bodies above this size", low=1024)
    body_timeout_s: float = option(60.0, "answer 408 when no byte of a request's body came for so long", low=0.1)
    max_n: int = option(128, "refuse a larger n", low=1)
    max_choices: int = option(1024, "refuse calls with more prompts times n", low=1)
    max_logprobs: int = option(
        4_000_000, "refuse calls that may show more log-probabilities: tokens times (1 + likeliest ones) times choices", low=1
    )
    max_stop_strings: int = option(64, "refuse more stop strings than this", low=0)
    max_stop_chars: int = option(4096, "refuse longer stop strings: so much text is held back at the end of a stream", low=1)
    stall_timeout_s: float = option(60.0, "/health turns red when the engine has work and moves nothing for so long", low=0.1)
    log_requests: bool = option(False, "print one line per answer: request id, route, status, time and tokens; never a prompt or a key")
    log_level: str = option("info", "what to print; the address is printed in any case", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        _Checked.__post_init__(self)
        for name in ("api_key", "admin_api_key"):
            key = getattr(self, name)
            if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
                raise ConfigError(f"{flag_of(name)}: expected printable ASCII characters without blanks")
        if self.api_key is not None and self.api_key == self.admin_api_key:
            raise ConfigError("--admin-api-key: expected another key than --api-key")
        if self.log_requests and self.log_level not in ("debug", "info"):
            raise ConfigError(f"--log-requests: expected --log-level info or debug, which show its lines, got {self.log_level}")
        for origin in self.cors_allow_origin:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ConfigError(f"--cors-allow-origin: expected * or an origin like https://example.org, got {shown(origin)}")
