"""From a config to an engine: load the model, decide what "auto" means here, size the pool, make the parts and introduce them."""

import dataclasses
import logging
import os
from collections.abc import Mapping

import torch

from radixserve.attention.backend import AttentionBackend
from radixserve.attention.registry import make_attention_backend
from radixserve.attention.timed import TimedAttention
from radixserve.config import CacheConfig, EngineConfig, SchedulerConfig
from radixserve.engine.engine import Engine
from radixserve.engine.info import EngineInfo
from radixserve.engine.memory import free_bytes, has_native_bfloat16, pool_bytes
from radixserve.engine.pipeline import Overlapped
from radixserve.errors import ConfigError
from radixserve.kv import KVPool, PageTable, bytes_per_token
from radixserve.models.config import ModelConfig, load_model_config
from radixserve.models.location import resolve_model
from radixserve.models.weights import load_decoder
from radixserve.runner.model_runner import ModelRunner
from radixserve.scheduler.scheduler import Scheduler
from radixserve.tree.disabled_cache import DisabledCache
from radixserve.tree.prefix_cache import PageCache, PrefixCache

logger = logging.getLogger("radixserve.engine")


def build_engine(config: EngineConfig) -> Engine:
    """ModelError or ConfigError say what cannot be, and what to change."""
    location = resolve_model(config.model_path)
    model_config = load_model_config(location.path)
    config = resolve_config(config, model_config)
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    decoder = load_decoder(
        model_config,
        location.path,
        dtype=dtype,
        device=device,
        load_format=config.load_format,
        seed=config.random_seed,
        linear_backend=config.linear_backend,
        quantization=config.quantization,
    )
    num_pages = _num_pages(config, model_config, dtype, device, decoder.size_bytes)
    context_length = config.context_length
    assert context_length is not None
    pool, page_table = _allocate(config, model_config, num_pages, dtype, device)
    attention: AttentionBackend = make_attention_backend(config.attention_backend, pool, model_config.num_heads)
    if config.deterministic:
        check_deterministic(config.device, attention.name, decoder.linear_backend)
    if config.profile_steps and device.type == "cpu" and not decoder.attends_natively(attention):
        attention = TimedAttention(attention)
    runner = ModelRunner(decoder, pool, page_table, attention, model_config.vocab_size, model_config.eos_token_ids)
    cache = _make_cache(config.cache, num_pages)
    scheduler = Scheduler(
        config.scheduler, cache, context_length, frozenset(model_config.eos_token_ids), _forced_retraction_interval(os.environ)
    )
    info = _info(config, location.name, str(location.path), model_config, pool, attention.name, decoder.linear_backend)
    logger.debug(_banner(info))
    pipeline = Overlapped(runner.launch) if config.overlap_schedule == "on" else None
    return Engine(config, info, scheduler, runner, pipeline=pipeline)


def _make_cache(config: CacheConfig, num_pages: int) -> PageCache:
    if config.disable_radix_cache:
        return DisabledCache(num_pages, config.page_size)
    return PrefixCache(num_pages, config.page_size, config.radix_eviction_policy, max_pinned_fraction=config.max_pinned_fraction)


