"""python -m bench.serving: run workloads against any OpenAI-compatible address and print latency, throughput and the cached share.

python -m bench.serving --url http://127.0.0.1:30000 --load A,B --repeats 3 --out bench/out/results.jsonl
python -m bench.serving --workload shared-prefix --option num_groups=4 --option group_distribution=zipf --rate 2,4,8 --arrivals poisson
python -m bench.serving --workload trace --option path=trace.jsonl --option block_len=32 --arrivals recorded
python -m bench.serving --workload multi-turn-short --endpoint chat --url http://ANY-OPENAI-COMPATIBLE-SERVER
python -m bench.serving --list
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

from bench.arrivals import ARRIVALS, ClosedLoop, Mode, OpenLoop, describe_mode
from bench.client import RequestFailedError
from bench.load import Target, flush, run
from bench.protocol import CHAT_ROUTE
from bench.report import RunSummary, append_jsonl, describe, medians, spread, summarize
from bench.words import Words, find_model_dir
from bench.workloads import LOAD_NAMES, WORKLOADS, describe_workloads, make_workload, parse_option
from bench.workloads import warm_up as warm_up_workload

ENDPOINTS = ("completions", "chat")
FAILURES = (RequestFailedError, OSError, TimeoutError)


def add_load_arguments(parser: argparse.ArgumentParser, default: str) -> None:
    """The flags that choose the load."""
    parser.add_argument("--workload", "--load", default=default, help=f"comma-separated: {', '.join(WORKLOADS)} (default: %(default)s)")
    parser.add_argument(
        "--option", type=_option, action="append", default=[], metavar="NAME=VALUE", help="of the workload, see bench.serving --list"
    )
    parser.add_argument("--concurrency", type=int, help="closed loop: requests at a time (default: the workload's own)")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; each repeat and rate takes the next (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each load (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="append one JSON line per run to this file")
    parser.add_argument("--model-dir", type=Path, help="directory with the server's tokenizer.json (default: that of the default model)")


def _option(text: str) -> tuple[str, object]:
    try:
        return parse_option(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def check_load_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[str]:
    """The workloads' names; ends with a sentence on a wrong one."""
    names: list[str] = args.workload.split(",")
    for name in names:
        if name not in WORKLOADS:
            parser.error(f"--workload: expected {', '.join(WORKLOADS)}, got {name!r}")
    given = [name for name, _ in args.option]
    if twice := next((name for name in given if given.count(name) > 1), None):
        parser.error(f"--option: expected each once, got {twice} twice")
    for flag in ("repeats", "concurrency"):
        if getattr(args, flag) is not None and getattr(args, flag) < 1:
            parser.error(f"--{flag}: expected at least 1, got {getattr(args, flag)}")
    return names


def _object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value


