"""RequestState: what the scheduler knows of one request, waiting or running."""

from array import array

from radixserve.core import FinishReason, IntArray, PageWrite, Request, RequestOutput, RowLogprobs, ScheduledRow
from radixserve.tree.page_path import PagePath

NO_TOKENS: IntArray = array("i")
UNKNOWN = -1  # the last of token_ids, while the step that draws it has not been answered


class RequestState:
    """Positions of the sequence, as half-open ranges:

    [0, num_prompt) prompt   [num_prompt, len(token_ids)) output   [0, num_computed) K and V are in path.pages

    The last sampled token has no K and V yet: num_computed <= len(token_ids) - 1 while it decodes.

    When a step is planned before the one under way was answered, that one's rows are assumed first: computed, with an UNKNOWN token.
    """

    __slots__ = (
        "arrival",
        "arrival_pass",
        "arrival_s",
        "first_row_sent",
        "has_ended",
        "has_sampled",
        "is_guaranteed",
        "leader",
        "next_scored",
        "num_cached",
        "num_computed",
        "num_output_at_retraction",
        "num_pinned",
        "num_prompt",
        "num_retractions",
        "num_unanswered",
        "page_writes",
        "path",
        "queue_time_s",
        "request",
        "slot",
        "token_ids",
        "total_pages",
    )

    def __init__(self, request: Request, arrival_s: float, total_pages: int, arrival: int = 0) -> None:
        self.request = request
        self.num_prompt = len(request.prompt_ids)
        self.arrival = arrival  # the how many-th request it is; kept when it is retracted
        self.arrival_s = arrival_s
        self.token_ids: IntArray = request.prompt_ids[:]
        self.total_pages = total_pages  # of prompt and max_tokens
        self.arrival_pass = -1  # passes of admissions before it came to wait first; -1: not yet
        self.leader: int | None = None  # `arrival` of the one that it waits for since it is overdue
        self.queue_time_s = 0.0
        self.num_cached = 0
        self.num_retractions = 0  # under memory pressure, or in favour of a more urgent one
        self.is_guaranteed = False  # all of total_pages is promised to it: it may not be retracted any more
        self.num_output_at_retraction = -1  # at the last one; -1: never
        sampling = request.sampling
        # the first prompt position whose log-probability is wanted and was not sent yet; at least the prompt's length where none is
        self.next_scored = self.num_prompt if sampling.prompt_logprobs is None else max(1, sampling.prompt_logprobs_start)
        self.num_pinned: int | None = None  # tokens of the prompt, where a pin was asked for and is done
        # from here on: while it runs
        self.path: PagePath | None = None
        self.slot = -1
        self.num_computed = 0
        self.page_writes: list[PageWrite] = []  # that the runner has not seen yet
        self.first_row_sent = False
        self.has_sampled = False  # in this slot: the runner knows the last token
        self.num_unanswered = 0  # of its rows
        self.has_ended = False  # what still comes for it is thrown away

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def max_cached(self) -> int:
        """Tokens that may be re-used: the logits that score position next_scored are those of the position before it."""
        return (self.next_scored if self.next_scored < self.num_prompt else len(self.token_ids)) - 1

    def cacheable_tokens(self) -> bytes:
        """Those tokens, int32 each."""
        return self.token_ids[: max(0, self.max_cached)].tobytes()

    @property
    def is_decoding(self) -> bool:
        """Its next row is the single token that the runner sampled last."""
        return self.has_sampled and self.num_uncomputed == 1

    @property
    def is_ending(self) -> bool:
        """What is under way ends it, whatever token comes: no further row is to be planned."""
        wanted = self.request.sampling.max_tokens
        return self.num_unanswered > 0 and (self.num_uncomputed == 0 or (self.token_ids[-1] == UNKNOWN and self.num_output >= wanted))

    @property
    def num_pages(self) -> int:
        """Pages that it holds."""
        return len(self.path.pages) if self.path is not None else 0

    @property
    def was_retracted(self) -> bool:
        return self.num_output_at_retraction >= 0

    def next_row(self, count: int) -> ScheduledRow:
        """The next `count` positions of one that is not decoding, for whose pages there is room; it tells the runner what is new to it."""
        start, end = self.num_computed, self.num_computed + count
        # logits at position p score the token at p + 1
        target_start = max(start, self.next_scored - 1)
        target_end = max(target_start, min(end, self.num_prompt - 1))
        row = ScheduledRow(
            slot=self.slot,
            start=start,
            count=count,
            token_ids=self.token_ids[start:end],
            page_writes=tuple(self.page_writes),
            is_sampled=end == len(self.token_ids) and self.request.sampling.max_tokens > 0,
            output_index=self.num_output,
            request=None if self.first_row_sent else self.request,
            output_ids=NO_TOKENS if self.first_row_sent else self.token_ids[self.num_prompt :],
            target_ids=self.token_ids[target_start + 1 : target_end + 1],
            target_start=target_start,
        )
        self.page_writes = []
        self.first_row_sent = True
        self.has_sampled |= row.is_sampled
        self.next_scored += len(row.target_ids)
        return row

    def next_decode_row(self) -> ScheduledRow:
        """The next position of one that is decoding: the runner knows all but its pages, and no prompt position is left to score."""
        row = ScheduledRow(
            self.slot,
            self.num_computed,
            1,
            NO_TOKENS,
            tuple(self.page_writes),
            output_index=len(self.token_ids) - self.num_prompt,
            output_ids=NO_TOKENS,
            target_ids=NO_TOKENS,
            target_start=self.num_computed,
        )
        if self.page_writes:
            self.page_writes = []
        return row

    def assume(self, row: ScheduledRow) -> None:
        """The row's positions count as computed from now on; the token that it draws comes with the answer."""
        self.num_computed += row.count
        if row.is_sampled:
            self.token_ids.append(UNKNOWN)

    def learn(self, token_id: int) -> None:
        """The token that was assumed."""
        assert self.token_ids[-1] == UNKNOWN, f"{self.request.request_id}: expected an unknown last token, got {self.token_ids[-1]}"
        self.token_ids[-1] = token_id

    def forget_unknown(self) -> None:
        """It ends before its last token is known."""
        if self.token_ids[-1] == UNKNOWN:
            del self.token_ids[-1]

    def retract(self) -> None:
        """Back to waiting, without pages and slot: once admitted again, it computes anew what the tree does not have."""
        assert not self.num_unanswered, f"{self.request.request_id}: expected all tokens known, got {self.num_unanswered} rows under way"
        self.path, self.slot, self.num_computed, self.page_writes = None, -1, 0, []
        self.first_row_sent = self.has_sampled = False
        self.num_output_at_retraction = self.num_output

    def output(
        self,
        token_ids: tuple[int, ...],
        reason: FinishReason | None = None,
        stop_token_id: int | None = None,
        logprobs: RowLogprobs | None = None,
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self.request.request_id,
            token_ids=token_ids,
            num_prompt_tokens=self.num_prompt,
            num_cached_tokens=self.num_cached,
            num_output_tokens=self.num_output,
            finish_reason=reason,
            stop_token_id=stop_token_id,
            queue_time_s=self.queue_time_s,
            logprobs=(logprobs.sampled,) if logprobs is not None and logprobs.sampled is not None else (),
            prompt_logprobs=logprobs.prompt if logprobs is not None else (),
            num_pinned_tokens=self.num_pinned,
        )

    def needs_page(self, count: int, page_size: int) -> bool:
        """Whether the next `count` positions need a page that it does not hold."""
        assert self.path is not None
        return self.num_computed + count > len(self.path.pages) * page_size

    def finish_reason(self, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Does the last sampled token end it?"""
        sampling, token_id = self.request.sampling, self.token_ids[-1]
        if token_id in sampling.stop_token_ids or (token_id in eos_token_ids and not sampling.ignore_eos):
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_output >= sampling.max_tokens else None
