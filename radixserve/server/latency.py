"""What users wait for, as histograms: measured in the server, where the text leaves."""

from prometheus_client import CollectorRegistry, Histogram

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_ITL_BUCKETS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 4, 8)
_E2E_BUCKETS = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600, 1200, 1800, 2400)
_QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_LEN_BUCKETS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class LatencyMetrics:
    """One observation per choice, except for inter-token latency: one per token after the first."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def histogram(name: str, help: str, buckets: tuple[float, ...], prefix: str = "sglang") -> Histogram:
            return Histogram(f"{prefix}:{name}", help, ["model_name"], buckets=buckets, registry=registry).labels(model_name)

        ttft_help = "From the request's arrival to its first token."
        self._ttft = histogram("time_to_first_token_seconds", ttft_help, _TTFT_BUCKETS)
        self._ttft_of_vllm = histogram("time_to_first_token_seconds", ttft_help, _TTFT_BUCKETS, "vllm")
        self._itl = histogram("inter_token_latency_seconds", "Between two tokens of one choice.", _ITL_BUCKETS)
        self._e2e = histogram("e2e_request_latency_seconds", "From the request's arrival to the end of a choice.", _E2E_BUCKETS)
        self._queue = histogram("queue_time_seconds", "From arrival at the scheduler to first admission.", _QUEUE_BUCKETS)
        self._prompt_lens = histogram("prompt_tokens_histogram", "Prompt tokens of a choice that ended by itself.", _LEN_BUCKETS)
        self._output_lens = histogram("generation_tokens_histogram", "Output tokens of a choice that ended by itself.", _LEN_BUCKETS)

    def observe_first_token(self, ttft_s: float, queue_time_s: float) -> None:
        self._ttft.observe(ttft_s)
        self._ttft_of_vllm.observe(ttft_s)
        self._queue.observe(queue_time_s)

    def observe_tokens(self, interval_s: float, num_tokens: int) -> None:
        """Several tokens that came together share their interval."""
        for _ in range(num_tokens):
            self._itl.observe(interval_s / num_tokens)

    def observe_end(self, e2e_s: float) -> None:
        self._e2e.observe(e2e_s)

    def observe_lens(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        self._prompt_lens.observe(num_prompt_tokens)
        self._output_lens.observe(num_output_tokens)
