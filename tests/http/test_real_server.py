"""The whole product as a user starts it: `radixserve serve` with the default model, and the openai package in front."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from radixserve.models.location import resolve_model
from tests.support.real_server import real_server

LONG_PROMPT = "You are a careful assistant. " * 20 + "The capital of France is"


# for tests that a step planned ahead could break; the others run one by one
EITHER_WAY = pytest.mark.parametrize("url", ["off", "on"], ids=["one by one", "overlapped"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    resolve_model(None)  # fetched here, where a failure is readable
    overlap = getattr(request, "param", "off")
    flags = ["--max-total-tokens", "4096", "--dtype", "float32", "--check-account-every-step"]
    with real_server(*flags, "--overlap-schedule", overlap) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        yield client


def cached_tokens(answer: openai.types.Completion) -> int:
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None
    return answer.usage.prompt_tokens_details.cached_tokens


@EITHER_WAY
def test_completion_reuses_what_it_knows_until_it_is_flushed(client: openai.OpenAI, url: str) -> None:
    def ask() -> openai.types.Completion:
        return client.completions.create(model="default", prompt=LONG_PROMPT, max_tokens=8, temperature=0)

    assert httpx.post(f"{url}/flush_cache?timeout=10").status_code == 200
    cold, warm = ask(), ask()
    assert cold.model == "smollm2-135m-instruct"
    assert "Paris" in cold.choices[0].text
    assert cold.usage is not None
    assert cached_tokens(cold) == 0
    assert cached_tokens(warm) == cold.usage.prompt_tokens - 1
    assert warm.choices[0].text == cold.choices[0].text
    assert httpx.post(f"{url}/flush_cache?timeout=10").status_code == 200
    assert cached_tokens(ask()) == 0


@EITHER_WAY
def test_stream_joins_to_the_text_without_a_stream(client: openai.OpenAI) -> None:
    body = {"model": "default", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**body)
    chunks = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **body))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12


@EITHER_WAY
def test_two_prompts_and_a_stop_string_in_one_call(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="default", prompt=["1, 2, 3, 4,", "a, b, c, d,"], max_tokens=8, temperature=0, stop=", 7")
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text == " 5, 6"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[1].text.startswith(" e, f")


@EITHER_WAY
def test_closing_the_connection_aborts_and_leaves_an_idle_engine(client: openai.OpenAI, url: str) -> None:
    stream = client.completions.create(
        model="default", prompt="Tell me everything.", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    stream.close()
    assert httpx.post(f"{url}/flush_cache?timeout=30", timeout=40).status_code == 200
    metrics = httpx.get(f"{url}/metrics").text
    assert 'sglang:num_aborted_requests_total{model_name="smollm2-135m-instruct"} 1.0' in metrics
    assert 'sglang:kv_evictable_tokens{model_name="smollm2-135m-instruct"} 0.0' in metrics


def test_what_is_too_long_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="default", prompt="a", max_tokens=5000)
    assert refused.value.code == "context_length_exceeded"


def evicted_tokens(url: str) -> float:
    found = re.search(r"^sglang:evicted_tokens_total\{[^}]*\} (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_sixteen_clients_with_a_secret_each_under_eviction(url: str) -> None:
    """REUSE-16 from outside: each client's answer is that of its prompt alone on an empty tree; no foreign secret shows in it."""
    rules = "Copy the code of the last line. " * 8
    secrets = [f"{1000 + 37 * i}-{chr(65 + i) * 3}" for i in range(16)]
    filler = [[3000 + 500 * i + j for j in range(480)] for i in range(8)]

    def ask(prompt: str | list[int], max_tokens: int = 10) -> str:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    prompts = [f"{rules}\n" + f"code: {secret}\n" * 4 + "code:" for secret in secrets]
    alone = []
    for prompt in prompts:
        assert httpx.post(f"{url}/flush_cache", params={"timeout": 10}).status_code == 200
        alone.append(ask(prompt))
    before = evicted_tokens(url)
    for ids in filler:  # the pool of 4096 tokens is full now
        ask(ids, 1)
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, prompts))
    assert together == alone
    for secret, text in zip(secrets, together, strict=True):
        assert secret in text
        assert not any(foreign in text for foreign in secrets if foreign != secret)
    assert evicted_tokens(url) > before


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of France?"}]


