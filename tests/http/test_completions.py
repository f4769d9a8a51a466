"""POST /v1/completions without a stream: prompts, stops, choices, usage."""

import pytest

from radixserve.core import Request
from radixserve.engine.streams import RequestStream
from tests.http.conftest import Served
from tests.support.byte_tokenizer import EOS_ID


async def test_answer_has_the_openai_shape(served: Served) -> None:
    reply = await served.complete(prompt="abc", max_tokens=5)
    assert reply.status_code == 200
    body = reply.json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == "echo"
    assert isinstance(body["created"], int)
    assert body["choices"] == [{"index": 0, "text": "abcab", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_max_tokens_is_16_by_default(served: Served) -> None:
    body = (await served.complete(prompt="ab")).json()
    assert body["choices"][0]["text"] == "ab" * 8


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["aba"]),
        (["ab", "xyz"], ["aba", "xyz"]),
        ([97, 98], ["aba"]),
        ([[97, 98], [120]], ["aba", "xxx"]),
    ],
)
async def test_prompt_in_all_four_shapes(served: Served, prompt: object, texts: list[str]) -> None:
    body = (await served.complete(prompt=prompt, max_tokens=3)).json()
    assert [choice["text"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))


async def test_n_choices_of_two_prompts_are_ordered_and_prompts_count_once(served: Served) -> None:
    body = (await served.complete(prompt=["ab", "xyz"], n=3, max_tokens=2)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3, 4, 5]
    assert [choice["text"] for choice in body["choices"]] == ["ab"] * 3 + ["xy"] * 3
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["completion_tokens"] == 12
    # the second and third choice re-use what the first computed; that is no re-use of an earlier request
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_cached_tokens_are_reported_warm_and_flushed_away(served: Served) -> None:
    async def cached() -> int:
        usage = (await served.complete(prompt="a long prompt", max_tokens=1)).json()["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert await cached() == 0
    assert await cached() == len("a long prompt") - 1
    assert (await served.http.post("/flush_cache")).status_code == 200
    assert await cached() == 0


@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
async def test_namespaces_share_nothing(served: Served, field: str) -> None:
    async def cached(**fields: str) -> int:
        return (await served.complete(prompt="shared", max_tokens=1, **fields)).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert await cached(**{field: "one"}) == 0
    assert await cached(**{field: "two"}) == 0
    assert await cached() == 0
    assert await cached(**{field: "one"}) == 5


async def test_eos_ends_counts_and_is_not_text(served: Served) -> None:
    body = (await served.complete(prompt="ab<eos>", max_tokens=9)).json()
    assert body["choices"][0]["text"] == "ab"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 3


async def test_ignore_eos_goes_on(served: Served) -> None:
    body = (await served.complete(prompt="ab<eos>", max_tokens=6, ignore_eos=True)).json()
    assert body["choices"][0]["text"] == "abab"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("step_s", [0.02], indirect=True)  # slow enough that the end by length does not come first
async def test_stop_string_cuts_text_and_usage_and_ends_the_request_in_the_engine(served: Served) -> None:
    body = (await served.complete(prompt="abcdefg", max_tokens=100, stop=["zz", "de"])).json()
    assert body["choices"][0]["text"] == "abc"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 5
    assert await served.engine.flush_cache(timeout_s=20)
    assert [count for _, count in served.echo.finished_at] == [5]
    assert served.echo.abort_steps == []


async def test_stop_string_in_the_last_token_is_a_stop(served: Served) -> None:
    body = (await served.complete(prompt="abc", max_tokens=3, stop="c")).json()
    assert body["choices"][0] == {"index": 0, "text": "ab", "logprobs": None, "finish_reason": "stop"}


async def test_stop_of_one_choice_leaves_the_others(served: Served) -> None:
    body = (await served.complete(prompt=["abc", "xyz"], max_tokens=6, stop="c")).json()
    assert [(choice["text"], choice["finish_reason"]) for choice in body["choices"]] == [("ab", "stop"), ("xyzxyz", "length")]
    assert body["usage"]["completion_tokens"] == 9


async def test_text_held_for_a_stop_string_is_sent_when_eos_comes(served: Served) -> None:
    body = (await served.complete(prompt="word<eos>", stop="rdx")).json()
    assert body["choices"][0]["text"] == "word"


@pytest.mark.parametrize("text", ["😀", "한국어", "né", "👨‍👩‍👧"])
async def test_characters_of_several_tokens_are_whole(served: Served, text: str) -> None:
    body = (await served.complete(prompt=text, max_tokens=2 * len(text.encode()))).json()
    assert body["choices"][0]["text"] == text * 2


async def test_a_character_cut_by_max_tokens_is_one_replacement_mark(served: Served) -> None:
    body = (await served.complete(prompt="a😀", max_tokens=3)).json()
    assert body["choices"][0]["text"] == "a�"


@pytest.mark.parametrize("model", ["echo", "default", None])
async def test_known_model_names(served: Served, model: str | None) -> None:
    assert (await served.complete(prompt="a", model=model)).json()["model"] == "echo"


async def test_unknown_model_is_404(served: Served) -> None:
    reply = await served.complete(prompt="a", model="gpt-9")
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "model_not_found"
    assert reply.json()["error"]["param"] == "model"


async def test_models_are_listed(served: Served) -> None:
    card = (await served.http.get("/v1/models")).json()["data"][0]
    assert (card["id"], card["object"], card["owned_by"], card["max_model_len"]) == ("echo", "model", "radixserve", 1000)
    assert (await served.http.get("/v1/models/echo")).json() == card
    assert (await served.http.get("/v1/models/other")).status_code == 404


async def test_token_ids_of_special_tokens_are_taken_as_they_are(served: Served) -> None:
    body = (await served.complete(prompt=[97, EOS_ID])).json()
    assert (body["choices"][0]["text"], body["usage"]["completion_tokens"]) == ("a", 2)


@pytest.mark.parametrize(("seed", "is_one_for_all"), [(None, False), (7, True), (-7, True)])
async def test_equal_prompts_share_a_seed_only_where_one_is_given(
    served: Served, monkeypatch: pytest.MonkeyPatch, seed: int | None, is_one_for_all: bool
) -> None:
    requests: list[Request] = []
    submit = served.engine.submit

    def watched(request: Request) -> RequestStream:
        requests.append(request)
        return submit(request)

    monkeypatch.setattr(served.engine, "submit", watched)
    for prompt in (["a", "a"], [[97], [97]]):
        requests.clear()
        assert (await served.complete(prompt=prompt, n=2, seed=seed)).status_code == 200
        assert [request.choice_index for request in requests] == [0, 1, 0, 1]
        seeds = [request.seed for request in requests]
        assert (seeds[0], seeds[2]) == (seeds[1], seeds[3])
        assert (seeds[0] == seeds[2]) is is_one_for_all
        assert seed is None or seeds[0] == seed % 2**64
