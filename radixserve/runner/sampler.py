"""Sampler: from logits (those of adjustments.py) and settings to one token per row, all rows in one batch of tensor operations.

Greedy (temperature 0 or top_k 1): argmax of the float32 logits, the lowest id among equals. Otherwise, in this order:
  1. p = softmax(logits / temperature)
  2. top_k   keep the k likeliest; among equals the lower id comes first
  3. top_p   of what is left, renormalised: keep the shortest run of likeliest tokens whose mass reaches top_p, the first always
  4. min_p   keep tokens with p >= min_p * (largest p); renormalising changes nothing here
  5. draw    the first id, in the order of ids, at which the running sum of the kept p exceeds u * (their total)
A row's token depends on its own logits, settings and u alone, never on the rows beside it.

On a CPU whose native library is there, all of this is one call (native/csrc/sampler.cpp); elsewhere torch does it.

A NaN logit counts as -inf and +inf as the largest float. A row without any finite logit gives token 0 and is logged.
"""

import ctypes
import logging
from dataclasses import dataclass
from math import isfinite

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from radixserve.kv import pinned
from radixserve.native import check, loaded_library

_LOG = logging.getLogger(__name__)
_NO_TOP_K = np.iinfo(np.int64).max
_TINY = float(np.finfo(np.float32).tiny)
_MAX = float(np.finfo(np.float32).max)
# top_k and top_p cuts are looked for among so many likeliest tokens before a row is sorted whole
_NUM_CANDIDATES = 512
# of the rows that are sorted whole: a sort takes several times the memory of what it sorts
ROWS_SORTED_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Settings of the rows of one call, on the host."""

    greedy: npt.NDArray[np.bool_]
    temperature: npt.NDArray[np.float64]
    top_k: npt.NDArray[np.int64]  # 0 or less: off
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    uniform: npt.NDArray[np.float64]  # in [0, 1)


def sample(logits: torch.Tensor, rows: SamplingRows | None) -> torch.Tensor:
    """logits [n, vocab_size] float32 -> token ids [n] int64, on the same device. No settings: all rows are greedy."""
    if rows is None:
        return _argmax(logits)
    n = len(rows.greedy)
    assert logits.shape[:-1] == (n,), f"sample: expected logits of {n} rows, got shape {tuple(logits.shape)}"
    if rows.greedy.all():
        return _argmax(logits)
    token_ids = torch.empty(n, dtype=torch.int64, device=logits.device)
    greedy, drawn = np.flatnonzero(rows.greedy), np.flatnonzero(~rows.greedy)
    if len(greedy):
        index = pinned.send(greedy, logits.device)
        token_ids.index_copy_(0, index, _argmax(logits.index_select(0, index)))
    library = loaded_library() if logits.device.type == "cpu" else None
    if library is not None:
        _draw_natively(library, logits, rows, drawn, token_ids)
        return token_ids
    index = pinned.send(drawn, logits.device)
    token_ids.index_copy_(0, index, _draw(logits.index_select(0, index), rows, drawn))
    return token_ids


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    if logits.device.type == "cpu":  # numpy's is three to five times as fast as torch's
        host = logits.numpy()
        best = host.argmax(axis=-1)
        # argmax takes NaN for the largest, so a row with one shows it in its winner
        if all(isfinite(host.item(row, token_id)) for row, token_id in enumerate(best.tolist())):
            return torch.from_numpy(best)
    return _clean(logits).argmax(dim=-1)


def _clean(logits: torch.Tensor) -> torch.Tensor:
    """Logits without NaN and +inf; on a CPU it logs rows that have nothing left. Elsewhere a look at them would wait for the device."""
    clean = torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=_MAX, neginf=-torch.inf)
    if clean.device.type == "cpu" and (num_empty := int(count_empty(clean))):
        warn_of_empty(num_empty, clean.shape[0])
    return clean


def count_empty(logits: torch.Tensor) -> torch.Tensor:
    """logits [n, vocab_size] -> [1] int64: rows without a logit that can be drawn, for warn_of_empty()."""
    return (logits > -torch.inf).any(dim=-1).logical_not().sum(dim=0, keepdim=True)


def warn_of_empty(num_empty: int, n: int) -> None:
    _LOG.warning("sampler: %d of %d rows have no finite logit; token 0 is given for them", num_empty, n)


def _draw_natively(
    library: ctypes.CDLL, logits: torch.Tensor, rows: SamplingRows, which: npt.NDArray[np.int64], token_ids: torch.Tensor
) -> None:
    """Write token_ids[row] for each row in `which`."""
    n, vocab_size = len(which), logits.shape[1]
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, f"sample: expected dense float32 rows, got {logits.dtype}"
    top_k = rows.top_k[which]
    top_k = np.where(top_k < 1, _NO_TOP_K, top_k)
    temperature = np.maximum(rows.temperature[which], _TINY).astype(np.float32)
    top_p, min_p, uniform = rows.top_p[which], rows.min_p[which].astype(np.float32), rows.uniform[which]
    settings = [of_rows.ctypes.data for of_rows in (temperature, top_k, top_p, min_p, uniform)]
    status = library.radixserve_sample(
        n, which.ctypes.data, logits.data_ptr(), logits.stride(0), vocab_size, *settings, token_ids.data_ptr()
    )
    check(library, status, "the weights of a row that is sampled")
    is_empty = token_ids < 0
    if bool(is_empty.any()):
        warn_of_empty(int(is_empty.sum()), n)
        token_ids.clamp_(min=0)


def _draw(logits: torch.Tensor, rows: SamplingRows, which: npt.NDArray[np.int64]) -> torch.Tensor:
    """Token ids [n] of rows `which`, whose logits are [n, vocab_size]."""
    device, vocab_size = logits.device, logits.shape[1]
    clean = _clean(logits)
    largest = clean.amax(dim=-1, keepdim=True)
    has_any = largest > -torch.inf
    # the largest is taken away first: dividing by a tiny temperature then only sends the others to -inf
    temperature = pinned.send(np.maximum(rows.temperature[which], _TINY).astype(np.float32), device)[:, None]
    p = torch.softmax((clean - torch.where(has_any, largest, 0.0)) / temperature, dim=-1)
    p = torch.where(has_any, p, 0.0)

    top_k, top_p, min_p = rows.top_k[which], rows.top_p[which], rows.min_p[which]
    top_k = np.where((top_k < 1) | (top_k >= vocab_size), _NO_TOP_K, top_k)
    filtered = np.flatnonzero((top_k < vocab_size) | (top_p < 1.0))
    if len(filtered):
        index = pinned.send(filtered, device)
        k = pinned.send(top_k[filtered], device)
        mass = pinned.send(top_p[filtered], device)
        p.index_copy_(0, index, _keep_likeliest(p.index_select(0, index), clean.index_select(0, index), k, mass))
    if (min_p > 0).any():
        floor = p.amax(dim=-1, keepdim=True) * pinned.send(min_p.astype(np.float32), device)[:, None]
        p = torch.where(p >= floor, p, 0.0)
    return _inverse_cdf(p, pinned.send(rows.uniform[which], device))


def _inverse_cdf(p: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """First index at which the running sum of p [n, vocab_size] exceeds uniform * total; 0 where the total is 0."""
    cdf = p.cumsum(dim=-1, dtype=torch.float64)
    total = cdf[:, -1:]
    token_ids = torch.searchsorted(cdf, uniform[:, None] * total, right=True)
    return torch.where(total > 0, token_ids, 0)[:, 0]


def _keep_likeliest(p: torch.Tensor, logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """p [n, vocab_size] with 0 outside of the top_k [n] and then top_p [n] cut.

    Ordered by logits, since p has equals where logits differ. Sorting a vocabulary is slow, so the cut is first looked for among
    the likeliest few. Where it lies above the last of those, or p is 0 there, what is outside cannot matter, and the result is
    the very one of the full sort.
    """
    vocab_size = p.shape[1]
    num_candidates = min(_NUM_CANDIDATES, vocab_size)
    ids = logits.topk(num_candidates, dim=-1).indices.sort(dim=-1).values  # ascending, for the stable sort to keep equals in that order
    sorted_logits, order = torch.sort(logits.gather(1, ids), dim=-1, descending=True, stable=True)
    sorted_ids = ids.gather(1, order)
    sorted_p = p.gather(1, sorted_ids)
    num_kept, is_final = _count_kept(sorted_p, top_k, top_p)
    last_kept = sorted_logits.gather(1, num_kept[:, None] - 1)[:, 0]
    is_exact = is_final & ((last_kept > sorted_logits[:, -1]) | (sorted_p[:, -1] == 0) | (num_candidates == vocab_size))
    kept = _scatter_kept(p, sorted_ids, num_kept)
    if not bool(is_exact.all()):
        for rest in torch.split((~is_exact).nonzero()[:, 0], ROWS_SORTED_AT_ONCE):
            rest_p = p.index_select(0, rest)
            sorted_ids = torch.sort(logits.index_select(0, rest), dim=-1, descending=True, stable=True).indices
            num_kept, _ = _count_kept(rest_p.gather(1, sorted_ids), top_k[rest], top_p[rest])
            kept.index_copy_(0, rest, _scatter_kept(rest_p, sorted_ids, num_kept))
    return kept


def _count_kept(sorted_p: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many leading entries of sorted_p [n, m] both cuts keep (at least 1), and whether that is so whatever follows; both [n]."""
    m = sorted_p.shape[1]
    cdf = sorted_p.cumsum(dim=-1, dtype=torch.float64)
    has_k = top_k <= m
    # without a top_k cut p is already normalised; its float64 sum over the whole vocabulary need not be known
    total = torch.where(has_k, cdf.gather(1, (top_k.clamp(max=m) - 1)[:, None])[:, 0], 1.0)
    needed = top_p * total
    before = F.pad(cdf[:, :-1], (1, 0))
    num_by_p = torch.where(top_p < 1.0, (before < needed[:, None]).sum(dim=-1), m)
    num_kept = torch.minimum(torch.minimum(num_by_p, top_k), torch.full_like(top_k, m)).clamp(min=1)
    # a row with a top_k beyond m cannot be renormalised here; one without needs its top_p cut to lie inside
    is_final = has_k | ((top_k == _NO_TOP_K) & (num_by_p < m))
    return num_kept, is_final


def _scatter_kept(p: torch.Tensor, sorted_ids: torch.Tensor, num_kept: torch.Tensor) -> torch.Tensor:
    keep_sorted = torch.arange(sorted_ids.shape[1], device=p.device)[None] < num_kept[:, None]
    keep = torch.zeros_like(p, dtype=torch.bool).scatter_(1, sorted_ids, keep_sorted)
    return torch.where(keep, p, 0.0)
