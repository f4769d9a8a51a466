"""Small makers for the pure tests."""

from array import array
from collections.abc import Iterable

from radixserve.core import (
    BASE_NAMESPACE,
    Namespace,
    Request,
    RowLogprobs,
    SamplingParams,
    ScheduledBatch,
    ScheduledRow,
    StepOutput,
    TokenLogprob,
)
from radixserve.tree.key import TreeKey


def ints(*values: int | Iterable[int]) -> "array[int]":
    flat: list[int] = []
    for value in values:
        flat.extend([value] if isinstance(value, int) else value)
    return array("i", flat)


def key(*tokens: int | Iterable[int], namespace: Namespace = BASE_NAMESPACE) -> TreeKey:
    return TreeKey.of(namespace, ints(*tokens))


def layered_key(*segments: tuple[Namespace, Iterable[int]]) -> TreeKey:
    return TreeKey.layered((namespace, ints(tokens)) for namespace, tokens in segments)


def request(
    request_id: str, tokens: Iterable[int], max_tokens: int = 4, namespace: Namespace = BASE_NAMESPACE, **sampling: object
) -> Request:
    return Request(request_id, ints(tokens), SamplingParams(max_tokens=max_tokens, **sampling), namespace=namespace)  # type: ignore[arg-type]


class CountingRunner:
    """A runner without a model that behaves like one: the next token is a pure function of the whole sequence, read through the pages.

    It keeps a KV store of (position, token) by page, so that a wrong page id, a page written by two requests, or a stale page table gives
    another answer than a run alone.
    """

    def __init__(self, num_pages: int, page_size: int, vocab_size: int = 1000) -> None:
        self._store: list[tuple[int, int] | None] = [None] * ((num_pages + 1) * page_size)
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._tables: dict[int, dict[int, int]] = {}
        self._last: dict[int, int] = {}
        self._sampling: dict[int, SamplingParams] = {}
        self.num_computed = 0

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        token_ids: list[int] = []
        logprobs: list[RowLogprobs | None] = []
        for slot in batch.freed_slots:
            self._tables.pop(slot, None)
            self._last.pop(slot, None)
        for row in batch.rows:
            if row.request is not None:
                assert row.slot not in self._tables, "a slot was handed out before it was freed"
                self._sampling[row.slot] = row.request.sampling
            table = self._tables.setdefault(row.slot, {})
            for write in row.page_writes:
                table.update(enumerate(write.page_ids, write.first_page))
            tokens = list(row.token_ids) or [self._last[row.slot]]
            assert len(tokens) == row.count
            for position, token in enumerate(tokens, row.start):
                self._store[self._place(table, position)] = (position, token)
            self.num_computed += row.count
        for row in batch.rows:
            if row.is_sampled:
                self._last[row.slot] = self._next_token(self._tables[row.slot], row.start + row.count)
                token_ids.append(self._last[row.slot])
            else:
                token_ids.append(-1)
            logprobs.append(self._logprobs(row, token_ids[-1]))
        return StepOutput(batch.step, tuple(token_ids), logprobs=tuple(logprobs))

    def _logprobs(self, row: ScheduledRow, token_id: int) -> RowLogprobs | None:
        """The "log-probability" of a token is minus its position, so that tests see which position was meant."""
        sampling = self._sampling[row.slot]
        for j in range(len(row.target_ids)):
            assert row.start <= row.target_start + j < row.start + row.count
        prompt = tuple(TokenLogprob(token, -float(row.target_start + j + 1), ()) for j, token in enumerate(row.target_ids))
        wants_sampled = row.is_sampled and sampling.logprobs is not None
        sampled = TokenLogprob(token_id, -float(row.start + row.count), ()) if wants_sampled else None
        return RowLogprobs(sampled, prompt) if sampled or prompt else None

    def _place(self, table: dict[int, int], position: int) -> int:
        page = table[position // self._page_size]
        assert page > 0
        return page * self._page_size + position % self._page_size

    def _next_token(self, table: dict[int, int], length: int) -> int:
        digest = 7
        for position in range(length):
            held = self._store[self._place(table, position)]
            assert held is not None, f"position {position} was never computed"
            assert held[0] == position, f"the page of position {position} holds position {held[0]}"
            digest = (digest * 31 + held[1]) % 1_000_003
        return digest % self._vocab_size


def expected_tokens(prompt: Iterable[int], num_tokens: int, vocab_size: int = 1000) -> list[int]:
    """What CountingRunner answers to a prompt run alone."""
    tokens = list(prompt)
    start = len(tokens)
    for _ in range(num_tokens):
        digest = 7
        for token in tokens:
            digest = (digest * 31 + token) % 1_000_003
        tokens.append(digest % vocab_size)
    return tokens[start:]
