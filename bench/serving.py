"""python -m bench.serving: run loads against any OpenAI-compatible address and print latency, throughput and the cached share.

python -m bench.serving --url http://127.0.0.1:30000 --load A,B --repeats 3 --out bench/out/results.jsonl
python -m bench.serving --load shared-prefix --num-groups 4 --prompts-per-group 16 --system-prompt-len 2048
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

from bench.client import RequestFailedError
from bench.load import Target, flush, run_workload
from bench.report import append_jsonl, describe, medians, spread
from bench.words import Words, find_model_dir
from bench.workloads import LOAD_NAMES, SharedPrefix, Workload, make_load, shared_prefix, warm_up

SHARED_PREFIX = "shared-prefix"


def add_load_arguments(parser: argparse.ArgumentParser, default_load: str) -> None:
    """The flags that choose the load; shared with bench.compare."""
    defaults = SharedPrefix()
    parser.add_argument(
        "--load", default=default_load, help=f"comma-separated: {', '.join(LOAD_NAMES)} or {SHARED_PREFIX} (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the first repeat; each repeat takes the next (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each load (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="append one JSON line per run to this file")
    parser.add_argument("--model-dir", type=Path, help="directory with the server's tokenizer.json (default: that of the default model)")
    shape = parser.add_argument_group(f"--load {SHARED_PREFIX}")
    shape.add_argument("--num-groups", type=int, default=defaults.num_groups)
    shape.add_argument("--prompts-per-group", type=int, default=defaults.prompts_per_group)
    shape.add_argument("--system-prompt-len", type=int, default=defaults.system_prompt_len, help="shared tokens of a group")
    shape.add_argument("--question-len", type=int, default=defaults.question_len, help="own tokens of a prompt")
    shape.add_argument("--output-len", type=int, default=defaults.output_len)
    shape.add_argument("--concurrency", type=int, default=defaults.concurrency)


def load_from_arguments(args: argparse.Namespace, name: str, words: Words, seed: int) -> Workload:
    if name != SHARED_PREFIX:
        return make_load(name, words.ids, seed)
    shape = SharedPrefix(
        args.num_groups, args.prompts_per_group, args.system_prompt_len, args.question_len, args.output_len, args.concurrency
    )
    return shared_prefix(words.ids, seed, shape)


def check_load_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[str]:
    """The load names; ends with a sentence on a wrong one."""
    names: list[str] = args.load.split(",")
    for name in names:
        if name != SHARED_PREFIX and name not in LOAD_NAMES:
            parser.error(f"--load: expected {', '.join(LOAD_NAMES)} or {SHARED_PREFIX}, got {name!r}")
    if args.repeats < 1:
        parser.error(f"--repeats: expected at least 1, got {args.repeats}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.serving", description="Closed-loop load generator for streaming /v1/completions."
    )
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="address of the server (default: %(default)s)")
    parser.add_argument("--path", default="/v1/completions", help="(default: %(default)s)")
    parser.add_argument("--model", default="default", help="model name in the request (default: %(default)s)")
    parser.add_argument(
        "--send", choices=["ids", "text"], default="ids", help="how prompts are sent; load D is text always (default: %(default)s)"
    )
    parser.add_argument("--extra", type=json.loads, default={}, help="JSON merged into each request; null drops a field")
    parser.add_argument("--label", default="run", help="name of the server in the output (default: %(default)s)")
    parser.add_argument("--flush", action="store_true", help="POST /flush_cache before each run")
    parser.add_argument("--no-warm-up", action="store_true", help="do not send two small runs first")
    add_load_arguments(parser, default_load=",".join(LOAD_NAMES))
    return parser


async def run_load(args: argparse.Namespace, target: Target, words: Words, name: str) -> bool:
    """All repeats of one load, with their report; False if every run failed."""
    results = []
    for seed in range(args.seed, args.seed + args.repeats):
        try:
            if args.flush:
                await flush(args.url)
            result = await run_workload(target, words, load_from_arguments(args, name, words, seed), label=args.label, seed=seed)
        except (RequestFailedError, OSError, TimeoutError) as error:
            # a server that cannot serve a load is a result too
            print(f"== {args.label}  load {name} seed {seed}: FAILED: {error}", flush=True)
            if args.out:
                append_jsonl(args.out, {"label": args.label, "workload": name, "seed": seed, "error": str(error)[:400]})
            continue
        results.append(result)
        if args.out:
            append_jsonl(args.out, result)
    if results:
        print(describe(medians(results), len(results), spread([result.wall_s for result in results])), flush=True)
    return bool(results)


async def _main() -> int:
    parser = _parser()
    args = parser.parse_args()
    names = check_load_arguments(parser, args)
    words = Words(find_model_dir(args.model_dir))
    target = Target(args.url, args.model, args.path, args.send == "text", args.extra)
    try:
        if not args.no_warm_up:
            for _ in range(2):
                # never the same prompts twice, or a warm server would re-use them
                await run_workload(target, words, warm_up(words.ids, time.time_ns()), label=args.label, seed=0)
    except (RequestFailedError, OSError, TimeoutError) as error:
        print(f"warm-up against {args.url} failed: {error}", file=sys.stderr)
        return 1
    succeeded = [await run_load(args, target, words, name) for name in names]
    return 0 if all(succeeded) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(_main()))
