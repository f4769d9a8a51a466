"""RequestState: what the scheduler knows of one request, waiting or running."""

from radixserve.core import FinishReason, IntArray, PageWrite, Request
from radixserve.tree.prefix_cache import PagePath


class RequestState:
    """Positions of the sequence, as half-open ranges:

    [0, num_prompt) prompt   [num_prompt, len(token_ids)) output   [0, num_computed) K and V are in path.pages

    The last sampled token has no K and V yet: num_computed <= len(token_ids) - 1 while it decodes.
    """

    __slots__ = (
        "arrival_s",
        "first_row_sent",
        "match_version",
        "matched",
        "num_cached",
        "num_computed",
        "page_writes",
        "path",
        "queue_time_s",
        "request",
        "slot",
        "token_ids",
        "total_pages",
    )

    def __init__(self, request: Request, arrival_s: float, total_pages: int) -> None:
        self.request = request
        self.arrival_s = arrival_s
        self.token_ids: IntArray = request.prompt_ids[:]
        self.total_pages = total_pages  # of prompt and max_tokens: what admission reserves
        self.matched = 0  # tokens re-used if it were admitted at match_version
        self.match_version = -1
        self.queue_time_s = 0.0
        self.num_cached = 0
        # from here on: while it runs
        self.path: PagePath | None = None
        self.slot = -1
        self.num_computed = 0
        self.page_writes: list[PageWrite] = []  # that the runner has not seen yet
        self.first_row_sent = False

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Its next row is the single token that the runner sampled last."""
        return self.num_output > 0 and self.num_uncomputed == 1 and self.first_row_sent

    @property
    def reserved_pages(self) -> int:
        """Pages that admission promised it and that it does not hold yet."""
        return self.total_pages - len(self.path.pages) if self.path is not None else 0

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
