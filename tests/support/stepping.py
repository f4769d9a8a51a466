"""Hand-made ScheduledBatches: what a scheduler would do, reduced to the page arithmetic, with pages taken from a shuffled list."""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from radixserve.core import PageWrite, Request, SamplingParams, ScheduledBatch, ScheduledRow, StepOutput
from radixserve.runner import ModelRunner


@dataclass(slots=True)
class Running:
    """A request in a slot: prompt tokens still to compute are prompt_ids[num_computed:]."""

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
        request = None
        if not running.was_seen:
            name = f"slot-{running.slot}"
            ids = array("i", running.prompt_ids)
            request = Request(name, ids, running.sampling, seed=running.seed, choice_index=running.choice_index)
        writes, running.pending_writes, running.was_seen, running.num_computed = tuple(running.pending_writes), [], True, end
        num_logits = int(end >= len(running.prompt_ids))
        return ScheduledRow(running.slot, start, end - start, chunk, writes, num_logits, len(running.output_ids), request)

    def execute(self, work: Sequence[tuple[Running, int]], freed_slots: tuple[int, ...] = ()) -> StepOutput:
        """One step; work is (request, number of prompt tokens, 0 for decode)."""
        decode_first = sorted(work, key=lambda item: item[1] > 0)
        rows = tuple(self.row(running, count) for running, count in decode_first)
        output = self.runner.execute(ScheduledBatch(self.step, rows, freed_slots))
        assert output.step == self.step
        self.step += 1
        for (running, _), token_id in zip(decode_first, output.token_ids, strict=True):
            wanted = running.num_computed >= len(running.prompt_ids)
            assert (token_id >= 0) == wanted
            if wanted:
                running.output_ids.append(token_id)
        return output

    def generate(self, running: Running, num_tokens: int, chunk: int = 1 << 30) -> list[int]:
        """Prefill in chunks of so many tokens, then decode alone until there are num_tokens output tokens."""
        while running.num_computed < len(running.prompt_ids):
            self.execute([(running, min(chunk, len(running.prompt_ids) - running.num_computed))])
        while len(running.output_ids) < num_tokens:
            self.execute([(running, 0)])
        return running.output_ids
