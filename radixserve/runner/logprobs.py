"""Natural log-probabilities of given tokens and of the likeliest ones: log_softmax, in float32, of the model's own logits, before
penalties, bias, temperature and filters. Ids outside of the logits given (a head's padding) take no part, not even in the sum.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from radixserve.core import TokenLogprob
from radixserve.runner.sampler import ROWS_SORTED_AT_ONCE

# logits and their log_softmax exist for so many rows at a time, which bounds memory at twice this many rows of a vocabulary
ROWS_AT_ONCE = 128
# equals of the last wanted token are looked for among so many more likeliest before a row is sorted whole
_NUM_SPARE = 44
_MAX = float(np.finfo(np.float32).max)


def token_logprobs(
    logits_of: Callable[[int, int], torch.Tensor], token_ids: torch.Tensor, num_top: Sequence[int], rows_at_once: int = ROWS_AT_ONCE
) -> list[TokenLogprob]:
    """One per token. logits_of(first, last) gives float32 [last - first, vocab_size]: the logits that token_ids[first:last] followed.

    token_ids [n] int64, on the logits' device; num_top [n]: how many of the likeliest, best first, the lower id first among equals.
    A NaN logit counts as -inf and +inf as the largest float. Where no finite number comes out, the lowest float stands for it: JSON
    knows no infinity.
    """
    result: list[TokenLogprob] = []
    for first, last in row_ranges(len(num_top), rows_at_once):
        result += _token_logprobs(logits_of(first, last), token_ids[first:last], num_top[first:last])
    return result


def row_ranges(num_rows: int, rows_at_once: int = ROWS_AT_ONCE) -> Iterator[tuple[int, int]]:
    """The (first, last) that token_logprobs asks for, in order."""
    return ((first, min(first + rows_at_once, num_rows)) for first in range(0, num_rows, rows_at_once))


def _token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int]) -> list[TokenLogprob]:
    logits = logits.float()
    logprobs = torch.log_softmax(logits, dim=-1)
    # one NaN or +inf makes its whole row NaN, and so does a row with nothing finite
    if bool(logprobs[:, 0].isnan().any()):
        logits = torch.nan_to_num(logits, nan=-torch.inf, posinf=_MAX, neginf=-torch.inf)
        logprobs = torch.log_softmax(logits, dim=-1)
    ids = likeliest(logits, max(num_top))
    # one gather for both, so that a token's own value is the very one of its entry among the likeliest
    values = logprobs.gather(1, torch.cat([token_ids[:, None], ids], dim=1)).nan_to_num(nan=-_MAX, neginf=-_MAX).tolist()
    return [
        TokenLogprob(token_id, row[0], tuple(zip(top_ids[:k], row[1 : k + 1], strict=True)))
        for token_id, row, top_ids, k in zip(token_ids.tolist(), values, ids.tolist(), num_top, strict=True)
    ]


def likeliest(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Ids [n, min(k, vocab_size)] of the largest logits [n, vocab_size] (no NaN), best first, the lower id first among equals."""
    vocab_size = logits.shape[1]
    k = min(k, vocab_size)
    if k == 0:
        return torch.empty(logits.shape[0], 0, dtype=torch.int64, device=logits.device)
    num_candidates = min(k + _NUM_SPARE, vocab_size)
    ids = logits.topk(num_candidates, dim=-1).indices.sort(dim=-1).values  # ascending, for the stable sort to keep equals in that order
    values, order = torch.sort(logits.gather(1, ids), dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)[:, :k]
    if num_candidates < vocab_size:
        # topk chooses freely among equals of its last; only where the cut lies above those is it exact
        for rest in torch.split((values[:, k - 1] == values[:, -1]).nonzero()[:, 0], ROWS_SORTED_AT_ONCE):
            ids[rest] = torch.sort(logits[rest], dim=-1, descending=True, stable=True).indices[:, :k]
    return ids
