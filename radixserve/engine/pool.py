"""How many pages the KV pool of one rank gets, and its memory. Of what a GPU's memory is divided into: gpu_memory.py."""

import logging

import torch

from radixserve.config import EngineConfig
from radixserve.engine.gpu_memory import Reserve, division, estimate_reserve, gpu_pool_bytes
from radixserve.engine.graphs import GraphPlan, attention_workspace
from radixserve.engine.memory import cpu_pool_bytes, free_bytes
from radixserve.errors import ConfigError, DeviceMemoryError
from radixserve.kv import KVPool, PageTable, bytes_per_token
from radixserve.kv.device_state import is_out_of_memory, settle, synchronize
from radixserve.kv.pool import FP8
from radixserve.models.config import ModelConfig
from radixserve.models.decoder import Decoder
from radixserve.models.packed_decoder import PackedDecoder

logger = logging.getLogger("radixserve.engine")


def affordable_pages(config: EngineConfig, model: ModelConfig, decoder: Decoder | PackedDecoder, graphs: GraphPlan) -> int:
    """Pages of the pool. Ranks on a CPU have one memory between them: there a token's pages on all of them count."""
    device, weight_bytes = decoder.device, decoder.size_bytes
    part = model if device.type == "cpu" else decoder.config
    token_bytes = bytes_per_token(part.num_layers, part.num_kv_heads, part.head_dim, stored_dtype(config, decoder.dtype))
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading has freed is not free for the driver before
    if config.cache.max_total_tokens is not None:
        num_tokens = _checked_tokens(config.cache.max_total_tokens, config.cache.page_size, token_bytes, device)
        if device.type == "cuda":
            warn_of_a_large_pool(num_tokens * token_bytes, free_bytes(device), _reserve(config, decoder, graphs))
        return num_tokens // config.cache.page_size
    if device.type == "cpu":
        num_bytes = cpu_pool_bytes()
    else:
        reserve = _reserve(config, decoder, graphs)
        num_bytes = gpu_pool_bytes(*torch.cuda.mem_get_info(device), weight_bytes, reserve, config.cache.mem_fraction_static)
        logger.info(division(num_bytes, weight_bytes, reserve))
    num_tokens = num_bytes // token_bytes
    if num_tokens < config.cache.page_size:
        raise DeviceMemoryError(
            f"no memory is left for the KV pool: {num_bytes / 2**20:.0f} MiB beside {weight_bytes / 2**20:.0f} MiB of weights, "
            f"at {token_bytes} bytes a token; free some memory, raise --mem-fraction-static, or give --max-total-tokens"
        )
    return num_tokens // config.cache.page_size


def _reserve(config: EngineConfig, decoder: Decoder | PackedDecoder, graphs: GraphPlan) -> Reserve:
    rows, chunk = config.scheduler.max_running_requests, config.scheduler.chunked_prefill_size
    assert rows is not None and chunk is not None
    workspace = attention_workspace(config, decoder.config, graphs)
    sizes = graphs.sizes, graphs.num_indices, config.tp_size, workspace.num_bytes
    return estimate_reserve(decoder.config, decoder.dtype, chunk, rows, *sizes)


def _checked_tokens(num_tokens: int, page_size: int, token_bytes: int, device: torch.device) -> int:
    if num_tokens < page_size:
        raise ConfigError(f"--max-total-tokens: expected at least one page of {page_size} tokens, got {num_tokens}")
    if num_tokens * token_bytes > (free := free_bytes(device)):
        raise DeviceMemoryError(
            f"--max-total-tokens: {num_tokens} tokens at {token_bytes} bytes each are {num_tokens * token_bytes / 2**20:.0f} MiB, and "
            f"{free / 2**20:.0f} MiB are free on {device}, enough for {free // token_bytes} tokens"
        )
    return num_tokens


def warn_of_a_large_pool(pool: int, free: int, reserve: Reserve) -> None:
    """A pool of a given size is made as long as it fits; what steps need is an estimate."""
    if pool + reserve.total > free:
        logger.warning(
            "--max-total-tokens: a pool of %.0f MiB leaves %.0f MiB for steps, which may need %.0f MiB (%s); they may run out of memory",
            *(size / 2**20 for size in (pool, free - pool, reserve.total)),
            reserve,
        )


def check_stored_dtype(config: EngineConfig, device: str) -> None:
    """ConfigError, before anything is loaded, where no kernel reads what --kv-cache-dtype asks for; what "auto" finds is the registry's."""
    if config.cache.kv_cache_dtype == "auto" or config.attention_backend == "flashinfer":
        return
    wanted = f"--kv-cache-dtype {config.cache.kv_cache_dtype}: expected"
    if config.attention_backend != "auto":
        raise ConfigError(f"{wanted} --attention-backend flashinfer, got {config.attention_backend}")
    if device != "cuda":
        raise ConfigError(f"{wanted} --device cuda, got {device}: FlashInfer's kernels alone read numbers of 8 bits")


def stored_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    return FP8 if config.cache.kv_cache_dtype == "fp8_e4m3" else dtype


def allocate(
    config: EngineConfig, model: ModelConfig, num_pages: int, dtype: torch.dtype, device: torch.device
) -> tuple[KVPool, PageTable]:
    """`model` is the rank's own part. DeviceMemoryError; DeviceError where the device failed before."""
    page_size, num_rows, context_length = config.cache.page_size, config.scheduler.max_running_requests, config.context_length
    assert context_length is not None and num_rows is not None
    stored = stored_dtype(config, dtype)
    settle(device, "loading the model")
    try:
        pool = KVPool(model.num_layers, num_pages, page_size, model.num_kv_heads, model.head_dim, dtype, device, stored)
        page_table = PageTable(num_rows, -(-context_length // page_size), page_size, device)
        synchronize(device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        num_tokens = num_pages * page_size
        size = num_tokens * bytes_per_token(model.num_layers, model.num_kv_heads, model.head_dim, stored)
        raise DeviceMemoryError(
            f"no memory for the KV pool of {num_tokens} tokens ({size / 2**20:.0f} MiB) and the page table of {num_rows} rows of "
            f"{context_length} tokens: {free_bytes(device) / 2**20:.0f} MiB are free on {device}; "
            "lower --max-total-tokens, --max-running-requests or --context-length"
        ) from error
    return pool, page_table
