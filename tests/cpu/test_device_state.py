"""At start on a GPU: no memory is one sentence with numbers, and a device that failed is an error: no other kernels are tried on it."""

import logging
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from radixserve.attention import make_attention_backend, registry
from radixserve.attention.backend import AttentionBackend
from radixserve.attention.torch_backend import TorchBackend
from radixserve.engine import build
from radixserve.engine import pool as pool_of_rank
from radixserve.engine.llm import engine_config
from radixserve.errors import ConfigError, DeviceError, DeviceMemoryError
from radixserve.kv import KVPool, device_state
from radixserve.models.config import ModelConfig, parse_model_config
from radixserve.models.layers import RotaryTable
from radixserve.models.ops import TORCH_OPS, LayerOps, checked_ops

CPU = torch.device("cpu")
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 128.00 MiB.\nGPU 0 has a total capacity of 1 MiB")
SICK = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported")


class Device:
    """Plays the GPU: `error` is what it has to tell, once if it is a launch's, for ever if the context is gone."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.is_gone = False

    def fail(self, error: Exception, is_gone: bool) -> None:
        self.error, self.is_gone = error, is_gone

    def synchronize(self, device: torch.device) -> None:
        if self.error is not None:
            error, self.error = self.error, self.error if self.is_gone else None
            raise error


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(device_state, "synchronize", made.synchronize)
    monkeypatch.setattr(pool_of_rank, "synchronize", made.synchronize)
    return made


class Backend(TorchBackend):
    """Of which the warm-up launches kernels."""

    name = "triton"
    harm: Exception | None = None

    def __init__(self, pool: KVPool, num_heads: int, **options: object) -> None:
        super().__init__(pool, num_heads)
        if self.harm is not None and not self.at_warm_up:
            raise self.harm

    at_warm_up = True

    def warm_up(self) -> None:
        if self.harm is not None:
            raise self.harm


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> KVPool:
    """For which "auto" tries what it would on a GPU; FlashInfer and Triton are Backends."""
    monkeypatch.setitem(registry._ORDER, "cpu", registry._ORDER["cuda"])
    monkeypatch.setattr(registry, "why_not_flashinfer", lambda pool: "not installed")
    monkeypatch.setattr(registry, "why_not_triton", lambda pool, num_heads: None)
    monkeypatch.setattr(registry, "TritonBackend", Backend)
    return KVPool(2, 100, 4, 1, 64, torch.bfloat16)


def make(pool: KVPool, name: str = "auto") -> AttentionBackend:
    return make_attention_backend(name, pool, 1)


@pytest.mark.parametrize("name", ["auto", "triton", "flashinfer"])
@pytest.mark.parametrize("at_warm_up", [True, False], ids=["warm-up", "constructor"])
@pytest.mark.parametrize(
    "error", [OUT_OF_MEMORY, RuntimeError("Triton Error [CUDA]: out of memory"), RuntimeError("CUDA_ERROR_OUT_OF_MEMORY")]
)
def test_no_memory_for_a_backend_is_one_sentence(
    device: Device, pool: KVPool, name: str, at_warm_up: bool, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not "cannot be compiled", and nothing slower in its place, which would want more."""
    monkeypatch.setattr(Backend, "harm", error)
    monkeypatch.setattr(Backend, "at_warm_up", at_warm_up)
    if name == "flashinfer":
        monkeypatch.setattr(registry, "why_not_flashinfer", lambda pool: None)
        monkeypatch.setattr(registry, "FlashInferBackend", Backend)
    mib = {"flashinfer": 152}.get(name, 64)
    with pytest.raises(
        DeviceMemoryError, match=rf"no memory for its {mib} MiB of workspaces and its kernels: .* beside a KV pool"
    ) as caught:
        make(pool, name)
    assert "(400 tokens)" in caught.value.message and "--mem-fraction-static" in caught.value.message
    assert "\n" not in caught.value.message


