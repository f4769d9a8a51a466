"""FlashInfer's norms, rotary and activation as the decoder calls them: real functions, float64 torch in place of their compiled modules.
One that is wrong or missing is replaced; a decoder with them says what one with torch's says.
"""

import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from radixserve.models import Decoder
from radixserve.models.config import ModelConfig, load_model_config
from radixserve.models.layers import RotaryTable
from radixserve.models.ops import TORCH_OPS, LayerOps, checked_ops, choose_ops
from radixserve.models.weights import load_decoder
from tests.support.dense_attention import DenseAttention, single_sequence_batch
from tests.support.flashinfer_ops import install_ops
from tests.support.tiny_models import make_tiny_model

flashinfer = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed (make install does it)")
CPU, BF16 = torch.device("cpu"), torch.bfloat16


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> LayerOps:
    return install_ops(monkeypatch)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """q and k are normalised in it."""
    return make_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", True)


def check(ops: LayerOps, config: ModelConfig) -> LayerOps:
    return checked_ops(ops, config, RotaryTable(config, BF16, CPU), BF16, CPU)


def test_all_are_right(ops: LayerOps, qwen3: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert check(ops, load_model_config(qwen3)) == ops
    assert not caplog.records


@pytest.mark.parametrize("name", [name for name in LayerOps.__slots__ if name != "rotation"])
def test_a_wrong_one_is_replaced(ops: LayerOps, qwen3: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    from dataclasses import replace

    right = getattr(ops, name)
    wrong = replace(ops, **{name: lambda *args: right(*args) * 1.1})
    with caplog.at_level(logging.WARNING):
        made = check(wrong, load_model_config(qwen3))
    assert made == replace(ops, **{name: getattr(TORCH_OPS, name)})
    assert [record.getMessage().partition(" ")[0] for record in caplog.records] == [name]


def test_one_that_cannot_be_compiled_is_replaced(ops: LayerOps, qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import flashinfer.rope

    def fail() -> Any:
        raise RuntimeError("nvcc: not found\nand much more")

    monkeypatch.setattr(flashinfer.rope, "get_rope_module", fail)
    made = check(ops, load_model_config(qwen3))
    assert made.rotation is TORCH_OPS.rotation and made.silu_and_mul is ops.silu_and_mul


def test_a_cpu_has_torchs(qwen3: Path) -> None:
    config = load_model_config(qwen3)
    assert choose_ops(config, RotaryTable(config, BF16, CPU), BF16, CPU) is TORCH_OPS


def test_a_decoder_says_the_same(ops: LayerOps, qwen3: Path) -> None:
    config = load_model_config(qwen3)
    decoder = load_decoder(config, qwen3, dtype=BF16, device=CPU, linear_backend="torch")
    assert isinstance(decoder, Decoder)
    ids = list(range(5, 60))
    with torch.inference_mode():
        plain = decoder.forward(single_sequence_batch(ids), DenseAttention())
        decoder._ops = ops
        fused = decoder.forward(single_sequence_batch(ids), DenseAttention())
    difference = (fused.float() - plain.float()).abs()
    assert difference.mean() < 2e-2 < plain.float().abs().mean()


def test_calls_bind_to_the_installed_package() -> None:
    x = object()
    inspect.signature(flashinfer.rmsnorm).bind(x, x, 1e-6, out=x)
    inspect.signature(flashinfer.fused_add_rmsnorm).bind(x, x, x, 1e-6)
    inspect.signature(flashinfer.silu_and_mul).bind(x)
    inspect.signature(flashinfer.apply_rope_with_cos_sin_cache_inplace).bind(x, x, x, 64, x)
