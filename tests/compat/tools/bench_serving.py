"""SGLang's own load generator with its generated-shared-prefix, over native and OpenAI protocol; without the gigabytes of its engine."""

import json
import subprocess
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.compat.tool import CompatError, Context, Tool

VERSION = "0.5.23"
BACKENDS = ("sglang", "sglang-oai", "sglang-oai-chat")
NUM_GROUPS = 3
NUM_PER_GROUP = 4
OUTPUT_LEN = 8
SYSTEM_PROMPT_LEN = 160
# what the load generator takes from the engine's packages, which would bring the kernels along
SHIMS = {
    "__init__.py": "",
    "srt/__init__.py": "",
    "srt/disaggregation/__init__.py": "",
    "srt/disaggregation/utils.py": 'FAKE_BOOTSTRAP_HOST = "2.2.2.2"\n',
    "srt/utils/__init__.py": "",
    "srt/utils/network.py": (
        "def resolve_base_url(base_url, host, port):\n    return base_url or f'http://{host}:{port}'\n\n\n"
        "def resolve_host_port(base_url, host, port):\n    return base_url or f'{host}:{port}'\n"
    ),
}


def prepare(env_dir: Path) -> None:
    """Unpacks the load generator alone out of the wheel."""
    site = next(env_dir.glob("lib/python*/site-packages"))
    with tempfile.TemporaryDirectory() as folder:
        pip = [str(env_dir / "bin" / "python"), "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*pip, f"sglang=={VERSION}"], check=True)
        with zipfile.ZipFile(next(Path(folder).glob("sglang-*.whl"))) as wheel:
            names = [name for name in wheel.namelist() if name.startswith(("sglang/benchmark/", f"sglang-{VERSION}.dist-info/"))]
            wheel.extractall(site, names)
    for name, source in SHIMS.items():
        path = site / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)


async def bench(context: Context, backend: str) -> dict[str, Any]:
    out = context.work_dir / f"{backend}.jsonl"
    argv = [context.python, "-m", "sglang.benchmark.serving", "--backend", backend, "--base-url", context.url, "--cache-report"]
    argv += [
        "--dataset-name",
        "generated-shared-prefix",
        "--gsp-num-groups",
        str(NUM_GROUPS),
        "--gsp-prompts-per-group",
        str(NUM_PER_GROUP),
    ]
    argv += ["--gsp-system-prompt-len", str(SYSTEM_PROMPT_LEN), "--gsp-question-len", "16", "--gsp-output-len", str(OUTPUT_LEN)]
    argv += ["--tokenizer", str(context.model_dir), "--model", context.model_name, "--flush-cache", "--max-concurrency", "2"]
    argv += ["--output-file", str(out), "--disable-tqdm", "--seed", "1", "--warmup-requests", "0"]
    # its prompts are kept in the home folder's cache between runs
    output = await context.call(argv, {"HF_HUB_OFFLINE": "1", "HOME": str(context.work_dir)})
    if not out.is_file():
        raise CompatError(f"{backend}: no result was written:\n{output[-2000:]}")
    result: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
    return result


def judge(backend: str, result: dict[str, Any], counted: float) -> str:
    """Raises CompatError unless all came back whole, prefixes were re-used, and its count of cached tokens is that of our counter."""
    expected = NUM_GROUPS * NUM_PER_GROUP
    if result["completed"] != expected or result["total_output_tokens"] != expected * OUTPUT_LEN:
        raise CompatError(f"{backend}: {result['completed']} of {expected} requests, {result['total_output_tokens']} output tokens")
    report = result["cache_report"]
    cached = report["total_cached_tokens"]
    # two run at a time, so that up to two of a group may miss
    if cached != counted or cached < NUM_GROUPS * (NUM_PER_GROUP - 2) * SYSTEM_PROMPT_LEN // 2:
        raise CompatError(f"{backend}: {report}, our counter {counted:g}")
    return f"{backend}: {expected} requests, hit rate {report['cache_hit_rate_pct']}%, {cached} cached tokens as counted by the server"


def cached_tokens(url: str) -> float:
    metrics = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    return sum(sample.value for family in metrics for sample in family.samples if sample.name == "sglang:cached_tokens_total")


async def run(context: Context) -> str:
    parts = []
    for backend in BACKENDS:
        before = cached_tokens(context.direct_url)
        result = await bench(context, backend)
        parts.append(judge(backend, result, cached_tokens(context.direct_url) - before))
    return "; ".join(parts)


TOOL = Tool(
    name="bench_serving",
    packages=(
        "transformers",
        "aiohttp",
        "numpy",
        "requests",
        "tqdm",
        "msgspec",
        "pybase64",
        "orjson",
        "pillow",
        "datasets",
        "torch==2.13.0",
    ),
    shown=("sglang", "transformers"),
    command="python -m sglang.benchmark.serving --backend BACKEND --dataset-name generated-shared-prefix --cache-report --flush-cache",
    run=run,
    prepare=prepare,
)