def test_chat_whole_and_in_a_stream(client: openai.OpenAI) -> None:
    body = {"model": "default", "messages": MESSAGES, "max_completion_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**body)
    assert "Paris" in (whole.choices[0].message.content or "")
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **body))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert whole.usage is not None and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    details = chunks[-1].usage.prompt_tokens_details
    assert details is not None and details.cached_tokens == whole.usage.prompt_tokens - 1  # USAGE-08


def test_chat_has_the_ids_of_its_template_and_hits_the_cache_of_completions(client: openai.OpenAI, url: str) -> None:
    """TOK-01 to TOK-03: one text, the same ids wherever it is sent, and no second BOS."""
    assert httpx.post(f"{url}/flush_cache?timeout=10").status_code == 200
    answer = client.chat.completions.create(model="default", messages=MESSAGES, max_tokens=1, extra_body={"return_token_ids": True})
    prompt_ids = answer.model_dump()["prompt_token_ids"]
    text = httpx.post(f"{url}/detokenize", json={"tokens": prompt_ids, "skip_special_tokens": False}).json()["prompt"]
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    for add_special_tokens in (True, False):
        body = {"prompt": text, "add_special_tokens": add_special_tokens}
        assert httpx.post(f"{url}/tokenize", json=body).json()["tokens"] == prompt_ids
    warm = client.completions.create(model="default", prompt=text, max_tokens=1)
    assert cached_tokens(warm) == len(prompt_ids) - 1


@EITHER_WAY
def test_echo_and_log_probabilities_are_the_same_cold_and_warm(client: openai.OpenAI, url: str) -> None:
    """USAGE-01, USAGE-05: the harness's request, a prompt of 33 tokens, twice."""
    assert httpx.post(f"{url}/flush_cache?timeout=10").status_code == 200
    prompt = httpx.post(f"{url}/tokenize", json={"prompt": LONG_PROMPT}).json()["tokens"][:33]
    for max_tokens in (1, 0):
        body = {"model": "default", "prompt": [prompt], "max_tokens": max_tokens, "logprobs": 1, "echo": True, "temperature": 0}
        answers = [client.completions.create(**body) for _ in range(2)]
        for answer in answers:
            logprobs = answer.choices[0].logprobs
            assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
            assert logprobs.tokens is not None and "".join(logprobs.tokens) == answer.choices[0].text
            assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 33 + max_tokens
            assert logprobs.token_logprobs[0] is None
            assert all(value is not None and value <= 0 for value in logprobs.token_logprobs[1:])
            assert all(max(top.values()) >= value for top, value in zip(logprobs.top_logprobs[1:], logprobs.token_logprobs[1:]))
        cold, warm = (answer.choices[0].logprobs for answer in answers)
        assert cold is not None and warm is not None
        assert warm.token_logprobs is not None and cold.token_logprobs is not None
        assert warm.token_logprobs[1:] == pytest.approx(cold.token_logprobs[1:], abs=1e-3)


def test_the_choices_of_a_scored_prompt_compute_it_once(url: str) -> None:
    def prefilled() -> float:
        (line,) = re.findall(r"^radixserve_prefill_tokens_total(?:\{.*\})? (\S+)$", httpx.get(f"{url}/metrics").text, re.M)
        return float(line)

    assert httpx.post(f"{url}/flush_cache?timeout=10").status_code == 200
    prompt = httpx.post(f"{url}/tokenize", json={"prompt": LONG_PROMPT}).json()["tokens"][:100]
    before = prefilled()
    body = {"prompt": prompt, "n": 5, "echo": True, "logprobs": 1, "max_tokens": 0}
    choices = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"]
    assert [choice["logprobs"] for choice in choices] == [choices[0]["logprobs"]] * 5
    assert len(choices[0]["logprobs"]["token_logprobs"]) == 100
    assert prefilled() - before == 100 + 4  # and the last token of the others