def _rates(text: str) -> list[float]:
    try:
        rates = [float(item) for item in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise argparse.ArgumentTypeError(f"expected requests per second, comma-separated, got {text!r}")
    return rates


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.serving", description="Load generator for streaming completions and chats.")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="address of the server (default: %(default)s)")
    parser.add_argument(
        "--endpoint", choices=ENDPOINTS, default="completions", help="chat: messages, as most clients send them (default: %(default)s)"
    )
    parser.add_argument("--path", help="of the endpoint (default: /v1/completions or /v1/chat/completions)")
    parser.add_argument("--model", default="default", help="model name in the request (default: %(default)s)")
    parser.add_argument("--send", choices=["ids", "text"], help="how prompts are sent (default: ids; a chat: text)")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--extra", type=_object, default={}, help="JSON merged into each request; null drops a field")
    parser.add_argument("--label", default="run", help="name of the server in the output (default: %(default)s)")
    parser.add_argument("--rate", type=_rates, help="open loop: arrivals per second, or several, one run for each: 2,4,8")
    parser.add_argument(
        "--arrivals", choices=ARRIVALS, default="poisson", help="open loop; recorded: the trace's own (default: %(default)s)"
    )
    parser.add_argument("--flush", action="store_true", help="POST /flush_cache before each run")
    parser.add_argument("--no-warm-up", action="store_true", help="do not send two small runs first")
    parser.add_argument("--records", type=Path, help="append one JSON line per request to this file")
    parser.add_argument("--list", action="store_true", help="name the workloads and their options, and end")
    add_load_arguments(parser, default=",".join(LOAD_NAMES))
    return parser


def _target(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Target:
    is_chat = args.endpoint == "chat"
    if is_chat and args.send == "ids":
        parser.error("--send: expected text with --endpoint chat, whose messages are no token ids; got ids")
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    path = args.path or f"/v1{CHAT_ROUTE if is_chat else '/completions'}"
    target = Target(args.url, args.model, path, args.send == "text", args.extra, headers)
    if target.is_chat != is_chat:
        parser.error(f"--path: expected a route of --endpoint {args.endpoint}, got {path}")
    return target


def _modes(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Mode | None]:
    """None: a closed loop with the workload's own concurrency."""
    if args.arrivals == "recorded" or args.rate:
        if args.concurrency:
            parser.error("--concurrency: expected a closed loop, got --rate or --arrivals recorded too")
        try:
            return [OpenLoop(rate, args.arrivals, args.seed) for rate in args.rate or [None]]
        except ValueError as error:
            parser.error(f"--rate: {error}")
    return [ClosedLoop(args.concurrency) if args.concurrency else None]


async def warm_up(target: Target, words: Words) -> None:
    """Raises RequestFailedError if the server does not answer."""
    # never the same prompts twice, or a warm server would re-use them
    workload = warm_up_workload(words, time.time_ns())
    result = await run(workload, target, ClosedLoop(workload.concurrency))
    if result.errors:
        raise RequestFailedError(f"warm-up failed: {result.errors[0].error}")


async def run_load(args: argparse.Namespace, target: Target, words: Words, name: str, wished: Mode | None, first_seed: int) -> bool:
    """All repeats of one load, with their report; False if anything failed."""
    summaries: list[RunSummary] = []
    is_fine = True
    for seed in range(first_seed, first_seed + args.repeats):
        workload = make_workload(name, words, seed, **dict(args.option))
        mode = dataclasses.replace(wished, seed=seed) if isinstance(wished, OpenLoop) else wished or ClosedLoop(workload.concurrency)
        try:
            if args.flush:
                await flush(args.url)
            result = await run(workload, target, mode, records_path=args.records, label=args.label, show_progress=True)
        except FAILURES as error:
            is_fine = _tell_failure(args, name, seed, describe_mode(mode), str(error))
            continue
        if result.errors:
            # a server that cannot serve a load is a result too
            is_fine = _tell_failure(
                args, name, seed, result.mode, f"{len(result.errors)} of {len(result.records)}: {result.errors[0].error}"
            )
        if not result.served:
            continue
        summaries.append(summarize(args.label, seed, result))
        if args.out:
            append_jsonl(args.out, summaries[-1])
    if summaries:
        print(workload.description)
        print(describe(medians(summaries), len(summaries), spread([summary.wall_s for summary in summaries])), flush=True)
    return is_fine


def _tell_failure(args: argparse.Namespace, name: str, seed: int, mode: str, error: str) -> bool:
    print(f"== {args.label}  load {name}, {mode}, seed {seed}: FAILED: {error}", flush=True)
    if args.out:
        append_jsonl(args.out, {"label": args.label, "workload": name, "mode": mode, "seed": seed, "error": error[:400]})
    return False


async def _main() -> int:
    parser = _parser()
    args = parser.parse_args()
    if args.list:
        print("\n".join(describe_workloads()))
        return 0
    names, modes = check_load_arguments(parser, args), _modes(args, parser)
    words = Words(find_model_dir(args.model_dir))
    target = _target(args, parser)
    try:
        for name in names:
            make_workload(name, words, args.seed, **dict(args.option))
        if not args.no_warm_up:
            await warm_up(target, words)
            await warm_up(target, words)
        # prompts of its own for each rate: a server that is not flushed would know those of the rate before
        done = [
            await run_load(args, target, words, name, mode, args.seed + at * args.repeats)
            for name in names
            for at, mode in enumerate(modes)
        ]
    except ValueError as error:
        parser.error(str(error))
    except FAILURES as error:
        print(f"{args.url}: {error}", file=sys.stderr)
        return 1
    return 0 if all(done) else 1


if __name__ == "__main__":
    import uvloop

    try:
        sys.exit(uvloop.run(_main()))
    except KeyboardInterrupt:
        print("stopped; runs that were complete are in --out and --records", file=sys.stderr)
        sys.exit(130)
