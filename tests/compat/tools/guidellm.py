"""guidellm with synthetic prompts that share prefixes, over chats and over completions."""

import json
from typing import Any

from tests.compat.tool import CompatError, Context, Tool

NUM_REQUESTS = 8
PROMPT_TOKENS, PREFIX_TOKENS, OUTPUT_TOKENS = 24, 96, 8


async def bench(context: Context, route: str) -> dict[str, Any]:
    out = context.work_dir / f"{route.replace('/', '-')}.json"
    data = f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS},prefix_tokens={PREFIX_TOKENS},prefix_count=2"
    argv = [context.program("guidellm"), "run", "--disable-console"]
    argv += ["--backend", f"kind=openai_http,target={context.url},model={context.model_name},request_format=/v1/{route}"]
    argv += ["--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}", "--data", data]
    argv += ["--tokenizer", f"kind=hf_auto,model={context.model_dir}", "--output", f"kind=json,path={out}"]
    output = await context.call(argv, {"HF_HUB_OFFLINE": "1", "HF_HOME": str(context.work_dir / "hf")}, timeout_s=300)
    if not out.is_file():
        raise CompatError(f"{route}: no result was written:\n{output[-2000:]}")
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def judge(route: str, result: dict[str, Any]) -> str:
    """Raises CompatError unless it counts every request as successful, with the output tokens it asked for."""
    requests = result["benchmarks"][0]["requests"]
    counts = {name: len(requests[name]) for name in ("successful", "errored", "incomplete")}
    outputs = {request["output_metrics"]["text_tokens"] for request in requests["successful"]}
    if counts["successful"] < NUM_REQUESTS or counts["errored"] or outputs != {OUTPUT_TOKENS}:
        raise CompatError(f"{route}: {counts}, output tokens {outputs} instead of {OUTPUT_TOKENS}")
    return f"{route}: {counts['successful']} requests of {OUTPUT_TOKENS} tokens, none failed"


async def run(context: Context) -> str:
    return "; ".join([judge(route, await bench(context, route)) for route in ("chat/completions", "completions")])


TOOL = Tool(
    name="guidellm",
    packages=("guidellm", "torch==2.13.0"),
    shown=("guidellm",),
    command="guidellm run --backend kind=openai_http,target=URL --data kind=synthetic_text,prefix_tokens=96,prefix_count=2,...",
    run=run,
)
