"""EngineStats as Prometheus metrics. SGLang's names where the meaning is the same, for its dashboards; radixserve_* for the rest."""

import dataclasses
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from radixserve.engine.client import AsyncEngine
from radixserve.metrics import EngineStats


class EngineCollector(Collector):
    """Reads the last snapshot that the engine sent; asking for a newer one is the route's business."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.last_stats
        for name, help, value in _gauges(stats):
            gauge = GaugeMetricFamily(name, help, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, help, value in _counters(stats):
            counter = CounterMetricFamily(name, help, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter
        yield from self._of_the_process(stats)

    def _of_the_process(self, stats: EngineStats) -> Iterator[Metric]:
        seconds = CounterMetricFamily("radixserve_step_seconds", "Time of all steps by part.", labels=["model_name", "part"])
        for part in dataclasses.fields(stats.step_seconds):
            seconds.add_metric([self._model_name, part.name], getattr(stats.step_seconds, part.name))
        yield seconds
        up = GaugeMetricFamily("radixserve_engine_up", "1 while the engine process is alive and ready.", labels=["model_name"])
        up.add_metric([self._model_name], float(self._engine.is_alive))
        yield up
        restarts = CounterMetricFamily("radixserve_engine_restarts", "Engine processes started after one died.", labels=["model_name"])
        restarts.add_metric([self._model_name], self._engine.num_restarts)
        yield restarts
        info = self._engine.info
        sizes = {"page_size": str(info.page_size), "num_pages": str(info.max_total_tokens // info.page_size)}
        yield InfoMetricFamily("sglang:cache_config", "Sizes of the KV pool.", {"model_name": self._model_name, **sizes})
        blocks = {"block_size": sizes["page_size"], "num_gpu_blocks": sizes["num_pages"]}
        yield InfoMetricFamily("vllm:cache_config", "Sizes of the KV pool, by vLLM's names.", {"model_name": self._model_name, **blocks})


def _gauges(stats: EngineStats) -> tuple[tuple[str, str, float], ...]:
    used = stats.locked_tokens + stats.private_tokens
    return (
        ("sglang:num_running_reqs", "Requests in the running batch.", stats.num_running),
        ("sglang:num_queue_reqs", "Requests waiting for admission.", stats.num_waiting),
        ("sglang:num_used_tokens", "Pool tokens in use by running requests; cached but unlocked ones are not used.", used),
        ("sglang:token_usage", "num_used_tokens over max_total_num_tokens, 0 to 1.", stats.token_usage),
        ("sglang:max_total_num_tokens", "Size of the pool in tokens.", stats.pool_tokens),
        ("sglang:kv_available_tokens", "Pool tokens that hold nothing.", stats.free_tokens),
        ("sglang:kv_evictable_tokens", "Pool tokens that are cached and may be evicted.", stats.evictable_tokens),
        ("radixserve_pinned_tokens", "Cached tokens that a pin keeps for a time.", stats.pinned_tokens),
        ("sglang:kv_used_tokens", "Pool tokens that may not be evicted.", used),
        ("sglang:cache_hit_rate", "Cached over prompt tokens since the start, 0 to 1.", stats.cache_hit_rate),
        ("vllm:num_requests_running", "Requests in the running batch.", stats.num_running),
        ("vllm:num_requests_waiting", "Requests waiting for admission.", stats.num_waiting),
        ("vllm:kv_cache_usage_perc", "Share of the pool in use by running requests, 0 to 1.", stats.token_usage),
        ("radixserve_locked_tokens", "Tokens of the tree that running requests hold.", stats.locked_tokens),
        ("sglang:new_token_ratio", "Share of max_tokens that running requests are expected to use.", stats.new_token_ratio),
        ("radixserve_max_prompt_tokens_per_step", "Prompt tokens that a step takes at most.", stats.max_prompt_tokens_per_step),
        ("radixserve_private_tokens", "Pool tokens that running requests hold outside the tree.", stats.private_tokens),
    )


def _counters(stats: EngineStats) -> tuple[tuple[str, str, float], ...]:
    """Names without _total: the exporter adds it."""
    return (
        ("sglang:prompt_tokens", "Prompt tokens of admitted requests, once each.", stats.prompt_tokens_total),
        ("sglang:cached_tokens", "Prompt tokens that were re-used, counted at first admission.", stats.cached_tokens_total),
        ("sglang:generation_tokens", "Tokens generated.", stats.generation_tokens_total),
        ("sglang:num_requests", "Requests accepted.", stats.requests_total),
        ("sglang:num_aborted_requests", "Requests aborted.", stats.aborted_total),
        ("radixserve_timed_out_requests", "Requests that waited or took too long.", stats.timed_out_total),
        ("radixserve_pool_exhausted_requests", "Requests ended since no page could be had.", stats.pool_exhausted_total),
        ("sglang:num_retracted_requests", "Times that a running request was put back to wait.", stats.retracted_total),
        ("sglang:evicted_tokens", "Tokens evicted from the tree.", stats.evicted_tokens_total),
        ("vllm:prefix_cache_queries", "Prompt tokens that were looked up, once per request.", stats.prompt_tokens_total),
        ("vllm:prefix_cache_hits", "Prompt tokens that were found.", stats.cached_tokens_total),
        ("vllm:num_preemptions", "Times that a running request was put back to wait.", stats.retracted_total),
        ("radixserve_finished_requests", "Requests that ended by themselves.", stats.finished_total),
        ("radixserve_prefill_tokens", "Prompt positions really computed.", stats.prefill_tokens_total),
        ("radixserve_prefill_steps", "Steps that held a prompt chunk.", stats.prefill_steps_total),
        ("radixserve_decode_steps", "Steps of decode rows alone.", stats.decode_steps_total),
        ("radixserve_prefill_step_seconds", "Wall time of the steps that held a prompt chunk.", stats.prefill_step_seconds),
        ("radixserve_prefill_step_decode_rows", "Decode rows in these steps.", stats.prefill_step_decode_rows_total),
        ("radixserve_decode_step_seconds", "Wall time of the steps of decode rows alone.", stats.decode_step_seconds),
        ("radixserve_decode_step_rows", "Decode rows in these steps.", stats.decode_step_rows_total),
    )
