"""From a config to an engine: load the model, decide what "auto" means here, size the pool, make the parts and introduce them."""

import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from radixserve.attention.backend import AttentionBackend
from radixserve.attention.registry import make_attention_backend
from radixserve.attention.timed import TimedAttention
from radixserve.config import CacheConfig, EngineConfig, SchedulerConfig
from radixserve.engine.engine import Engine
from radixserve.engine.graphs import (
    attention_options,
    capture_graphs,
    graph_capture,
    plan_graphs,
    refuse_gpu_flags,
    refuse_idle_flags,
    say_that_there_are_none,
)
from radixserve.engine.info import EngineInfo
from radixserve.engine.kernels import check_deterministic, check_quantization, settle_kernels
from radixserve.engine.memory import has_native_bfloat16
from radixserve.engine.pipeline import Overlapped
from radixserve.engine.pool import affordable_pages, allocate, check_stored_dtype
from radixserve.engine.threads import limit_threads
from radixserve.errors import ConfigError, DeviceMemoryError
from radixserve.kv import KVPool, device_state
from radixserve.kv.device_state import first_line, free_memory, is_out_of_memory
from radixserve.models.config import ModelConfig, load_model_config
from radixserve.models.decoder import Decoder
from radixserve.models.location import ModelLocation, resolve_model
from radixserve.models.packed_decoder import PackedDecoder
from radixserve.models.rank_group import RankGroup, RankLostError
from radixserve.models.sharding import shard_config
from radixserve.models.weights import load_decoder
from radixserve.processors import cpu_quota
from radixserve.runner.model_runner import ModelRunner
from radixserve.scheduler.scheduler import Scheduler
from radixserve.tree.disabled_cache import DisabledCache
from radixserve.tree.prefix_cache import PageCache, PrefixCache

if TYPE_CHECKING:
    from radixserve.engine.tp.workers import Workers

logger = logging.getLogger("radixserve.engine")


def build_engine(config: EngineConfig) -> Engine:
    """ModelError or ConfigError say what cannot be, and what to change."""
    location = resolve_model(config.model_path)
    model_config = load_model_config(location.path)
    config = resolve_config(config, model_config)
    if config.tp_size == 1:
        return _build(config, location, model_config)
    from radixserve.engine.tp.workers import Workers  # and with it the wire's packages, which one rank does without

    workers = Workers(config, str(location.path))
    try:
        return _build(config, location, model_config, workers)
    except RankLostError as error:
        raise workers.failure() from error
    except BaseException:
        workers.end()
        raise


def _build(config: EngineConfig, location: ModelLocation, model_config: ModelConfig, workers: "Workers | None" = None) -> Engine:
    device = rank_device(config, rank=0)
    with device_state.current(device):
        return _build_on(device, config, location, model_config, workers)


def _build_on(
    device: torch.device, config: EngineConfig, location: ModelLocation, model_config: ModelConfig, workers: "Workers | None"
) -> Engine:
    group = RankGroup(0, config.tp_size, device) if workers else None
    decoder = load_rank(config, model_config, location.path, device, group)
    capture = graph_capture(device)
    graph_plan = plan_graphs(config, capture)
    num_pages = affordable_pages(config, model_config, decoder, graph_plan)
    if workers:
        num_pages = min(num_pages, workers.wait_loaded())
    pool, page_table = allocate(config, decoder.config, num_pages, decoder.dtype, device)
    num_heads, options = decoder.config.num_heads, attention_options(config, decoder.config, graph_plan)
    attention: AttentionBackend = make_attention_backend(config.attention_backend, pool, num_heads, options)
    refuse_idle_flags(config, attention.name)
    say_that_there_are_none(config, attention.name, capture)
    if workers and group:
        workers.allocate(num_pages, attention.name)
        if device.type == "cuda":  # gloo sees that a peer is gone; NCCL's kernels wait
            workers.on_death(group.abort)
        group.connect(workers.directory)
    graphs = capture_graphs(graph_plan, decoder, attention, page_table, capture)
    settle_kernels(config, model_config, decoder, attention.name)
    if config.profile_steps and device.type == "cpu" and not decoder.attends_natively(attention):
        attention = TimedAttention(attention)
    runner = ModelRunner(decoder, pool, page_table, attention, model_config.vocab_size, model_config.eos_token_ids, graphs)
    scheduler = _make_scheduler(config, model_config, num_pages)
    info = _info(config, location.name, str(location.path), model_config, pool, attention.name, decoder.linear_backend)
    logger.debug(info.banner())
    if sentence := info.about_small_pool():
        logger.warning(sentence)
    if workers is None:
        pipeline = Overlapped(runner.launch) if config.overlap_schedule == "on" else None
        return Engine(config, info, scheduler, runner, pipeline=pipeline)
    from radixserve.engine.tp.lead import LeadRunner

    return Engine(config, info, scheduler, LeadRunner(runner, workers, page_table.num_slots), check_ranks=workers.check)


