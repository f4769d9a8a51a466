"""Runs inside the environment of openai 2.x, litellm and langchain-openai: real calls, asserting what each library makes of the answers."""

import asyncio
import sys
from collections.abc import Callable

import litellm
import openai
from langchain_openai import ChatOpenAI, OpenAI

URL, MODEL = sys.argv[1] + "/v1", sys.argv[2]
QUESTION = [{"role": "system", "content": "You are brief. " * 10}, {"role": "user", "content": "Name the capital of France."}]
TOO_LONG = "word " * 20_000

sdk = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)


def sdk_answers() -> None:
    assert sdk.models.list().data[0].id == MODEL
    assert sdk.models.retrieve(MODEL).id == MODEL
    chat = sdk.chat.completions.create(
        model=MODEL, messages=QUESTION, max_completion_tokens=8, temperature=0, logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].message.content
    assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2
    again = sdk.chat.completions.create(model=MODEL, messages=QUESTION, max_completion_tokens=8, temperature=0)
    assert again.choices[0].message.content == chat.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    text = sdk.completions.create(model=MODEL, prompt=["One, two,", "A, B,"], n=2, max_tokens=4, seed=1, stop=["\n"])
    assert [choice.index for choice in text.choices] == [0, 1, 2, 3]


def sdk_streams() -> None:
    stream = sdk.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and 0 < chunks[-1].usage.completion_tokens <= 8
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason]
    assert reasons in (["stop"], ["length"])
    plain = list(sdk.completions.create(model=MODEL, prompt="One, two,", max_tokens=4, stream=True))
    assert all(len(chunk.choices) == 1 for chunk in plain)


async def sdk_async() -> None:
    async with openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0) as client:
        calls = [client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=4) for _ in range(4)]
        assert all(answer.usage.completion_tokens <= 4 for answer in await asyncio.gather(*calls))


def raises(kind: type[Exception], call: Callable[[], object]) -> Exception:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def sdk_errors() -> None:
    error = raises(openai.BadRequestError, lambda: sdk.completions.create(model=MODEL, prompt=TOO_LONG, max_tokens=1))
    assert error.code == "context_length_exceeded" and error.request_id
    raises(openai.NotFoundError, lambda: sdk.completions.create(model="no-such", prompt="a"))
    raises(openai.BadRequestError, lambda: sdk.completions.create(model=MODEL, prompt="a", suffix="b"))


def litellm_works() -> None:
    for provider in ("openai", "hosted_vllm"):
        to = {"model": f"{provider}/{MODEL}", "api_base": URL, "api_key": "none", "num_retries": 0, "temperature": 0}
        answer = litellm.completion(messages=QUESTION, max_tokens=4, **to)
        assert answer.choices[0].message.content
        assert answer.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens - 1
        chunks = list(litellm.completion(messages=QUESTION, max_tokens=4, stream=True, stream_options={"include_usage": True}, **to))
        assert chunks[-1].usage.completion_tokens == 4
        long = [{"role": "user", "content": TOO_LONG}]
        raises(litellm.ContextWindowExceededError, lambda long=long, to=to: litellm.completion(messages=long, max_tokens=1, **to))
    to = {"model": f"text-completion-openai/{MODEL}", "api_base": URL, "api_key": "none"}
    assert litellm.text_completion(prompt="One, two,", max_tokens=4, **to).choices[0].text


def langchain_works() -> None:
    chat = ChatOpenAI(model=MODEL, base_url=URL, api_key="none", max_retries=0, max_tokens=4, temperature=0, stream_usage=True)
    answer = chat.invoke("Hello there")
    assert answer.content and answer.usage_metadata["output_tokens"] == 4
    assert "cache_read" in answer.usage_metadata["input_token_details"]
    chunks = list(chat.stream("Hello there"))
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) == 4
    assert len(chat.batch(["One", "Two"])) == 2
    assert OpenAI(model=MODEL, base_url=URL, api_key="none", max_retries=0, max_tokens=4).invoke("One, two,")
    error = raises(openai.BadRequestError, lambda: chat.invoke(TOO_LONG))
    assert "context_length_exceeded" in str(error)


sdk_answers()
sdk_streams()
asyncio.run(sdk_async())
sdk_errors()
litellm_works()
langchain_works()
print("completions and chats, streams, async, logprobs, cached_tokens, error classes (context_length_exceeded as each library's own)")
