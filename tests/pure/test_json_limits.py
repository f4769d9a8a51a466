"""What a large body may hold, counted before it is parsed: strings do not count, wherever the slices cut them."""

import json
import random

import pytest

from radixserve.errors import InvalidRequestError
from radixserve.server import json_limits
from radixserve.server.json_limits import check_num_values

MANY = json_limits.MAX_CONTAINERS + 1


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"prompt": [' + b"[]," * 400_000 + b"[]]}", "at most 250000 lists, objects and names of fields, got 400004"),
        (b'{"x": [' + b"{}," * 400_000 + b"{}]}", "at most 250000 lists, objects and names of fields, got 400004"),
        (b"{" + b",".join(b'"%d":1' % i for i in range(MANY)) + b"}", "at most 250000 lists, objects and names of fields, got 250002"),
        (b'{"p": [' + b"1," * 2_000_001 + b"1]}", "at most 2000000 commas between values, got 2000001"),
    ],
)
def test_too_many_values_are_refused_with_limit_and_count(body: bytes, expected: str) -> None:
    with pytest.raises(InvalidRequestError, match=expected):
        check_num_values(body)


@pytest.mark.parametrize("text", ["[{:,", '[{:,"', "[\\\\", '\\"[', "[" * 7 + "\\" * 5])
def test_a_text_full_of_brackets_is_none(text: str) -> None:
    check_num_values(json.dumps({"prompt": text * (10 * 2**20 // len(text)), "max_tokens": 1}).encode())


def test_small_bodies_are_not_counted() -> None:
    check_num_values(b"[" * (json_limits.COUNTED_FROM_BYTES - 1))


def test_the_count_is_that_of_the_parsed_values_wherever_slices_end(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(7)

    def value(depth: int) -> object:
        kind = rng.randrange(5 if depth < 5 else 3)
        if kind < 3:
            return "".join(rng.choices('a[{:,"\\\n', k=rng.randrange(8)))
        items = [value(depth + 1) for _ in range(rng.randrange(5))]
        return items if kind == 3 else {f'"\\{{:[{index}': item for index, item in enumerate(items)}

    def count(value: object) -> int:
        if isinstance(value, list):
            return 1 + sum(map(count, value))
        return 1 + len(value) + sum(map(count, value.values())) if isinstance(value, dict) else 0

    monkeypatch.setattr(json_limits, "COUNTED_FROM_BYTES", 0)
    num_large = 0
    for _ in range(300):
        tree = [value(0) for _ in range(4)]
        body, expected = json.dumps(tree).encode(), count(tree)
        num_large += expected > 10
        monkeypatch.setattr(json_limits, "_SLICE_BYTES", rng.randrange(1, 12))
        monkeypatch.setattr(json_limits, "MAX_CONTAINERS", expected)
        check_num_values(body)
        monkeypatch.setattr(json_limits, "MAX_CONTAINERS", expected - 1)
        with pytest.raises(InvalidRequestError, match=f"got {expected}$"):
            check_num_values(body)
    assert num_large > 50
