"""What the HTTP side adds to each token: many paced streams from an engine that computes nothing, every token checked.

`python -m bench.http`: 200 streams x 10 tokens/s for a minute. Goal: from the engine message's arrival to the socket write, p99 under 5 ms.
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.client import Completion, stream_completion
from bench.hardware import describe_hardware
from bench.words import Words, find_model_dir

GOAL_P99_MS = 5.0


@dataclass(slots=True)
class ServerProcess:
    url: str
    figures: dict[str, Any] = field(default_factory=dict)  # once it has ended


@asynccontextmanager
async def server(model_dir: Path, rate: float, phases: int) -> AsyncIterator[ServerProcess]:
    command = (sys.executable, "-m", "bench.http_server", str(model_dir), str(rate), str(phases))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    try:
        running = ServerProcess((await process.stdout.readline()).decode().strip())
        if not running.url:
            raise RuntimeError(f"the server ended with {await process.wait()} before it was ready")
        yield running
        process.send_signal(signal.SIGTERM)
        running.figures = json.loads(await process.stdout.readline())
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def run_stream(url: str, words: Words, prompt: list[int], num_tokens: int) -> tuple[Completion, bool]:
    """The completion, and whether its text has every token of the prompt's repetition once and in order."""
    body = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    completion = await stream_completion(url, body)
    expected = words.text([prompt[i % len(prompt)] for i in range(num_tokens)])
    return completion, completion.text == expected and completion.num_output_tokens == num_tokens


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    model_dir = find_model_dir(args.model_path)
    words = Words(model_dir)
    draw = random.Random(0)
    num_tokens = round(args.rate * args.duration_s)
    # longer than the output: a token that was lost or doubled cannot hide in a repetition
    prompts = [[draw.choice(words.ids) for _ in range(num_tokens + 1)] for _ in range(args.streams)]
    async with server(model_dir, args.rate, args.phases) as running:
        cpu_at, wall_at = time.process_time(), time.monotonic()
        results = await asyncio.gather(*(run_stream(running.url, words, prompt, num_tokens) for prompt in prompts))
        client_cpu = (time.process_time() - cpu_at) / (time.monotonic() - wall_at)
    gaps = sorted(gap for completion, _ in results for gap in completion.gaps)
    figures = running.figures
    return {
        "hardware": describe_hardware(),
        "load": f"{args.streams} streams x {args.rate:g} tokens/s for {args.duration_s:g} s, {args.phases} step(s) per period",
        "tokens": figures["num_tokens"],
        "tokens_expected": args.streams * num_tokens,
        "streams_with_a_lost_or_doubled_token": sum(not is_right for _, is_right in results),
        "arrival_to_write": figures["arrival_to_write"],
        "engine_sending_to_write": figures["sending_to_write"],
        "client_gap_ms": {f"p{q}": 1000 * gaps[min(len(gaps) - 1, int(len(gaps) * q / 100))] for q in (50, 99, 100)},
        "server_cpu_cores": figures["cpu_s"] / figures["wall_s"],
        "client_cpu_cores": client_cpu,
        "is_goal_met": figures["arrival_to_write"]["p99_ms"] < GOAL_P99_MS,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every token came once; a missed goal for the time is reported, not an error: machines differ."""
    parser = argparse.ArgumentParser("python -m bench.http", description=(__doc__ or "").strip())
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--rate", type=float, default=10.0, help="tokens/s of each stream")
    parser.add_argument("--duration-s", type=float, default=60.0)
    parser.add_argument(
        "--phases", type=int, default=1, help="spread the streams over so many steps per period; 1: all tokens in one message"
    )
    parser.add_argument("--model-path", type=Path, default=None, help="directory with the tokenizer to use (default: the default model's)")
    figures = asyncio.run(measure(parser.parse_args(arguments)))
    print(json.dumps(figures, indent=2))
    is_whole = figures["tokens"] == figures["tokens_expected"] and not figures["streams_with_a_lost_or_doubled_token"]
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
