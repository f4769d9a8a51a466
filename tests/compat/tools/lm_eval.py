"""lm-eval local-completions on tasks of local data: its figures over HTTP against those of its own transformers backend, cold and warm."""

import json
from pathlib import Path

import httpx

from tests.compat.tool import CompatError, Context, Tool

TOLERANCE = 1e-3
QUESTIONS = [
    {"question": "The capital of France is", "choices": ["Paris", "Rome", "Madrid"], "answer": 0},
    {"question": "The capital of Italy, a country in the south of Europe, is", "choices": ["Paris", "Rome"], "answer": 1},
    {"question": "Two plus two is", "choices": ["five", "four", "nine"], "answer": 1},
    {"question": "Water freezes at a temperature of zero degrees", "choices": ["Celsius", "Kelvin of the very hot kind"], "answer": 0},
]
CHOICE_TASK = """task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
WORDS_TASK = """task: tiny_words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n", "."], max_gen_toks: 12, do_sample: false, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""


def write_tasks(folder: Path) -> None:
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (folder / "choice.yaml").write_text(CHOICE_TASK.format(data=data))
    (folder / "words.yaml").write_text(WORDS_TASK.format(data=data))


async def evaluate(context: Context, label: str, model: str, *arguments: str) -> dict[str, object]:
    """Every response of every sample: log-likelihoods and texts, by task and document."""
    out = context.work_dir / label
    argv = [context.program("lm-eval"), "run", "--model", model, "--model_args", ",".join(arguments), "--include_path", "."]
    argv += ["--tasks", "tiny_choice", "tiny_words", "--batch_size", "4", "--output_path", str(out), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(context.work_dir / "hf")}
    await context.call([*argv, "--device", "cpu"] if model == "hf" else argv, offline)
    samples = [json.loads(line) | {"task": path.name[:16]} for path in out.rglob("samples_*.jsonl") for line in path.open()]
    return {f"{sample['task']}/{sample['doc_id']}": sample["resps"] for sample in samples}


def compare(label: str, got: dict[str, object], expected: dict[str, object]) -> float:
    """The largest difference of a log-likelihood. Raises CompatError where answers differ by more than TOLERANCE, or texts at all."""
    if got.keys() != expected.keys() or not got:
        raise CompatError(f"{label}: samples {sorted(got)} instead of {sorted(expected)}")
    largest = 0.0
    for name, responses in got.items():
        pairs = list(zip(flattened(responses), flattened(expected[name]), strict=True))
        for ours, theirs in pairs:
            if is_number(ours) and is_number(theirs):
                largest = max(largest, abs(float(ours) - float(theirs)))
            elif ours != theirs:
                raise CompatError(f"{label}: {name}: {ours!r} instead of {theirs!r}")
    if largest > TOLERANCE:
        raise CompatError(f"{label}: a log-likelihood is off by {largest}")
    return largest


def flattened(value: object) -> list[str]:
    return [leaf for item in value for leaf in flattened(item)] if isinstance(value, list) else [str(value)]


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


async def run(context: Context) -> str:
    write_tasks(context.work_dir)
    expected = await evaluate(context, "transformers", "hf", f"pretrained={context.model_dir}", "dtype=float32")
    to = (f"model={context.model_name}", f"base_url={context.url}/v1/completions", "num_concurrent=2", "max_retries=1")
    local = (f"tokenizer={context.model_dir}", "tokenizer_backend=huggingface", "tokenized_requests=True")
    async with httpx.AsyncClient(base_url=context.direct_url) as http:
        (await http.post("/flush_cache?timeout=10")).raise_for_status()
    differences = {}
    for label, tokenizer in {"cold": local, "warm": local, "remote tokenizer": ("tokenizer_backend=remote",)}.items():
        got = await evaluate(context, label.replace(" ", "-"), "local-completions", *to, *tokenizer)
        differences[label] = compare(label, got, expected)
    figures = ", ".join(f"{label} {difference:.1e}" for label, difference in differences.items())
    return f"{len(expected)} samples equal to lm-eval's own transformers backend; largest difference of a log-likelihood: {figures}"


TOOL = Tool(
    name="lm-eval",
    packages=("lm-eval[api]", "torch==2.13.0", "transformers", "accelerate", "tiktoken"),
    shown=("lm-eval", "transformers"),
    command="lm-eval run --model local-completions --model_args model=NAME,base_url=URL/v1/completions,tokenizer=MODEL_DIR",
    run=run,
)
