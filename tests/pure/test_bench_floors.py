"""Floors of the loads, against sums worked out by hand for a model of round numbers."""

import json
from pathlib import Path

import pytest

from bench.floors import Floor
from bench.workloads.basic import MultiTurn, Random, SharedPrefix

FLOOR = Floor(layer_params=100, head_params=50, attention_width=3, kv_bytes=7, bandwidth=10.0, rate=20.0)


def test_a_models_sizes(tmp_path: Path) -> None:
    config = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 10,
        "vocab_size": 5,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    # a layer: q and o 8 x 8 each, k and v 8 x 4 each, three of 8 x 10
    assert Floor.of(tmp_path, 1.0, 1.0) == Floor(2 * (64 + 64 + 32 + 32 + 240), 40, 4 * 2 * 2, 2 * 4 * 2 * 2, 1.0, 1.0)


def test_prefill_and_decode() -> None:
    assert FLOOR.prefill_s(4) == (2 * 4 * 100 + 4 * 3 * 8) / 20
    assert FLOOR.prefill_s(4, 10) == (2 * 4 * 100 + 4 * 3 * 48) / 20
    assert FLOOR.decode_s(3, 1, 10) == 3 * (150 * 2 + 10 * 7) / 10
    assert FLOOR.decode_s(3, 2, 30, 5) == 3 * (150 * 2 + (5 + 2 * 30) * 7) / 10
    assert FLOOR.decode_s(3, 20, 1) == 3 * 20 * (2 * 150 + 4 * 3 * 1) / 20, "many rows: arithmetic, not memory"


def test_loads() -> None:
    random = Random(num_prompts=6, input_len=4, output_len=2, concurrency=3)
    assert FLOOR.load_s(random) == pytest.approx(6 * FLOOR.prefill_s(4) + FLOOR.decode_s(4, 3, 5))
    shared = SharedPrefix(num_groups=2, prompts_per_group=3, system_prompt_len=10, question_len=4, output_len=2, concurrency=8)
    assert FLOOR.load_s(shared) == pytest.approx(2 * FLOOR.prefill_s(10) + 6 * FLOOR.prefill_s(4, 10) + FLOOR.decode_s(4, 3, 5, 10))
    chats = MultiTurn(4, 2, 10, 10, 3, 3, 2, 2, concurrency=4)
    first = 4 * FLOOR.prefill_s(10) + FLOOR.decode_s(2, 4, 11)
    assert FLOOR.load_s(chats) == pytest.approx(first + 4 * FLOOR.prefill_s(3, 12) + FLOOR.decode_s(2, 4, 16))
