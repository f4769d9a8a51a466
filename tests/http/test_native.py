"""SGLang's native route and the routes around it: /generate, /model_info, /server_info, /v1/loads, /abort_request, probes."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.http.conftest import Served
from tests.support.byte_tokenizer import CRASH_ID, EOS_ID, VOCAB_SIZE
from tests.support.waiting import until


async def generate(served: Served, **body: Any) -> Any:
    reply = await served.http.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def stream(served: Served, **body: Any) -> list[dict[str, Any]]:
    reply = await served.http.post("/generate", json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    blocks = reply.text.removesuffix("\n\n").split("\n\n")
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


async def test_answer_has_the_shape_of_sglang(served: Served) -> None:
    body = await generate(served, text="abc", rid="mine", sampling_params={"max_new_tokens": 4, "temperature": 0})
    meta = body["meta_info"]
    assert (body["text"], body["output_ids"]) == ("abca", list(b"abca"))
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "length", "length": 4},
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "cached_tokens": 0,
        "cached_tokens_details": {"device": 0, "host": 0},
    }
    warm = await generate(served, input_ids=[97, 98, 99], sampling_params={"max_new_tokens": 1})
    assert warm["meta_info"]["cached_tokens"] == 2


async def test_128_tokens_by_default_and_put_is_the_same(served: Served) -> None:
    assert len((await generate(served, text="ab"))["output_ids"]) == 128
    assert (await served.http.put("/generate", json={"text": "ab"})).json()["text"] == "ab" * 64


@pytest.mark.parametrize(
    ("params", "matched", "text"),
    [({"stop": "d"}, "d", "abc"), ({"stop_token_ids": [99]}, 99, "ab"), ({}, EOS_ID, "abcde")],
)
async def test_what_stopped_it_is_named(served: Served, params: dict[str, Any], matched: Any, text: str) -> None:
    body = await generate(served, text="abcde<eos>", sampling_params=params)
    assert body["text"] == text
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}
    assert len(body["output_ids"]) == body["meta_info"]["completion_tokens"]


@pytest.mark.parametrize("prompts", [{"text": ["ab", "xyz"]}, {"input_ids": [[97, 98], [120, 121, 122]]}])
async def test_a_batch_is_answered_by_a_list(served: Served, prompts: dict[str, Any]) -> None:
    params = [{"max_new_tokens": 2}, {"max_new_tokens": 4}]
    bodies = await generate(served, **prompts, sampling_params=params, rid=["one", "two"])
    assert [(body["text"], body["meta_info"]["id"]) for body in bodies] == [("ab", "one"), ("xyzx", "two")]
    alone = await generate(served, text=["ab"], sampling_params={"max_new_tokens": 2, "n": 2})
    assert [body["text"] for body in alone] == ["ab", "ab"]
    assert len({body["meta_info"]["id"] for body in alone}) == 2


@pytest.mark.usefixtures("one_step_at_a_time")
async def test_a_stream_is_cumulative(served: Served) -> None:
    events = await stream(served, text="abc", sampling_params={"max_new_tokens": 4}, return_logprob=True)
    assert [event["text"] for event in events] == ["a", "ab", "abc", "abca"]
    assert [event["output_ids"] for event in events] == [list(b"abca"[: k + 1]) for k in range(4)]
    assert [len(event["meta_info"]["output_token_logprobs"]) for event in events] == [1, 2, 3, 4]
    assert [event["meta_info"]["finish_reason"] for event in events] == [None, None, None, {"type": "length", "length": 4}]
    whole = await generate(served, text="abc", sampling_params={"max_new_tokens": 4}, return_logprob=True)
    for name in ("output_token_logprobs", "input_token_logprobs", "completion_tokens", "prompt_tokens"):
        assert whole["meta_info"][name] == events[-1]["meta_info"][name]


async def test_a_stream_of_a_batch_names_the_index(served: Served) -> None:
    events = await stream(served, text=["ab", "xyz"], sampling_params={"max_new_tokens": 3})
    last = {event["index"]: event["text"] for event in events}
    assert last == {0: "aba", 1: "xyz"}


@pytest.mark.parametrize(("start", "num_inputs"), [(-1, 0), (0, 4), (1, 3), (3, 1)])
@pytest.mark.parametrize("num_top", [0, 2])
async def test_log_probabilities_of_inputs_and_outputs(served: Served, start: int, num_inputs: int, num_top: int) -> None:
    body = await generate(
        served,
        text="abcd",
        sampling_params={"max_new_tokens": 2},
        return_logprob=True,
        logprob_start_len=start,
        top_logprobs_num=num_top,
        return_text_in_logprobs=True,
    )
    meta = body["meta_info"]
    inputs, outputs = meta["input_token_logprobs"], meta["output_token_logprobs"]
    assert len(inputs) == num_inputs
    assert [entry[1:] for entry in inputs] == [[byte, chr(byte)] for byte in b"abcd"[4 - num_inputs :]]
    assert [entry[0] is None for entry in inputs] == [start == 0 and k == 0 for k in range(num_inputs)]
    assert [entry[1:] for entry in outputs] == [[97, "a"], [98, "b"]]
    assert all(entry[0] < 0 for entry in outputs)
    assert ("output_top_logprobs" in meta) == (num_top > 0)
    if num_top:
        assert [len(top) for top in meta["output_top_logprobs"]] == [2, 2]
        assert meta["output_top_logprobs"][0][0] == outputs[0]
        assert [top is None for top in meta["input_top_logprobs"]] == [entry[0] is None for entry in inputs]


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "text"),
    ({"text": "a", "input_ids": [1]}, "text"),
    ({"text": []}, "text"),
    ({"text": ["a", 1]}, "text"),
    ({"text": {}}, "text"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": 5}, "input_ids"),
    ({"input_ids": [VOCAB_SIZE]}, "input_ids"),
    ({"input_ids": [[1], [-1]]}, "input_ids"),
    ({"input_ids": [[]]}, "input_ids"),
    ({"input_ids": [1, [2]]}, "input_ids"),
    ({"text": "a", "sampling_params": 5}, "sampling_params"),
    ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
    ({"text": "a", "sampling_params": [1]}, "sampling_params"),
    ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params"),
    ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
    ({"text": "a", "sampling_params": {"min_new_tokens": 500}}, "sampling_params.min_new_tokens"),
    ({"text": "a", "sampling_params": {"sampling_seed": 2**64}}, "sampling_params.sampling_seed"),
    ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
    ({"text": "a", "sampling_params": {"stop_token_ids": [VOCAB_SIZE]}}, "sampling_params.stop_token_ids"),
    ({"text": "a", "sampling_params": {"n": 0}}, "sampling_params.n"),
    ({"text": ["a"] * 600, "sampling_params": {"n": 2}}, "text"),
    ({"text": "a", "rid": 5}, "rid"),
    ({"text": "a", "rid": ["x", "y"]}, "rid"),
    ({"text": ["a", "b", "c"], "rid": ["x", "y", "x"]}, "rid"),
    ({"text": "a", "logprob_start_len": -2}, "logprob_start_len"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": 1}, "logprob_start_len"),
    ({"text": "a", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
    ({"text": "a", "return_logprob": 1}, "return_logprob"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=lambda value: str(value)[:50])
async def test_bad_values_are_named(served: Served, body: dict[str, Any], param: str) -> None:
    reply = await served.http.post("/generate", json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", param)
    assert error["message"].startswith(param)
    assert served.echo.num_steps == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"sampling_params": {"regex": "a+"}}, "sampling_params.regex"),
        ({"sampling_params": {"no_stop_trim": True}}, "sampling_params.no_stop_trim"),
        ({"lora_path": "x"}, "lora_path"),
        ({"token_ids_logprob": [5]}, "token_ids_logprob"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"input_embeds": [[0.5]]}, "input_embeds"),
        ({"image_data": "x"}, "image_data"),
        ({"max_new_tokens": 4}, "max_new_tokens"),
        ({"sampling_params": {"max_tokens": 4}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"seed": 4}}, "sampling_params.seed"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(served: Served, body: dict[str, Any], param: str) -> None:
    reply = await served.http.post("/generate", json={"text": "a"} | body)
    assert reply.status_code == 400
    assert (reply.json()["error"]["code"], reply.json()["error"]["param"]) == ("unsupported_parameter", param)


async def test_unknown_names_are_in_the_header(served: Served) -> None:
    reply = await served.http.post("/generate", json={"text": "a", "colour": 1, "sampling_params": {"mood": 1}})
    assert reply.headers["x-radixserve-ignored"] == "colour, sampling_params.mood"


@pytest.mark.parametrize("step_s", [0.005], indirect=True)
@pytest.mark.parametrize("route", ["/generate", "/v1/completions"])
async def test_abort_by_the_beginning_of_a_rid(served: Served, route: str) -> None:
    def ask(rid: str) -> asyncio.Task[httpx.Response]:
        body = {"text": "abc", "sampling_params": {"max_new_tokens": 900}} if route == "/generate" else {"prompt": "abc", "max_tokens": 900}
        return asyncio.create_task(served.http.post(route, json={**body, "rid": rid}))

    replies = {rid: ask(rid) for rid in ("job-1", "job-2", "other")}
    await until(lambda: len(served.echo.running_ids) == 3)
    assert (await served.http.post("/abort_request", json={"rid": "nobody"})).json() == {"num_aborted": 0}
    assert (await served.http.post("/abort_request", json={"rid": "job-"})).json() == {"num_aborted": 2}
    for rid in ("job-1", "job-2"):
        assert (await replies[rid]).status_code == 499
    assert not replies["other"].done()
    again = ask("job-1")  # a name may be used again at once
    await until(lambda: len(served.echo.running_ids) == 2)
    assert (await served.http.post("/abort_request", json={"abort_all": True})).json() == {"num_aborted": 2}
    assert [(await reply).status_code for reply in (replies["other"], again)] == [499, 499]
    assert (await served.http.post("/abort_request", json={})).json()["error"]["param"] == "rid"


@pytest.mark.parametrize(
    ("prompts", "n", "rid", "ids"),
    [
        ({"text": "ab"}, 1, "job", ["job"]),
        ({"text": ["ab"]}, 1, "job", ["job"]),
        ({"text": ["ab", "cd"]}, 1, "job", ["job_0", "job_1"]),
        ({"text": "ab"}, 3, "job", ["job_0", "job_1", "job_2"]),
        ({"input_ids": [[97], [98]]}, 2, "job", ["job_0", "job_1", "job_2", "job_3"]),
        ({"text": ["ab", "cd"]}, 2, ["x", "y"], ["x_0", "x_1", "y_0", "y_1"]),
    ],
)
@pytest.mark.parametrize("step_s", [0.005], indirect=True)
async def test_one_rid_of_several_choices_is_numbered(served: Served, prompts: dict[str, Any], n: int, rid: Any, ids: list[str]) -> None:
    params = {"max_new_tokens": 2, "n": n}
    body = {**prompts, "rid": rid, "sampling_params": params}
    replies = await generate(served, **body)
    replies = replies if isinstance(replies, list) else [replies]
    assert [reply["meta_info"]["id"] for reply in replies] == ids
    running = asyncio.create_task(served.http.post("/generate", json={**body, "sampling_params": {**params, "max_new_tokens": 900}}))
    await until(lambda: len(served.echo.running_ids) == len(ids))
    for name in [rid] if isinstance(rid, str) else rid:
        num_aborted = (await served.http.post("/abort_request", json={"rid": name})).json()["num_aborted"]
        assert num_aborted == (len(ids) if isinstance(rid, str) else n)
    assert (await running).status_code == 499


async def test_model_and_server_info(served: Served) -> None:
    model = (await served.http.get("/model_info")).json()
    assert (model["served_model_name"], model["is_generation"], model["tokenizer_path"]) == ("echo", True, model["model_path"])
    assert (await served.http.get("/get_model_info")).json() == model
    server = (await served.http.get("/server_info")).json()
    assert {name: server[name] for name in model} == model
    assert (server["max_total_num_tokens"], server["max_running_requests"], server["page_size"]) == (10_000, 64, 1)
    assert (server["linear_backend"], server["quantization"], server["kv_cache_dtype"]) == ("none", "none", "auto")
    assert (server["radix_eviction_policy"], server["overlap_schedule"]) == ("lru", "off")
    assert server["internal_states"][0]["effective_max_running_requests_per_dp"] == 64
    assert (await served.http.get("/get_server_info")).json().keys() == server.keys()
    assert (await served.http.get("/version")).status_code == 404


@pytest.mark.parametrize("step_s", [0.005], indirect=True)
async def test_loads_tell_what_runs(served: Served) -> None:
    await served.complete(prompt="abcd", max_tokens=1)
    await served.complete(prompt="abcd", max_tokens=1)
    running = asyncio.create_task(served.complete(prompt="abc", max_tokens=900))
    await until(lambda: served.echo.running_ids)
    await served.http.get("/v1/loads")
    await asyncio.sleep(0.05)
    body = (await served.http.get("/v1/loads?include=core,queues")).json()
    (load,) = body["loads"]
    assert body["dp_rank_count"] == 1
    assert (load["dp_rank"], load["num_running_reqs"], load["num_waiting_reqs"], load["num_total_reqs"]) == (0, 1, 0, 1)
    assert (load["max_total_num_tokens"], load["max_running_requests"], load["num_waiting_uncached_tokens"]) == (10_000, 64, 0)
    assert load["cache_hit_rate"] == (3 + 2) / (4 + 4 + 3)
    assert load["gen_throughput"] > 10
    running.cancel()


async def test_probes_and_the_front_page(served: Served) -> None:
    assert (await served.http.get("/ready")).status_code == 200
    before = served.echo.stats().requests_total
    assert (await served.http.get("/health_generate")).status_code == 200
    assert served.echo.stats().requests_total == before + 1
    assert served.echo.running_ids == []
    page = (await served.http.get("/")).json()
    assert page["name"] == "radixserve"
    assert {"POST /v1/completions", "POST /v1/chat/completions", "POST|PUT /generate", "GET /metrics", "GET /v1/loads"} <= set(
        page["routes"]
    )
    assert not any("/version" in route for route in page["routes"])
    served.app.state.context.gate.close()
    for path in ("/ready", "/health_generate"):
        assert (await served.http.get(path)).status_code == 503


async def test_a_probe_of_a_failing_engine_is_503(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.app.state.context.tokenizer, "bos_token_id", CRASH_ID)
    reply = await served.http.get("/health_generate")
    assert reply.status_code == 503
    assert "secret" not in reply.text


async def test_a_probe_shares_nothing_with_clients(served: Served) -> None:
    await served.http.get("/health_generate")
    body = await generate(served, input_ids=[0, 0], sampling_params={"max_new_tokens": 1})
    assert body["meta_info"]["cached_tokens"] == 0


async def test_reset_prefix_cache_is_the_flush(served: Served) -> None:
    assert (await served.http.post("/reset_prefix_cache")).status_code == 200
    assert (await served.http.get("/flush_cache")).status_code == 200
    assert served.echo.num_flushes == 2


async def test_the_description_of_all_routes_can_be_made(served: Served, recwarn: pytest.WarningsRecorder) -> None:
    paths = (await served.http.get("/openapi.json")).json()["paths"]
    assert {"/generate", "/v1/chat/completions", "/tokenize"} <= paths.keys()
    assert [str(warning.message) for warning in recwarn if "operation" in str(warning.message).lower()] == []
