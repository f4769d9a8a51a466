"""Flags of SGLang and vLLM that are no flags here: what to write instead, or what is not built. Data, and one sentence for each kind.

A flag that stands here is never answered by a guess of spelling: the nearest name can be the opposite of what was meant.
"""

# Flag -> the flag of radixserve that means the same, or what is nearest with what differs.
_EQUIVALENTS = {
    "--block-size": "--page-size",
    "--cuda-graph-bs": "--cuda-graph-max-bs, the largest size alone: those below it are chosen here",
    "--enable-deterministic-inference": "--deterministic",
    "--enforce-eager": "--disable-cuda-graph",
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--max-cudagraph-capture-size": "--cuda-graph-max-bs",
    "--max-model-len": "--context-length",
    "--max-num-batched-tokens": "--chunked-prefill-size",
    "--max-num-seqs": "--max-running-requests",
    "--max-prefill-tokens": "--chunked-prefill-size",
    "--no-enable-prefix-caching": "--disable-radix-cache",
    "--no-async-scheduling": "--overlap-schedule off",
    "--async-scheduling": "--overlap-schedule on",
    "--disable-overlap-schedule": "--overlap-schedule off",
    "--disable-cascade-attn": "--disable-cascade-attention",
    "--scheduling-policy": "--schedule-policy",
    "--seed": "the field seed of a request (--random-seed is for dummy weights)",
    "--tensor-parallel-size": "--tp-size",
    "--tp": "--tp-size",
    "--uvicorn-log-level": "--log-level",
    "--allowed-origins": "--cors-allow-origin",
    "--watchdog-timeout": "--stall-timeout-s, after which /health turns red; the server is not ended",
}

# Flag -> what is so without it.
_ALWAYS = {
    "--enable-cache-report": "every answer's usage says how many tokens were re-used",
    "--enable-chunked-prefill": "long prompts are always computed in chunks (--chunked-prefill-size sets their size)",
    "--enable-metrics": "/metrics is always served",
    "--enable-mixed-chunk": "a step always takes running streams and prompt chunks together",
    "--enable-prefix-caching": "prefixes are always re-used, unless --disable-radix-cache is given",
    "--enable-prompt-tokens-details": "every answer's usage says how many tokens were re-used",
    "--enable-request-id-headers": "every answer carries its request id",
    "--disable-log-requests": "requests are not logged, unless --log-requests is given",
    "--no-enable-log-requests": "requests are not logged, unless --log-requests is given",
    "--disable-log-stats": "figures are at /metrics; --decode-log-interval sets how often a line is logged",
    "--skip-server-warmup": "the server does not send itself a request at start",
    "--enable-priority-scheduling": "a request's priority always counts (--max-client-priority limits what clients may send)",
}

# What is not built -> its flags.
_NOT_BUILT = {
    "chat templates other than the model's own": ("--chat-template", "--chat-template-content-format", "--completion-template"),
    "code that comes with a model": ("--trust-remote-code",),
    "a revision of a hub's model; give --model-path a local directory": ("--revision", "--code-revision", "--tokenizer-revision"),
    "a tokenizer apart from the model's": ("--tokenizer", "--tokenizer-path", "--tokenizer-mode"),
    "tool calls": ("--tool-call-parser", "--enable-auto-tool-choice", "--tool-server"),
    "a parser of reasoning": ("--reasoning-parser", "--enable-reasoning"),
    "structured output": ("--grammar-backend", "--guided-decoding-backend", "--structured-outputs-config"),
    "LoRA": (
        "--enable-lora",
        "--lora-paths",
        "--lora-modules",
        "--max-loras",
        "--max-loras-per-batch",
        "--max-lora-rank",
        "--lora-backend",
    ),
    "a second tier of the cache": (
        "--enable-hierarchical-cache",
        "--hicache-ratio",
        "--hicache-size",
        "--hicache-write-policy",
        "--hicache-storage-backend",
        "--cpu-offload-gb",
        "--swap-space",
        "--kv-offloading-size",
        "--enable-lmcache",
    ),
    "transfer of KV pages between instances": (
        "--disaggregation-mode",
        "--disaggregation-transfer-backend",
        "--kv-transfer-config",
        "--kv-events-config",
    ),
    "speculative decoding": (
        "--speculative-algorithm",
        "--speculative-algo",
        "--speculative-config",
        "--speculative-draft-model-path",
        "--speculative-num-steps",
        "--speculative-num-draft-tokens",
        "--speculative-eagle-topk",
        "--num-speculative-tokens",
    ),
    "several replicas in one server": ("--dp", "--dp-size", "--data-parallel-size", "--load-balance-method", "--enable-dp-attention"),
    "pipeline parallelism": ("--pp", "--pp-size", "--pipeline-parallel-size"),
    "expert parallelism": ("--ep", "--ep-size", "--expert-parallel-size", "--enable-expert-parallel"),
    "more than one machine": ("--nnodes", "--node-rank", "--dist-init-addr", "--distributed-executor-backend"),
    "embeddings": ("--is-embedding", "--task", "--runner"),
    "images": ("--enable-multimodal", "--limit-mm-per-prompt", "--mm-processor-kwargs"),
    "overriding the model's config": ("--json-model-override-args", "--hf-overrides", "--rope-scaling", "--override-generation-config"),
    "torch.compile": ("--enable-torch-compile", "--compilation-config", "--torch-compile-max-bs"),
    "TLS; put a proxy in front": ("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs"),
    "several HTTP processes": ("--api-server-count",),
    "several processes that tokenize": ("--tokenizer-worker-num",),
    "a server without a tokenizer; /generate takes token ids (input_ids) beside one": ("--skip-tokenizer-init",),
    "streaming several tokens at a time": ("--stream-interval",),
    "a directory for models of the hub; set HF_HOME": ("--download-dir",),
    "sampling defaults of the model's own": ("--sampling-defaults", "--generation-config"),
    "cutting a prompt that is too long": ("--allow-auto-truncate",),
    "tracing": ("--enable-trace", "--otlp-traces-endpoint"),
    "YAML files of flags": ("--config",),
}

_WHY_NOT = {flag: what for what, flags in _NOT_BUILT.items() for flag in flags}
FOREIGN_FLAGS = frozenset(_EQUIVALENTS) | frozenset(_ALWAYS) | frozenset(_WHY_NOT)


def about(flag: str) -> str | None:
    """What to say of a flag of SGLang's or vLLM's, without its value; None for one that is not in the table."""
    name = flag.replace("_", "-")
    if name in _EQUIVALENTS:
        return f"here it is {_EQUIVALENTS[name]}"
    if name in _ALWAYS:
        return f"not needed: {_ALWAYS[name]}"
    if name in _WHY_NOT:
        return f"not built here: {_WHY_NOT[name]}"
    return None