def test_a_device_that_is_gone_is_an_error(device: Device, pool: KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def harm(self: Backend) -> None:
        device.fail(SICK, is_gone=True)  # by a kernel that the host has not waited for

    monkeypatch.setattr(Backend, "warm_up", harm)
    with pytest.raises(DeviceError, match=r"triton failed \(CUDA error: an illegal memory access was encountered\), and nothing"):
        make(pool)


def test_a_launch_that_was_refused_is_no_end(
    device: Device, pool: KVPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes out of the backend's own wait, and once more; then the device computes, and something slower is tried."""
    monkeypatch.setattr(Backend, "warm_up", lambda self: device.fail(RuntimeError("CUDA error: invalid configuration"), is_gone=False))
    with caplog.at_level(logging.WARNING):
        assert type(make(pool)) is TorchBackend
    assert "cannot be compiled or run here (RuntimeError: CUDA error: invalid configuration)" in caplog.text
    with pytest.raises(ConfigError, match="they need a C compiler"):
        make(pool, "triton")


@pytest.mark.parametrize("error", [AttributeError("module 'flashinfer' has no attribute 'Batch'"), TypeError("unexpected keyword")])
@pytest.mark.parametrize("at_warm_up", [True, False], ids=["warm-up", "constructor"])
def test_another_version_is_no_missing_compiler(pool: KVPool, error: Exception, at_warm_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backend, "harm", error)
    monkeypatch.setattr(Backend, "at_warm_up", at_warm_up)
    monkeypatch.setattr(registry, "why_not_flashinfer", lambda pool: None)
    monkeypatch.setattr(registry, "FlashInferBackend", Backend)
    for name in ("flashinfer", "triton"):
        with pytest.raises(
            ConfigError, match=rf"the installed package is broken, or a version .* \({type(error).__name__}: .*\); pip"
        ) as caught:
            make(pool, name)
        assert "compiler" not in caught.value.message


def test_what_failed_before_is_not_blamed_on_attention(device: Device, pool: KVPool) -> None:
    device.fail(SICK, is_gone=True)
    with pytest.raises(DeviceError, match=r"^cpu: loading the model failed: CUDA error: an illegal"):
        make(pool)


@pytest.fixture
def model() -> ModelConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    return parse_model_config({"architectures": ["LlamaForCausalLM"], "vocab_size": 50, "max_position_embeddings": 64} | sizes, {})


def check(model: ModelConfig, ops: LayerOps) -> LayerOps:
    return checked_ops(ops, model, RotaryTable(model, torch.bfloat16, CPU), torch.bfloat16, CPU)


def failing(error: Exception) -> LayerOps:
    def fail(*args: object) -> torch.Tensor:
        raise error

    return LayerOps(**{field.name: fail for field in fields(LayerOps)})


def test_operations_that_end_the_device_are_not_replaced(device: Device, model: ModelConfig, caplog: pytest.LogCaptureFixture) -> None:
    assert check(model, failing(RuntimeError("no such kernel"))) == TORCH_OPS
    assert len(caplog.records) == len(fields(LayerOps))

    def kill(*args: torch.Tensor) -> torch.Tensor:
        device.fail(SICK, is_gone=True)
        return args[0]

    with pytest.raises(DeviceError, match=r"FlashInfer's rms_norm failed \(CUDA error: an illegal"):
        check(model, LayerOps(**{field.name: kill for field in fields(LayerOps)}))
    with pytest.raises(DeviceError, match="loading the model failed"):
        check(model, TORCH_OPS)


def test_no_memory_while_the_model_is_loaded(device: Device, model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        check(model, failing(OUT_OF_MEMORY))

    def load(*args: object, **options: object) -> None:
        raise OUT_OF_MEMORY

    monkeypatch.setattr(build, "load_decoder", load)
    with pytest.raises(DeviceMemoryError, match=r"no memory for the weights of Qwen3-4B in bfloat16: .*--tp-size"):
        build.load_rank(engine_config(None, {"dtype": "bfloat16"}), model, Path("/models/Qwen3-4B"), CPU, None)


def test_no_memory_for_the_pool_and_other_errors(device: Device, model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"context_length": 64, "max_running_requests": 2}

    def allocate() -> None:
        pool_of_rank.allocate(engine_config(None, options), model, 2, torch.bfloat16, CPU)

    def out_of_memory(*args: object) -> None:
        torch.empty(1 << 50)  # torch's own words

    def broken(*args: object) -> None:
        raise RuntimeError("expected scalar type Half")

    monkeypatch.setattr(pool_of_rank, "PageTable", out_of_memory)
    with pytest.raises(DeviceMemoryError, match=r"no memory for the KV pool of .*--max-running-requests"):
        allocate()
    monkeypatch.setattr(pool_of_rank, "PageTable", broken)
    with pytest.raises(RuntimeError, match="scalar type"):
        allocate()
    device.fail(SICK, is_gone=True)
    with pytest.raises(DeviceError, match="loading the model failed"):
        allocate()


def test_a_compiler_without_memory_is_not_the_device() -> None:
    assert not device_state.is_out_of_memory(RuntimeError("Ninja build failed.\ncc1plus: out of memory allocating 65536 bytes"))
    assert not device_state.is_out_of_memory(SICK)
