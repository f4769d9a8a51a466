"""Whether and which CUDA graphs an engine captures, decided from its config before the pool is sized."""

import dataclasses
import logging
import time
from dataclasses import dataclass
from typing import Any

import torch

from radixserve.attention.backend import AttentionBackend
from radixserve.attention.flashinfer_workspace import Workspace, size_workspace
from radixserve.config import EngineConfig, flag_of
from radixserve.errors import ConfigError, DeviceMemoryError
from radixserve.kv import PageTable
from radixserve.kv.device_state import first_line, free_memory, is_out_of_memory
from radixserve.models.config import ModelConfig
from radixserve.runner.decode_graphs import Capture, CudaCapture, DecodeGraphs, ForwardContract, graph_sizes

logger = logging.getLogger("radixserve.engine")
# a step that reads more page ids runs without a graph: 32 MiB of them
_MAX_INDICES = 8 << 20


@dataclass(frozen=True, slots=True)
class GraphPlan:
    sizes: list[int]  # rows of each graph, rising; empty: none
    num_indices: int  # page ids that one step may read


def plan_graphs(config: EngineConfig, capture: Capture | None) -> GraphPlan:
    """config: resolved. Nothing where no capture can be had, graphs are off, or it names kernels that have none."""
    num_rows, context_length = config.scheduler.max_running_requests, config.context_length
    assert num_rows is not None and context_length is not None
    if capture is None or config.disable_cuda_graph or config.attention_backend not in ("auto", "flashinfer"):
        return GraphPlan([], 0)
    most = min(config.cuda_graph_max_bs, num_rows)
    pages_per_row = -(-context_length // config.cache.page_size)
    return GraphPlan(graph_sizes(most), min(most * pages_per_row, _MAX_INDICES) + most)


def graph_capture(device: torch.device) -> Capture | None:
    return CudaCapture(device) if device.type == "cuda" else None


@torch.inference_mode()
def capture_graphs(
    plan: GraphPlan, decoder: ForwardContract, attention: AttentionBackend, page_table: PageTable, capture: Capture | None
) -> DecodeGraphs | None:
    """None where the plan is empty or the attention backend has no graphs. ConfigError where memory does not suffice."""
    graphable: Any = attention
    if not plan.sizes or capture is None or not hasattr(attention, "decode_graph"):
        return None
    start = time.perf_counter()
    try:
        graphs = DecodeGraphs(decoder, graphable, plan.sizes, plan.num_indices, page_table.page_size, page_table.device, capture)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(
            f"no memory for {len(plan.sizes)} CUDA graphs of up to {plan.sizes[-1]} rows: {free_memory(page_table.device)}; lower "
            f"--cuda-graph-max-bs or --mem-fraction-static, or give --disable-cuda-graph ({first_line(error)})"
        ) from error
    logger.info("captured %d CUDA graphs of 1 to %d rows in %.1f s", len(plan.sizes), plan.sizes[-1], time.perf_counter() - start)
    return graphs


def say_that_there_are_none(config: EngineConfig, attention_name: str, capture: Capture | None) -> None:
    """Where graphs were to be expected and the attention backend, chosen or found, has none. For several ranks resolve_config says so."""
    if capture is None or config.disable_cuda_graph or attention_name == "flashinfer":
        return
    logger.warning(
        "--attention-backend %s has no CUDA graphs (flashinfer has): each kernel of a decode step is launched by the host, which is slower "
        "for few rows; --disable-cuda-graph says that this is meant",
        attention_name,
    )


FIXED_SPLIT_TOKENS = 2048


def attention_workspace(config: EngineConfig, model: ModelConfig, graphs: GraphPlan) -> Workspace:
    """What FlashInfer needs for any step of this engine; `model` is the rank's own part."""
    num_rows, context_length, page_size = config.scheduler.max_running_requests, config.context_length, config.cache.page_size
    assert num_rows is not None and context_length is not None
    return size_workspace(
        model.num_heads,
        model.num_kv_heads,
        model.head_dim,
        num_rows=num_rows,
        pages_per_row=-(-context_length // page_size),
        num_graph_rows=max(graphs.sizes, default=0),
        fixed_split_pages=max(1, FIXED_SPLIT_TOKENS // page_size) if config.repeatable_attention else None,
    )


def attention_options(config: EngineConfig, model: ModelConfig, graphs: GraphPlan) -> dict[str, object]:
    """Keywords for attention/registry.py, of what is for some backends only; `model` is the rank's own part."""
    workspace = attention_workspace(config, model, graphs)
    options: dict[str, object] = {"workspace_bytes": workspace.num_bytes}
    if config.disable_cascade_attention or config.repeatable_attention:
        options["cost"] = None  # when a group is found depends on earlier steps
    if config.repeatable_attention:
        options["fixed_split_pages"] = workspace.fixed_split_pages
    return options


def refuse_gpu_flags(config: EngineConfig, device: str) -> None:
    """ConfigError, before anything is loaded, for what FlashInfer alone can do where it cannot be had; what `auto` finds shows later."""
    if device == "cuda":
        if config.attention_backend != "auto":
            refuse_idle_flags(config, config.attention_backend)
        return
    for name in ("cuda_graph_max_bs", "disable_cuda_graph", "disable_cascade_attention", "repeatable_attention"):
        if getattr(config, name) != _DEFAULTS[name]:
            raise ConfigError(f"{flag_of(name)}: expected a CUDA device, got {device}")
    if config.attention_backend == "flashinfer":
        if config.cache.kv_cache_dtype != "auto":
            raise ConfigError(f"--kv-cache-dtype {config.cache.kv_cache_dtype}: expected a CUDA device, got {device}")
        raise ConfigError(f"--attention-backend flashinfer: expected a CUDA device, got {device}; use auto")


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(EngineConfig)}


def refuse_idle_flags(config: EngineConfig, attention_name: str) -> None:
    """ConfigError for a flag that the chosen attention backend would ignore."""
    if attention_name == "flashinfer":
        return
    for name in ("cuda_graph_max_bs", "disable_cascade_attention", "repeatable_attention"):
        if getattr(config, name) != _DEFAULTS[name]:
            raise ConfigError(f"{flag_of(name)}: expected --attention-backend flashinfer, got {attention_name}")