def rank_device(config: EngineConfig, rank: int) -> torch.device:
    """Where a rank computes; there is one device per rank. With its number: a thread of the engine's own may have another current one."""
    if config.device != "cuda":
        return torch.device(config.device)
    return torch.device("cuda", rank if config.tp_size > 1 else torch.cuda.current_device())


def load_rank(
    config: EngineConfig, model: ModelConfig, path: Path, device: torch.device, group: RankGroup | None
) -> Decoder | PackedDecoder:
    """The decoder of one rank, or of the only one: then `group` is None."""
    limit_threads(group.size if group else 1, quota=cpu_quota())
    try:
        return load_decoder(
            model,
            path,
            dtype=getattr(torch, config.dtype),
            device=device,
            load_format=config.load_format,
            seed=config.random_seed,
            linear_backend=config.linear_backend,
            quantization=config.quantization,
            group=group,
        )
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(
            f"no memory for the weights of {path.name} in {config.dtype}: {free_memory(device)}; end what else uses the device, take a "
            f"smaller model, or split it over several (--tp-size) ({first_line(error)})"
        ) from error


def _make_scheduler(config: EngineConfig, model: ModelConfig, num_pages: int) -> Scheduler:
    assert config.context_length is not None
    cache, retraction_interval = _make_cache(config.cache, num_pages), _forced_retraction_interval(os.environ)
    return Scheduler(config.scheduler, cache, config.context_length, frozenset(model.eos_token_ids), retraction_interval)


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
    if config.cuda_graph_max_bs != EngineConfig().cuda_graph_max_bs and (config.disable_cuda_graph or config.tp_size > 1):
        raise ConfigError("--cuda-graph-max-bs: there are no graphs with --disable-cuda-graph, and none with --tp-size above 1")
    refuse_gpu_flags(config, device)
    if config.random_seed and config.load_format != "dummy":
        raise ConfigError(
            f"--random-seed: it is the seed of dummy weights, expected --load-format dummy with it, got {config.load_format}; "
            "sampling takes the field seed of a request"
        )
    if config.tp_size > 1:
        config = _resolve_ranks(config, model, device)
    if config.deterministic:
        check_deterministic(device, config.attention_backend, config.linear_backend)
    check_quantization(config.quantization, device, config.linear_backend)
    check_stored_dtype(config, device)
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" or has_native_bfloat16() else "float32"
    return dataclasses.replace(
        config,
        device=device,
        dtype=dtype,
        context_length=_context_length(config, model),
        overlap_schedule=resolve_overlap(config.overlap_schedule, device, config.tp_size),
        scheduler=_resolve_scheduler(config, device),
    )


def _resolve_ranks(config: EngineConfig, model: ModelConfig, device: str) -> EngineConfig:
    """What computes whole layers, or whole steps, in one piece has no place for an exchange between ranks: plain torch does it instead."""
    shard_config(model, config.tp_size)
    if not torch.distributed.is_available():
        raise ConfigError(f"--tp-size: expected 1 where torch is built without torch.distributed, got {config.tp_size}")
    if config.linear_backend == "native":
        raise ConfigError(f"--linear-backend native: expected --tp-size 1, got {config.tp_size}; use torch")
    if config.quantization != "none":
        raise ConfigError(f"--quantization {config.quantization}: expected --tp-size 1, got {config.tp_size}")
    if config.deterministic:
        raise ConfigError(f"--deterministic: expected --tp-size 1, got {config.tp_size}: sums over ranks round otherwise than one sum")
    if device == "cuda" and torch.cuda.device_count() < config.tp_size:
        raise ConfigError(f"--tp-size: expected at most {torch.cuda.device_count()}, the number of CUDA devices, got {config.tp_size}")
    if device == "cuda" and not config.disable_cuda_graph:
        logger.warning(
            "--tp-size %d: there are no CUDA graphs with several ranks: each kernel of a decode step is launched by the host, which is "
            "slower for few rows; --disable-cuda-graph says that this is meant",
            config.tp_size,
        )
    return dataclasses.replace(config, linear_backend="torch", disable_cuda_graph=True)


def resolve_overlap(overlap_schedule: str, device: str, num_ranks: int = 1) -> str:
    """On a CPU there is no device beside the cores that plan, and a new request would wait a step longer (docs/decisions/009)."""
    if overlap_schedule == "on" and num_ranks > 1:
        raise ConfigError(f"--overlap-schedule on: expected one rank, got {num_ranks}: ranks take one step after the other; use auto")
    if overlap_schedule != "auto":
        return overlap_schedule
    return "on" if device == "cuda" and num_ranks == 1 else "off"


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
        pool_size_bytes=pool.size_bytes * config.tp_size,
        page_size=pool.page_size,
        schedule_policy=config.scheduler.schedule_policy,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        is_radix_cache_disabled=config.cache.disable_radix_cache,
        max_running_requests=config.scheduler.max_running_requests,
        chunked_prefill_size=config.scheduler.chunked_prefill_size,
        tp_size=config.tp_size,
        kv_cache_dtype=config.cache.kv_cache_dtype,
        radix_eviction_policy=config.cache.radix_eviction_policy,
        overlap_schedule=config.overlap_schedule,
    )
