"""Messages speak of what was sent, in the words of JSON: integers of any size as they were, empty stop strings as such."""

import json
from typing import Any

import pytest

from tests.http.conftest import Served
from tests.support.byte_tokenizer import VOCAB_SIZE

SEED_RANGE = f"an integer in [{-(2**63)}, {2**63 - 1}]"
IDS = f"token ids in [0, {VOCAB_SIZE - 1}]"


async def message_of(served: Served, path: str, body: dict[str, Any]) -> str:
    reply = await served.http.post(path, content=json.dumps(body))
    assert reply.status_code == 400, reply.text
    return str(reply.json()["error"]["message"])


@pytest.mark.parametrize("value", [2**63, 2**64, -(2**64), 10**30])
@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/completions", {"prompt": "a", "seed": ...}, f"seed: expected {SEED_RANGE}, got"),
        ("/v1/completions", {"prompt": "a", "priority": ...}, "priority: expected an integer in [-2147483647, 2147483647], got"),
        ("/v1/completions", {"prompt": "a", "max_tokens": ...}, "max_tokens: expected an integer in [0, 2147483647], got"),
        ("/v1/completions", {"prompt": [97, ...]}, f"prompt: expected {IDS}, got"),
        ("/generate", {"input_ids": [97, ...]}, f"input_ids: expected {IDS}, got"),
        (
            "/generate",
            {"text": "a", "sampling_params": {"sampling_seed": ...}},
            f"sampling_params.sampling_seed: expected {SEED_RANGE}, got",
        ),
        ("/detokenize", {"tokens": [97, ...]}, f"tokens: expected {IDS}, got"),
        ("/pin", {"prompt": [97, ...], "ttl_s": 5}, f"prompt: expected {IDS}, got"),
    ],
)
async def test_an_integer_beyond_64_bits_is_shown_as_sent(
    served: Served, path: str, body: dict[str, Any], expected: str, value: int
) -> None:
    def filled(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: filled(item) for name, item in part.items()}
        return [filled(item) for item in part] if isinstance(part, list) else value if part is ... else part

    assert await message_of(served, path, filled(body)) == f"{expected} {value}"


async def test_in_a_large_body_at_least_the_range_is_named(served: Served) -> None:
    message = await message_of(served, "/v1/completions", {"seed": 2**64, "prompt": "a", "x": "y" * 90_000})
    assert message == f"seed: expected {SEED_RANGE}, got {2**64}"
    served.app.state.context.config = type(served.app.state.context.config)()
    message = await message_of(served, "/v1/completions", {"seed": 2**64, "prompt": "a", "x": "y" * 200_000})
    assert message.startswith("seed: expected an integer in [-2**63, 2**63 - 1], got ")


async def test_the_key_of_a_bias_is_shown_as_sent(served: Served) -> None:
    message = await message_of(served, "/v1/completions", {"prompt": "a", "logit_bias": {str(2**64): 1}})
    assert IDS in message and str(2**64) in message


async def test_a_number_takes_an_integer_of_any_size(served: Served) -> None:
    message = await message_of(served, "/v1/completions", {"prompt": "a", "temperature": 10**300})
    assert message == "temperature: expected a number in [0.0, 100.0], got 1e+300"


@pytest.mark.parametrize("stop", ["", [""], ["a", ""]])
async def test_an_empty_stop_string_is_named_in_words_of_json(served: Served, stop: Any) -> None:
    message = await message_of(served, "/v1/completions", {"prompt": "a", "stop": stop})
    shown = json.dumps(stop, separators=(",", ":"))
    assert message == f"stop: expected a string or a list of strings, none of them empty, got {shown}"