def resolve_config(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """A complete config: nothing is None or "auto" any more, but the pool's size, which is known once the weights are loaded."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: expected a CUDA device for cuda, found none; use --device cpu")
    if config.cache.disable_radix_cache and config.cache.radix_eviction_policy != CacheConfig().radix_eviction_policy:
        raise ConfigError("--radix-eviction-policy: nothing is evicted with --disable-radix-cache")
    if device == "cpu" and config.cache.mem_fraction_static is not None:
        raise ConfigError("--mem-fraction-static is for a GPU; on a CPU give --max-total-tokens")
    if config.deterministic:
        check_deterministic(device, config.attention_backend, config.linear_backend)
    check_quantization(config.quantization, device, config.linear_backend)
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" or has_native_bfloat16() else "float32"
    return dataclasses.replace(
        config,
        device=device,
        dtype=dtype,
        context_length=_context_length(config, model),
        overlap_schedule=resolve_overlap(config.overlap_schedule, device),
        scheduler=_resolve_scheduler(config, device),
    )


def resolve_overlap(overlap_schedule: str, device: str, num_ranks: int = 1) -> str:
    """On a CPU there is no device beside the cores that plan, and a new request would wait a step longer (docs/decisions/009)."""
    if overlap_schedule == "on" and num_ranks > 1:
        raise ConfigError(f"--overlap-schedule on: expected one rank, got {num_ranks}: ranks take one step after the other; use auto")
    if overlap_schedule != "auto":
        return overlap_schedule
    return "on" if device == "cuda" and num_ranks == 1 else "off"


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


def _forced_retraction_interval(environment: Mapping[str, str]) -> int | None:
    """RADIXSERVE_TEST_RETRACT=k: retract somebody every k steps, whatever memory is free. For tests."""
    text = environment.get("RADIXSERVE_TEST_RETRACT", "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ConfigError(f"RADIXSERVE_TEST_RETRACT: expected a positive number of steps, got {text!r}")
    logger.warning("RADIXSERVE_TEST_RETRACT=%s: a running request is retracted every %s steps", text, text)
    return int(text)


def _context_length(config: EngineConfig, model: ModelConfig) -> int:
    longest = model.max_position_embeddings
    if config.context_length is not None and config.context_length > longest:
        raise ConfigError(f"--context-length: expected at most the model's {longest}, got {config.context_length}")
    return config.context_length or longest


def _resolve_scheduler(config: EngineConfig, device: str) -> SchedulerConfig:
    scheduler = config.scheduler
    chunk = scheduler.chunked_prefill_size or (8192 if device == "cuda" else 512)
    rows = scheduler.max_running_requests
    if rows is None:
        rows = min(256 if device == "cuda" else 64, chunk)
    elif rows > chunk:
        raise ConfigError(
            f"--max-running-requests: expected at most --chunked-prefill-size ({chunk}), since each running request needs a token "
            f"of every step's budget, got {rows}"
        )
    return dataclasses.replace(scheduler, chunked_prefill_size=chunk, max_running_requests=rows)


def _num_pages(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device, weight_bytes: int) -> int:
    token_bytes = bytes_per_token(model.num_layers, model.num_kv_heads, model.head_dim, dtype)
    num_tokens = config.cache.max_total_tokens
    if num_tokens is None:
        num_bytes = pool_bytes(device, weight_bytes, config.cache.mem_fraction_static)
        num_tokens = num_bytes // token_bytes
        if num_tokens < config.cache.page_size:
            raise ConfigError(
                f"no memory is left for the KV pool: {num_bytes / 2**20:.0f} MiB beside {weight_bytes / 2**20:.0f} MiB of weights, "
                f"at {token_bytes} bytes a token; free some memory, raise --mem-fraction-static, or give --max-total-tokens"
            )
    elif num_tokens < config.cache.page_size:
        raise ConfigError(f"--max-total-tokens: expected at least one page of {config.cache.page_size} tokens, got {num_tokens}")
    elif num_tokens * token_bytes > (free := free_bytes(device)):
        raise ConfigError(
            f"--max-total-tokens: {num_tokens} tokens at {token_bytes} bytes each are {num_tokens * token_bytes / 2**20:.0f} MiB, and "
            f"{free / 2**20:.0f} MiB are free on {device}, enough for {free // token_bytes} tokens"
        )
    return num_tokens // config.cache.page_size


def _allocate(
    config: EngineConfig, model: ModelConfig, num_pages: int, dtype: torch.dtype, device: torch.device
) -> tuple[KVPool, PageTable]:
    page_size, num_rows, context_length = config.cache.page_size, config.scheduler.max_running_requests, config.context_length
    assert context_length is not None and num_rows is not None
    try:
        pool = KVPool(model.num_layers, num_pages, page_size, model.num_kv_heads, model.head_dim, dtype, device)
        page_table = PageTable(num_rows, -(-context_length // page_size), page_size, device)
    except (RuntimeError, MemoryError) as error:  # torch's own kinds for memory that it did not get
        num_tokens = num_pages * page_size
        size = num_tokens * bytes_per_token(model.num_layers, model.num_kv_heads, model.head_dim, dtype)
        raise ConfigError(
            f"no memory for the KV pool of {num_tokens} tokens ({size / 2**20:.0f} MiB) and the page table of {num_rows} rows of "
            f"{context_length} tokens: {free_bytes(device) / 2**20:.0f} MiB are free on {device}; "
            "lower --max-total-tokens, --max-running-requests or --context-length"
        ) from error
    return pool, page_table


def _info(config: EngineConfig, name: str, path: str, model: ModelConfig, pool: KVPool, attention: str, linear: str) -> EngineInfo:
    assert config.context_length and config.scheduler.max_running_requests and config.scheduler.chunked_prefill_size
    return EngineInfo(
        model_name=name,
        model_path=path,
        dtype=config.dtype,
        device=config.device,
        attention_backend=attention,
        linear_backend=linear,
        quantization=config.quantization,
        context_length=config.context_length,
        max_total_tokens=pool.num_pages * pool.page_size,
        pool_size_bytes=pool.size_bytes,
        page_size=pool.page_size,
        schedule_policy=config.scheduler.schedule_policy,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        is_radix_cache_disabled=config.cache.disable_radix_cache,
        max_running_requests=config.scheduler.max_running_requests,
        chunked_prefill_size=config.scheduler.chunked_prefill_size,
    )


def _banner(info: EngineInfo) -> str:
    return (
        f"model={info.model_name}, dtype={info.dtype}, device={info.device}, attention_backend={info.attention_backend}, "
        f"linear_backend={info.linear_backend}, quantization={info.quantization}, "
        f"max_total_num_tokens={info.max_total_tokens} ({info.pool_size_bytes / 2**30:.2f} GiB), page_size={info.page_size}, "
        f"radix_cache={'off' if info.is_radix_cache_disabled else 'on'}, schedule_policy={info.schedule_policy}, "
        f"chunked_prefill_size={info.chunked_prefill_size}, max_running_requests={info.max_running_requests}, "
        f"context_len={info.context_length}"
    )
