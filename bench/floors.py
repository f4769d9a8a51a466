"""python -m bench.floors --bandwidth 28.5 --rate 415: the least time that loads A to F can take on a machine of these limits.

Counted: the products and the attention of each prompt token that no earlier prompt had, at `rate`; for each decode step the larger of its
bytes (the weights once, every running row's own KV, a shared prefix once) at `bandwidth` and its rows' products and attention at `rate`.
Nothing else, and no two steps overlapped. The first line of bench.kernels shows both limits; `rate` is its GFLOP/s, the processor's own,
and not what F.linear reaches.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from bench.words import find_model_dir
from bench.workloads.basic import LOADS, MultiTurn, Random, SharedPrefix

BYTES = 2  # of a bfloat16


@dataclass(frozen=True, slots=True)
class Floor:
    """Of one model on one machine. `rate` in FLOP/s, `bandwidth` in bytes/s."""

    layer_params: int  # of all layers, without embedding and head
    head_params: int
    attention_width: int  # query heads x head_dim x layers
    kv_bytes: int  # of one token
    bandwidth: float
    rate: float

    @classmethod
    def of(cls, model_dir: Path, bandwidth: float, rate: float) -> "Floor":
        """From config.json of a Llama-like model. Raises FileNotFoundError, KeyError."""
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        width, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or width // heads
        kv_width = config["num_key_value_heads"] * head_dim
        layer = 2 * width * heads * head_dim + 2 * width * kv_width + 3 * width * config["intermediate_size"]
        return cls(layer * layers, config["vocab_size"] * width, heads * head_dim * layers, 2 * kv_width * layers * BYTES, bandwidth, rate)

    def prefill_s(self, num_new: int, num_cached: int = 0) -> float:
        """`num_new` tokens behind `num_cached`: two FLOPs a weight and token, four a query, key and width."""
        keys = num_new * (num_cached + num_new / 2)
        return (2.0 * num_new * self.layer_params + 4.0 * self.attention_width * keys) / self.rate

    def decode_s(self, num_steps: float, rows: int, num_own: float, num_shared: float = 0) -> float:
        """`num_steps` of `rows`, each behind `num_own` tokens of its own and `num_shared` that are read once for all."""
        params = self.layer_params + self.head_params
        num_bytes = params * BYTES + (num_shared + rows * num_own) * self.kv_bytes
        arithmetic = rows * (2.0 * params + 4.0 * self.attention_width * (num_shared + num_own))
        return num_steps * max(num_bytes / self.bandwidth, arithmetic / self.rate)

    def load_s(self, load: Random | SharedPrefix | MultiTurn) -> float:
        if isinstance(load, Random):
            return self._random_s(load)
        if isinstance(load, SharedPrefix):
            return self._shared_prefix_s(load)
        return self._multi_turn_s(load)

    def _random_s(self, load: Random) -> float:
        rows = min(load.concurrency, load.num_prompts)
        steps = load.num_prompts * load.output_len / rows
        return load.num_prompts * self.prefill_s(load.input_len) + self.decode_s(steps, rows, load.input_len + load.output_len / 2)

    def _shared_prefix_s(self, load: SharedPrefix) -> float:
        shared, num_prompts = load.system_prompt_len, load.num_groups * load.prompts_per_group
        prefill = load.num_groups * self.prefill_s(shared) + num_prompts * self.prefill_s(load.question_len, shared)
        rows = min(load.concurrency, load.prompts_per_group)
        own = load.question_len + load.output_len / 2
        return prefill + self.decode_s(num_prompts * load.output_len / rows, rows, own, shared)

    def _multi_turn_s(self, load: MultiTurn) -> float:
        seconds, cached, rows = 0.0, 0, min(load.concurrency, load.num_chats)
        for turn in range(load.num_turns):
            new = load.max_turn_len if turn else load.max_first_len
            seconds += load.num_chats * self.prefill_s(new, cached)
            cached += new
            seconds += self.decode_s(load.num_chats * load.max_output_len / rows, rows, cached + load.max_output_len / 2)
            cached += load.max_output_len
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.floors", description="The least time of loads A to F.")
    parser.add_argument("--bandwidth", type=float, required=True, help="of memory, GB/s")
    parser.add_argument("--rate", type=float, required=True, help="of products whose operands are in registers, GFLOP/s")
    parser.add_argument("--model-dir", type=Path, help="with config.json (default: the default model)")
    args = parser.parse_args()
    floor = Floor.of(find_model_dir(args.model_dir), args.bandwidth * 1e9, args.rate * 1e9)
    for name, load in LOADS.items():
        print(f"{name}  {floor.load_s(load):6.2f} s")


if __name__ == "__main__":
    main()
