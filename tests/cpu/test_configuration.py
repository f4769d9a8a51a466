"""Configs and sizes that cannot be: refused when they are made, with what was expected, what came, and how much there is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixserve import LLM
from radixserve.config import CacheConfig, EngineConfig, SchedulerConfig, ServerConfig
from radixserve.engine import memory, pool
from radixserve.errors import ConfigError

WRONG: list[tuple[type[Any], str, Any, str]] = [
    (CacheConfig, "page_size", "16", "an integer"),
    (CacheConfig, "page_size", 1.5, "an integer"),
    (CacheConfig, "page_size", True, "an integer"),
    (CacheConfig, "page_size", None, "an integer"),
    (CacheConfig, "disable_radix_cache", "no", "True or False"),
    (CacheConfig, "disable_radix_cache", 1, "True or False"),
    (CacheConfig, "max_total_tokens", 1e6, "an integer or None"),
    (CacheConfig, "mem_fraction_static", "0.5", "a number or None"),
    (CacheConfig, "mem_fraction_static", True, "a number or None"),
    (SchedulerConfig, "schedule_policy", ["lpm"], "a string"),
    (SchedulerConfig, "max_running_requests", 2.0, "an integer or None"),
    (EngineConfig, "model_path", Path("m"), "a string or None"),
    (EngineConfig, "dtype", None, "a string"),
    (EngineConfig, "cache", {"page_size": 1}, "CacheConfig"),
    (EngineConfig, "scheduler", None, "SchedulerConfig"),
    (ServerConfig, "port", "80", "an integer"),
    (ServerConfig, "drain_timeout_s", "30", "a number"),
    (ServerConfig, "host", None, "a string"),
]


@pytest.mark.parametrize(("config", "name", "value", "expected"), WRONG)
def test_a_field_of_the_wrong_type_is_refused(config: type[Any], name: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config(**{name: value})
    assert refused.value.message.startswith(f"--{name.replace('_', '-')}: expected {expected}, got ")


def test_an_integer_will_do_for_a_number_and_defaults_are_right() -> None:
    assert ServerConfig(drain_timeout_s=5).drain_timeout_s == 5
    for config in (CacheConfig, SchedulerConfig, EngineConfig, ServerConfig):
        assert config() == config()


@pytest.mark.parametrize(("name", "value"), [("page_size", "16"), ("disable_radix_cache", "no"), ("max_total_tokens", 10.0)])
def test_llm_options_are_checked_too(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="expected"):
        LLM("/no-such-model", **{name: value})


def test_a_pool_larger_than_the_memory_is_refused_with_numbers(tiny_model: Callable[[str, bool], Path]) -> None:
    model_dir = str(tiny_model("llama", True))
    # 3 layers, 2 heads of 8, K and V, float32
    with pytest.raises(ConfigError, match=r"--max-total-tokens: 2147483647 tokens at 384 bytes each are 786432 MiB, and \d+ MiB are free"):
        LLM(model_dir, dtype="float32", device="cpu", max_total_tokens=2**31 - 1)


def test_memory_that_is_not_given_is_a_config_error(tiny_model: Callable[[str, bool], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where more is reported free than can be had: torch's own error says nothing of a flag."""
    model_dir = str(tiny_model("llama", True))
    monkeypatch.setattr(pool, "free_bytes", lambda device: 10**18)
    with pytest.raises(ConfigError, match=r"KV pool of 2147483647 tokens \(786432 MiB\).*are free on cpu; lower --max-total-tokens"):
        LLM(model_dir, dtype="float32", device="cpu", max_total_tokens=2**31 - 1)

    def no_memory(*args: object) -> None:
        raise MemoryError

    monkeypatch.setattr(pool, "PageTable", no_memory)
    with pytest.raises(ConfigError, match=r"page table of 500 rows"):
        LLM(model_dir, dtype="float32", device="cpu", max_total_tokens=64, max_running_requests=500)


VERSION_2 = {"memory.max": "5000000\n", "memory.current": "4900000\n", "memory.stat": "anon 1000\ninactive_file 3000000\nactive_file 5\n"}
VERSION_1 = {
    "memory/memory.limit_in_bytes": "5000000\n",
    "memory/memory.usage_in_bytes": "4900000\n",
    "memory/memory.stat": "inactive_file 7\ntotal_inactive_file 3000000\n",
}
NO_LIMIT = {"memory.max": "max\n"}, {"memory/memory.limit_in_bytes": f"{2**63 - 4096}\n"}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        (VERSION_2, 3_100_000),  # files that a container read do not count as used
        (VERSION_1, 3_100_000),
        (VERSION_1 | {"memory/memory.usage_in_bytes": "9000000\n"}, 0),
        (VERSION_2 | NO_LIMIT[0], 10**9),
        (VERSION_1 | NO_LIMIT[1], 10**9),
        ({}, 10**9),
    ],
)
def test_memory_within_a_containers_limit(files: dict[str, str], free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_available_by_kernel", lambda: 10**9)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory.free_host_bytes(tmp_path) == free
