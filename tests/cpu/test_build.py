"""What "auto" becomes, and what is refused at start: every contradiction by name, before weights are loaded."""

from collections.abc import Callable
from pathlib import Path

import pytest

from radixserve.core import SamplingParams
from radixserve.engine import pool
from radixserve.engine.build import resolve_config
from radixserve.engine.llm import LLM, engine_config
from radixserve.errors import ConfigError
from radixserve.models.config import load_model_config

Tiny = Callable[[str, bool], Path]


def test_auto_becomes_something(tiny_model: Tiny) -> None:
    model = load_model_config(tiny_model("llama", True))
    config = resolve_config(engine_config(None, {"device": "cpu"}), model)
    assert config.device == "cpu"
    assert config.dtype in ("bfloat16", "float32")
    assert config.context_length == model.max_position_embeddings == 2048
    assert (config.scheduler.chunked_prefill_size, config.scheduler.max_running_requests) == (512, 64)


def test_a_small_chunk_lowers_the_default_number_of_rows(tiny_model: Tiny) -> None:
    model = load_model_config(tiny_model("llama", True))
    assert resolve_config(engine_config(None, {"chunked_prefill_size": 16}), model).scheduler.max_running_requests == 16


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"chunked_prefill_size": 8, "max_running_requests": 9}, r"--max-running-requests: expected at most --chunked-prefill-size \(8\)"),
        ({"context_length": 4096}, "--context-length: expected at most the model's 2048, got 4096"),
        ({"device": "cuda"}, "--device: expected a CUDA device"),
        ({"mem_fraction_static": 0.5}, "--mem-fraction-static is for a GPU"),
        ({"max_total_tokens": 8, "page_size": 16}, "--max-total-tokens: expected at least one page of 16 tokens, got 8"),
        ({"page_size": 0}, "--page-size: expected at least 1, got 0"),
        ({"schedule_policy": "best"}, "--schedule-policy: expected one of lpm, fcfs, dfs-weight, cost, got 'best'"),
        ({"attention_backend": "fa4"}, "--attention-backend: expected one of"),
        (
            {"attention_backend": "flashinfer", "max_total_tokens": 64},
            "--attention-backend flashinfer: expected a CUDA device, got cpu; use auto",
        ),
        ({"cuda_graph_max_bs": 8, "max_total_tokens": 64}, "--cuda-graph-max-bs: expected a CUDA device, got cpu"),
        ({"disable_cuda_graph": True}, "--disable-cuda-graph: expected a CUDA device, got cpu"),
        ({"disable_cascade_attention": True}, "--disable-cascade-attention: expected a CUDA device, got cpu"),
        ({"repeatable_attention": True}, "--repeatable-attention: expected a CUDA device, got cpu"),
        (
            {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "flashinfer"},
            "--kv-cache-dtype fp8_e4m3: expected a CUDA device, got cpu$",
        ),
        ({"cuda_graph_max_bs": 8, "disable_cuda_graph": True}, "--cuda-graph-max-bs: there are no graphs with --disable-cuda-graph"),
        ({"cuda_graph_max_bs": 8, "tp_size": 2}, "--cuda-graph-max-bs: there are no graphs with .*, and none with --tp-size above 1"),
        ({"max_total_tokens": 10**20}, "--max-total-tokens: expected at most 2147483647"),
        ({"max_running_requests": 70000}, "--max-running-requests: expected at most 65536"),
        ({"random_seed": 10**20}, "--random-seed: expected at most"),
        (
            {"random_seed": 3},
            "--random-seed: it is the seed of dummy weights, expected --load-format dummy with it, got auto; sampling takes",
        ),
        ({"dtype": "int4"}, "--dtype: expected one of"),
    ],
)
def test_contradictions_are_refused_by_name(tiny_model: Tiny, options: dict[str, object], sentence: str) -> None:
    """SCHED-15 and its kind."""
    if "device" not in options:
        options = {**options, "device": "cpu"}
    with pytest.raises(ConfigError, match=sentence):
        LLM(str(tiny_model("llama", True)), **options)


def test_a_lower_context_length_holds(tiny_model: Tiny) -> None:
    llm = LLM(str(tiny_model("llama", True)), device="cpu", dtype="float32", context_length=64, max_total_tokens=512)
    assert llm.engine.info.context_length == 64
    with pytest.raises(Exception, match="maximum context length is 64 tokens"):
        llm.generate([list(range(3, 60))])
    assert llm.generate([list(range(3, 40))])[0].num_prompt_tokens == 37


def test_a_pool_below_the_context_is_told(tiny_model: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    options = {"device": "cpu", "dtype": "float32", "context_length": 64}
    info = LLM(
        str(tiny_model("llama", True)), max_total_tokens=63, radix_eviction_policy="lfu", overlap_schedule="on", **options
    ).engine.info
    assert "the pool's 63 tokens are less than the context of 64" in caplog.text
    assert "radix_eviction_policy=lfu, overlap_schedule=on" in info.banner()
    caplog.clear()
    assert LLM(str(tiny_model("llama", True)), max_total_tokens=64, **options).engine.info.overlap_schedule == "off"
    assert "less than the context" not in caplog.text


def test_a_pool_that_memory_makes_small_is_told_too(
    tiny_model: Tiny, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU with little left beside the weights: what is refused is a pool of less than one page, no more."""
    monkeypatch.setattr(pool, "cpu_pool_bytes", lambda: 50_000)
    info = LLM(str(tiny_model("llama", True)), device="cpu", dtype="float32").engine.info
    assert 0 < info.max_total_tokens < info.context_length == 2048
    assert f"the pool's {info.max_total_tokens} tokens are less than the context of 2048" in caplog.text


def test_float16_on_a_cpu_says_why_it_is_plain_torch(tiny_model: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    info = LLM(str(tiny_model("llama", True)), device="cpu", dtype="float16", max_total_tokens=2048).engine.info
    assert (info.attention_backend, info.linear_backend) == ("torch", "torch")
    attention, linears = sorted(record.message for record in caplog.records)
    assert attention.endswith("expected float32 or bfloat16 on a CPU, got torch.float16 on cpu")
    assert linears.startswith("linears run on plain torch") and linears.endswith("got torch.float16 on cpu")


def test_an_unknown_option_is_named(tiny_model: Tiny) -> None:
    with pytest.raises(Exception, match="page_sise: expected a field"):
        LLM(str(tiny_model("llama", True)), page_sise=4)


def test_the_runner_knows_the_models_eos(tiny_model: Tiny) -> None:
    """min_tokens holds back the EOS of config.json, pushed here so that it would come at once."""
    llm = LLM(str(tiny_model("llama", True)), device="cpu", dtype="float32", max_total_tokens=512)
    eos = llm.engine.info.eos_token_ids[0]
    push = ((eos, 100.0), (9, 50.0))
    for min_tokens in (0, 3):
        sampling = SamplingParams(max_tokens=8, temperature=0.0, logit_bias=push, min_tokens=min_tokens)
        (output,) = llm.generate([[5, 6, 7]], sampling)
        assert output.token_ids == (9,) * min_tokens + (eos,)
        assert output.finish_reason == "stop"
