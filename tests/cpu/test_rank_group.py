"""A model in parts: every rank reads its slices alone, and the ranks together compute what the whole computes. Ranks are threads here."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from radixserve.errors import ConfigError
from radixserve.models import Decoder, ModelConfig, load_decoder, load_model_config, weights
from radixserve.models.config import parse_model_config
from radixserve.models.rank_group import RankGroup, RankLostError
from radixserve.models.sharding import shard_config
from tests.support.dense_attention import DenseAttention, single_sequence_batch
from tests.support.tiny_decoder import TINY_LLAMA

CPU = torch.device("cpu")
IDS = [5, 17, 96, 4, 48, 49, 0]


def load(config: ModelConfig, directory: Path, group: RankGroup | None = None, load_format: str = "auto") -> Decoder:
    decoder = load_decoder(
        config, directory, dtype=torch.float32, device=CPU, load_format=load_format, seed=3, linear_backend="torch", group=group
    )
    assert isinstance(decoder, Decoder)
    return decoder


@torch.inference_mode()
def logits_of(decoder: Decoder) -> torch.Tensor:
    """A prompt, then one token."""
    attention, rows = DenseAttention(), []
    for ids, start in ((IDS[:-1], 0), (IDS[-1:], len(IDS) - 1)):
        rows.append(decoder.compute_logits(decoder.forward(single_sequence_batch(ids, start), attention)))
    return torch.cat(rows)


def logits_of_ranks(config: ModelConfig, directory: Path, size: int, meeting: Path, load_format: str = "auto") -> torch.Tensor:
    def of_rank(rank: int) -> torch.Tensor:
        group = RankGroup(rank, size, CPU)
        decoder = load(config, directory, group, load_format)
        group.connect(meeting)
        return logits_of(decoder)

    with ThreadPoolExecutor(size) as pool:
        first, *others = pool.map(of_rank, range(size))
    assert all(other.shape[1] < config.vocab_size for other in others)  # the whole logits exist once
    return first


@pytest.mark.parametrize(("family", "tie"), [("llama", True), ("qwen2", False), ("qwen3", False)])
def test_ranks_together_compute_what_the_whole_does(
    tiny_model: Callable[[str, bool], Path], tmp_path: Path, family: str, tie: bool
) -> None:
    """Tied and untied heads, biases, norms of q and k."""
    directory = tiny_model(family, tie)
    config = load_model_config(directory)
    torch.testing.assert_close(logits_of_ranks(config, directory, 2, tmp_path), logits_of(load(config, directory)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [2, 4])
def test_a_vocabulary_that_does_not_divide_is_padded(tmp_path: Path, size: int) -> None:
    """97 tokens; and random weights are of one model, whatever the number of ranks."""
    config = parse_model_config(TINY_LLAMA | {"num_key_value_heads": 4}, {})
    whole = logits_of(load(config, tmp_path, load_format="dummy"))
    parts = logits_of_ranks(config, tmp_path, size, tmp_path, load_format="dummy")
    assert parts.shape == whole.shape == (len(IDS), 97)
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-4)


def test_a_rank_reads_its_slices_alone(tiny_model: Callable[[str, bool], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny_model("qwen2", False)
    config = load_model_config(directory)
    num_read = 0

    class Counting:
        def __init__(self, stored: Any) -> None:
            self._stored = stored
            self.get_shape = stored.get_shape

        def __getitem__(self, part: tuple[slice, ...]) -> torch.Tensor:
            nonlocal num_read
            read: torch.Tensor = self._stored[part]
            num_read += read.numel()
            return read

    stream = weights._stream

    def counting_stream(paths: list[Path]) -> Iterator[tuple[str, Counting]]:
        return ((name, Counting(stored)) for name, stored in stream(paths))

    monkeypatch.setattr(weights, "_stream", counting_stream)
    whole = load(config, directory)
    num_whole, num_read = num_read, 0
    parts = [load(config, directory, RankGroup(rank, 2, CPU)) for rank in range(2)]
    num_norm = (2 * config.num_layers + 1) * config.hidden_size  # whole on each rank
    assert num_read == num_whole + num_norm
    assert sum(part.size_bytes for part in parts) == whole.size_bytes + num_norm * 4


def test_sizes_that_do_not_divide_are_named() -> None:
    config = parse_model_config(TINY_LLAMA, {})
    with pytest.raises(ConfigError, match="--tp-size: expected a divisor of the model's num_key_value_heads, which is 2, got 3"):
        shard_config(config, 3)
    odd = replace(config, intermediate_size=49)
    with pytest.raises(ConfigError, match="--tp-size: expected a divisor of the model's intermediate_size, which is 49, got 2"):
        shard_config(odd, 2)


def test_ranks_meet_on_loopback_only_and_a_lost_one_is_noticed(tmp_path: Path) -> None:
    groups = [RankGroup(rank, 2, CPU) for rank in range(2)]
    before = listening()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda group: group.connect(tmp_path), groups))
    assert {address for address, _ in listening() - before} == {"127.0.0.1"}
    del groups[1]  # as when its process ends
    with pytest.raises(RankLostError):
        groups[0].sum(torch.ones(3))


@pytest.mark.parametrize("given", [None, "eth0"])
def test_nccl_meets_on_loopback_and_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    """NCCL reads the variable at the first collective; rank 0 is in the user's own process."""
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    if given:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", given)
    seen: list[str | None] = []

    class Group:
        def allreduce(self, tensors: list[torch.Tensor]) -> "Group":
            seen.append(os.environ.get("NCCL_SOCKET_IFNAME"))
            return self

        def wait(self) -> None: ...

    monkeypatch.setattr(RankGroup, "_nccl", lambda self, store: Group())
    monkeypatch.setattr(torch, "zeros", lambda *size, device: torch.ones(*size))
    RankGroup(0, 1, torch.device("cuda", 0)).connect(tmp_path)
    assert seen == [given or "lo"]
    assert os.environ.get("NCCL_SOCKET_IFNAME") == given


def listening() -> set[tuple[str, int]]:
    return {tuple(one.laddr) for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN}
