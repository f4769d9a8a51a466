"""From a trace to a load of any size: copies of it side by side, whose prompts are strangers but for what everybody has in common."""

import random
from array import array
from collections import Counter

import numpy as np

from bench.simulator.trace import Trace, TraceError
from radixserve.core import IntArray, Request, SamplingParams

COMMON_SHARE = 0.1  # a block that so many of the trace's requests hold is everybody's (a system prompt), and stays so over copies
END_OF_ANSWER = 2**31 - 1  # the token that ends an answer before max_tokens; no trace may hold it


class Load:
    """Requests 0 .. num_requests - 1 in order of arrival. Equal arguments give equal loads.

    Copy 0 is the trace itself. Each other copy starts at a random point of the trace and goes on at its beginning, so that the rate is
    even; conversations across that seam lose their earlier turns.
    rate_hz: arrivals per second of all copies together (default: as they come).
    max_tokens: what clients ask for, where answers end earlier (default: exactly what the answer takes).
    """

    def __init__(
        self, trace: Trace, num_requests: int | None = None, rate_hz: float | None = None, seed: int = 0, max_tokens: int | None = None
    ) -> None:
        num_base = len(trace.requests)
        self.trace = trace
        self.num_requests = num_requests or num_base
        self.max_tokens = max_tokens
        num_copies = -(-self.num_requests // num_base)
        if num_copies > 1 and trace.requests[0].prompt_ids is not None:
            raise TraceError(f"{trace.name}: expected at most the {num_base} requests of a trace of token ids, got {num_requests}")
        self._stride = trace.num_block_ids
        if self._stride * num_copies >= END_OF_ANSWER:
            raise TraceError(f"{trace.name}: {num_copies} copies of {self._stride} blocks are more than int32 can name")
        counts = Counter(block for request in trace.requests for block in request.block_ids)
        self._common = {block for block, count in counts.items() if count > COMMON_SHARE * num_base}
        self._place(num_copies, rate_hz, seed)

    def _place(self, num_copies: int, rate_hz: float | None, seed: int) -> None:
        rng = random.Random(f"load/{seed}")
        trace, num_base = self.trace, len(self.trace.requests)
        period_s = trace.span_s * (1 + 1 / num_base)
        times = np.array([request.arrival_s for request in trace.requests]) - trace.requests[0].arrival_s
        parts = [times] + [(times + rng.uniform(0, period_s)) % period_s for _ in range(num_copies - 1)]
        arrivals = np.concatenate(parts)[: self.num_requests]
        order = np.argsort(arrivals, kind="stable")
        arrivals = arrivals[order]
        if rate_hz is not None and arrivals[-1] > 0:
            arrivals = arrivals * (self.num_requests / rate_hz / float(arrivals[-1]))
        self._arrivals: array[float] = array("d", arrivals.tolist())
        self._origins: IntArray = array("i", order.tolist())  # copy * num_base + index

    def arrival_s(self, number: int) -> float:
        return self._arrivals[number]

    def output_len(self, number: int) -> int:
        return self.trace.requests[self._origins[number] % len(self.trace.requests)].output_len

    def output_ids(self, number: int) -> IntArray | None:
        return self.trace.requests[self._origins[number] % len(self.trace.requests)].output_ids

    def prompt_len(self, number: int) -> int:
        return self.trace.requests[self._origins[number] % len(self.trace.requests)].prompt_len

    def prompt_blocks(self, number: int) -> IntArray:
        """Of the prompt alone, a partial last one included where it has a name: what a router sees."""
        return self.block_ids(number)[: -(-self.prompt_len(number) // self.trace.page_size)]

    def block_ids(self, number: int) -> IntArray:
        """See TraceRequest."""
        copy, index = divmod(self._origins[number], len(self.trace.requests))
        block_ids = self.trace.requests[index].block_ids
        if copy == 0:
            return block_ids
        shift, common = copy * self._stride, self._common
        return array("i", [block if block in common else block + shift for block in block_ids])

    def whole_blocks(self, number: int) -> IntArray:
        """Blocks that it leaves in the tree for others."""
        is_named_to_its_end = self.output_ids(number) is not None
        block_ids = self.block_ids(number)
        return block_ids if is_named_to_its_end else block_ids[: self.prompt_len(number) // self.trace.page_size]

    def num_reusable(self, number: int) -> int:
        """Blocks that a request can re-use at most: whole ones that leave a token to compute."""
        return (self.prompt_len(number) - 1) // self.trace.page_size

    def request(self, number: int) -> Request:
        prompt_ids = self.trace.prompt(self._origins[number] % len(self.trace.requests), self.prompt_blocks(number))
        output_len = self.output_len(number)
        max_tokens = output_len if self.max_tokens is None else max(self.max_tokens, output_len)
        return Request(str(number), prompt_ids, SamplingParams(max_tokens=max_tokens, ignore_eos=self.max_tokens is None))

    @property
    def longest(self) -> int:
        """Prompt and max_tokens of the longest request."""
        return max(request.prompt_len + max(request.output_len, self.max_tokens or 0) for request in self.trace.requests)