def test_log_probabilities_from_the_middle_of_a_cached_prompt(url: str) -> None:
    """USAGE-02: the first position that is asked for is computed, whatever the tree holds before it."""
    params = {"max_new_tokens": 2, "temperature": 0}
    ask = {"text": LONG_PROMPT, "sampling_params": params, "return_logprob": True}
    whole = httpx.post(f"{url}/generate", json={**ask, "logprob_start_len": 0}).json()["meta_info"]
    for start in (1, 50, whole["prompt_tokens"] - 1):
        part = httpx.post(f"{url}/generate", json={**ask, "logprob_start_len": start}).json()["meta_info"]
        assert [entry[1] for entry in part["input_token_logprobs"]] == [entry[1] for entry in whole["input_token_logprobs"]][start:]
        numbers = [entry[0] for entry in part["input_token_logprobs"]]
        assert numbers == pytest.approx([entry[0] for entry in whole["input_token_logprobs"]][start:], abs=1e-3)
        assert part["output_token_logprobs"][0][1] == whole["output_token_logprobs"][0][1]


def test_bytes_of_log_probabilities_join_to_a_text_that_is_not_latin(client: openai.OpenAI) -> None:
    """TOK-07: tokens are forced to be parts of characters."""
    ids = [153, 153, 153]  # any will do: whatever comes out must join
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "Repeat: 한국어 日本語 😀 Ελλάδα"}],
        max_tokens=24,
        temperature=0.8,
        seed=3,
        logprobs=True,
        top_logprobs=3,
        logit_bias={str(token_id): 5 for token_id in ids},
        extra_body={"ignore_eos": True, "skip_special_tokens": False},
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    data = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert data.decode(errors="replace") == answer.choices[0].message.content
    assert len(logprobs.content) == 24
    assert all(len(entry.top_logprobs) == 3 for entry in logprobs.content)


def test_bad_stop_token_ids_leave_the_server_alone(client: openai.OpenAI) -> None:
    """API-13."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="default", prompt="a", extra_body={"stop_token_ids": [10**6, -5]})
    assert refused.value.param == "stop_token_ids"
    assert client.completions.create(model="default", prompt="a", max_tokens=1).usage is not None


def test_a_bias_decides(client: openai.OpenAI, url: str) -> None:
    (token_id,) = httpx.post(f"{url}/tokenize", json={"prompt": " London"}).json()["tokens"]
    answer = client.completions.create(
        model="default", prompt="The capital of France is", max_tokens=2, temperature=0, logit_bias={str(token_id): 100}
    )
    assert answer.choices[0].text == " London London"


def test_probes_and_information(url: str) -> None:
    for path in ("/", "/ready", "/health", "/health_generate", "/model_info", "/server_info", "/v1/loads", "/tokenizer_info"):
        assert httpx.get(f"{url}{path}", timeout=30).status_code == 200, path
    info = httpx.get(f"{url}/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert "<|im_start|>" in info["chat_template"]


def test_a_pinned_prompt_is_computed_and_kept(client: openai.OpenAI, url: str) -> None:
    assert httpx.post(f"{url}/flush_cache?timeout=10").status_code == 200
    pinned = httpx.post(f"{url}/pin", json={"prompt": LONG_PROMPT, "ttl_s": 30}, timeout=60).json()
    assert pinned["pinned_tokens"] == pinned["prompt_tokens"] > 100
    assert f'radixserve_pinned_tokens{{model_name="smollm2-135m-instruct"}} {pinned["pinned_tokens"]}.0' in httpx.get(f"{url}/metrics").text
    assert cached_tokens(client.completions.create(model="default", prompt=LONG_PROMPT, max_tokens=1)) == pinned["prompt_tokens"] - 1
    beyond = httpx.post(f"{url}/pin", json={"prompt": [7] * 1100, "ttl_s": 30}, timeout=120).json()
    assert beyond["pinned_tokens"] == 1024 - pinned["pinned_tokens"], "a quarter of the pool is the budget"
    assert httpx.post(f"{url}/flush_cache?timeout=10").status_code == 200
    assert 'radixserve_pinned_tokens{model_name="smollm2-135m-instruct"} 0.0' in httpx.get(f"{url}/metrics").text
