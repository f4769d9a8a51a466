"""kvlint validate: a simulator of prefix caches by other hands, as an oracle of our hit accounting."""

import json
import re
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.servers import Server
from tests.compat.tool import SERVER_FLAGS, CompatError, Context, Tool

MAX_ERROR_PP = 0.05  # kvlint itself is content with 3; what is left is its rounding
FACTS = "The library opens at nine and closes at six, except on holidays. Members may borrow seven books for three weeks at a time. "


def write_log(path: Path) -> int:
    """Shared system prompts, growing conversations, and prompts that share nothing; no two are the same. The number of requests."""
    requests = []
    for group in range(3):
        system = {"role": "system", "content": f"You are assistant number {group} of the town library. " + FACTS * (2 + group)}
        for question in range(5):
            turns = [system, {"role": "user", "content": f"Question {question}: may I borrow {question + 2} books?"}]
            requests.append({"messages": turns})
            answer = {"role": "assistant", "content": "Yes, with a member's card."}
            requests.append({"messages": [*turns, answer, {"role": "user", "content": f"And on holidays, case {question}?"}]})
    requests += [{"messages": [{"role": "user", "content": f"{word}: a word alone. " * 6}]} for word in ("Amber", "Birch", "Cedar")]
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return len(requests)


def counters(url: str) -> tuple[float, float]:
    """Prompt tokens asked for and found in the cache, by the vLLM names."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    samples = {sample.name: sample.value for family in families for sample in family.samples}
    return samples["vllm:prefix_cache_queries_total"], samples["vllm:prefix_cache_hits_total"]


async def compare(context: Context, engine: str, page_size: int) -> str:
    log = context.work_dir / "requests.jsonl"
    num_requests = write_log(log)
    # kvlint calls the model what it calls the tokenizer's folder, and its gauge must have seen no other traffic: a server of its own
    async with Server(f"kvlint-{engine}", [*SERVER_FLAGS, "--accept-any-model", "--page-size", str(page_size)]) as server:
        before = counters(server.url)
        argv = [context.program("kvlint"), "validate", str(log), "--model", str(context.model_dir), "--engine", engine]
        argv += ["--server", context.record_url(server.url), "--block-size", str(page_size)]
        output = await context.call(argv, {"COLUMNS": "200", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"})
        queries, hits = (after - earlier for after, earlier in zip(counters(server.url), before, strict=True))
    return judge(engine, num_requests, output, 100 * hits / queries)


def judge(engine: str, num_requests: int, output: str, counted: float) -> str:
    """Raises CompatError unless the simulation, the server's figure as kvlint read it, our counters and the token counts agree."""
    found = re.search(r"kvlint simulation\D+([\d.]+)%.*?server\D+([\d.]+)%.*?Absolute error: ([\d.]+) pp", output, re.DOTALL)
    if found is None:
        raise CompatError(f"kvlint printed no comparison:\n{output}")
    simulated, read, error = (float(figure) for figure in found.groups())
    if f"match the server for all {num_requests} requests" not in output or "failed" in output:
        raise CompatError(f"kvlint met other token counts or failed requests:\n{output}")
    # the rates are printed with one decimal
    if error > MAX_ERROR_PP or abs(simulated - counted) > MAX_ERROR_PP + 0.05:
        raise CompatError(f"{engine}: simulated {simulated}%, read {read}%, our counters {counted:.2f}%, error {error} pp\n{output}")
    return f"{engine}: {num_requests} requests, simulated {simulated}%, counted {counted:.2f}%, error {error} pp"


async def run(context: Context) -> str:
    return "; ".join([await compare(context, "sglang", 1), await compare(context, "vllm", 16)])


TOOL = Tool(
    name="kvlint",
    packages=("kvlint[live]==0.1.1", "transformers"),
    shown=("kvlint",),
    command="kvlint validate LOG --model MODEL_DIR --server URL --engine sglang|vllm",
    run=run,
)
