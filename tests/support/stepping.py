"""Hand-made ScheduledBatches: what a scheduler would do, reduced to the page arithmetic, with pages taken from a shuffled list."""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from radixserve.core import IntArray, PageWrite, Request, SamplingParams, ScheduledBatch, ScheduledRow, StepOutput, TokenLogprob
from radixserve.runner import ModelRunner


@dataclass(slots=True)
class Running:
    """A request in a slot: prompt tokens still to compute are prompt_ids[num_computed:].

    One that begins with output_ids resumes: prompt_ids then ends with them.
    """

    slot: int
    prompt_ids: list[int]
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    seed: int = 0
    choice_index: int = 0
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    output_ids: list[int] = field(default_factory=list)
    pending_writes: list[PageWrite] = field(default_factory=list)
    was_seen: bool = False
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    def share(self, other: "Running", num_pages: int, page_size: int) -> None:
        """Begin with the first pages of another request, as after a hit in the tree."""
        self.pages = other.pages[:num_pages]
        self.num_computed = num_pages * page_size
        self.pending_writes.append(PageWrite(0, array("i", self.pages)))


class Stepper:
    """Drives a ModelRunner. Page ids are handed out in a shuffled order, so neighbours in a sequence are strangers in the pool."""

    def __init__(self, runner: ModelRunner, num_pages: int, page_size: int, seed: int = 0) -> None:
        self.runner = runner
        self.page_size = page_size
        self.free_pages = list(range(1, num_pages + 1))
        random.Random(seed).shuffle(self.free_pages)
        self.step = 0

    def row(self, running: Running, count: int = 0) -> ScheduledRow:
        """The next `count` prompt tokens of a request, or its next decode step where the prompt is done."""
        start = running.num_computed
        chunk = array("i", running.prompt_ids[start : start + count])
        end = start + max(len(chunk), 1)
        num_new = -(-end // self.page_size) - len(running.pages)
        if num_new > 0:
            new_pages = [self.free_pages.pop() for _ in range(num_new)]
            running.pending_writes.append(PageWrite(len(running.pages), array("i", new_pages)))
            running.pages += new_pages
        request, output_ids = None, array("i")
        if not running.was_seen:
            output_ids = array("i", running.output_ids)
            ids = array("i", running.prompt_ids[: len(running.prompt_ids) - len(output_ids)])
            request = Request(f"slot-{running.slot}", ids, running.sampling, seed=running.seed, choice_index=running.choice_index)
        writes, running.pending_writes, running.was_seen, running.num_computed = tuple(running.pending_writes), [], True, end
        first_target, target_ids = self._targets(running, start, end)
        is_sampled = end >= len(running.prompt_ids) and running.sampling.max_tokens > 0
        return ScheduledRow(
            slot=running.slot,
            start=start,
            count=end - start,
            token_ids=chunk,
            page_writes=writes,
            is_sampled=is_sampled,
            output_index=len(running.output_ids),
            request=request,
            output_ids=output_ids,
            target_ids=target_ids,
            target_start=first_target,
        )

    def _targets(self, running: Running, start: int, end: int) -> tuple[int, IntArray]:
        """Wanted prompt tokens from first + 1 on whose logits a row over start .. end computes; the next chunk's first is one."""
        if running.sampling.prompt_logprobs is None:
            return 0, array("i")
        first = max(start, running.sampling.prompt_logprobs_start - 1)
        return first, array("i", running.prompt_ids[first + 1 : end + 1])

    def execute(self, work: Sequence[tuple[Running, int]], freed_slots: tuple[int, ...] = ()) -> StepOutput:
        """One step; work is (request, number of prompt tokens, 0 for decode)."""
        decode_first = sorted(work, key=lambda item: item[1] > 0)
        rows = tuple(self.row(running, count) for running, count in decode_first)
        output = self.runner.execute(ScheduledBatch(self.step, rows, freed_slots))
        assert output.step == self.step
        self.step += 1
        logprobs = output.logprobs or (None,) * len(rows)
        for (running, _), row, token_id, row_logprobs in zip(decode_first, rows, output.token_ids, logprobs, strict=True):
            assert (token_id >= 0) == row.is_sampled
            if row.is_sampled:
                running.output_ids.append(token_id)
            wants_sampled = row.is_sampled and running.sampling.logprobs is not None
            assert (row_logprobs is not None) == bool(wants_sampled or row.target_ids)
            if row_logprobs is not None:
                assert len(row_logprobs.prompt) == len(row.target_ids)
                running.prompt_logprobs += row_logprobs.prompt
                assert (row_logprobs.sampled is not None) == wants_sampled
                if row_logprobs.sampled is not None:
                    running.logprobs.append(row_logprobs.sampled)
        return output

    def generate(self, running: Running, num_tokens: int, chunk: int = 1 << 30) -> list[int]:
        """Prefill in chunks of so many tokens, then decode alone until there are num_tokens output tokens."""
        while running.num_computed < len(running.prompt_ids):
            self.execute([(running, min(chunk, len(running.prompt_ids) - running.num_computed))])
        while len(running.output_ids) < num_tokens:
            self.execute([(running, 0)])
        return running.output_ids
