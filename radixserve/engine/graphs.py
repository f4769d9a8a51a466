"""Whether and which CUDA graphs an engine captures, decided from its config before the pool is sized."""

import dataclasses
import logging
import time
from dataclasses import dataclass
from typing import Any

import torch

from radixserve.attention.backend import AttentionBackend
from radixserve.config import EngineConfig
from radixserve.errors import ConfigError, DeviceMemoryError
from radixserve.kv import PageTable
from radixserve.kv.device_state import first_line, free_memory, is_out_of_memory
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


def attention_options(config: EngineConfig) -> dict[str, object]:
    """Keywords for attention/registry.py, of the flags that are for some backends only."""
    options: dict[str, object] = {}
    if config.disable_cascade_attention:
        options["cost"] = None
    if config.repeatable_attention:
        options["cost"] = None  # when a group is found depends on earlier steps
        options["fixed_split_pages"] = max(1, FIXED_SPLIT_TOKENS // config.cache.page_size)
    return options


FIXED_SPLIT_TOKENS = 2048


def refuse_idle_flags(config: EngineConfig, attention_name: str) -> None:
    """ConfigError for a flag that the chosen attention backend would ignore."""
    if attention_name == "flashinfer":
        return
    defaults = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    for name in ("cuda_graph_max_bs", "disable_cascade_attention", "repeatable_attention"):
        if getattr(config, name) != defaults[name]:
            raise ConfigError(f"--{name.replace('_', '-')}: expected --attention-backend flashinfer, got {attention_name}")
