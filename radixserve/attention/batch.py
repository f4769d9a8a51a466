"""ForwardBatch: the tensors of one step, in FlashInfer's terms. An argument of model and backend, never a global.

    tokens   |-- row 0 --|-- row 1 --| ...            decode rows (one token each) first, then prompt chunks
    row i    input_ids[qo_indptr[i] : qo_indptr[i+1]]
    pages    kv_indices[kv_indptr[i] : kv_indptr[i+1]], the last of them filled up to kv_last_page_len[i] after this step's write
    seq_lens[i] == (kv_indptr[i+1] - kv_indptr[i] - 1) * page_size + kv_last_page_len[i]      (this step's tokens included)
    out_slots[t] == page_id * page_size + offset      where K and V of token t are written

Masks are causal and last-token aligned: query j of a row with q queries and n keys sees keys 0 .. n - q + j.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    input_ids: torch.Tensor  # [num_tokens] int64, device
    positions: torch.Tensor  # [num_tokens] int64, device
    out_slots: torch.Tensor  # [num_tokens] int64, device
    qo_indptr: torch.Tensor  # [num_rows + 1] int32, device
    kv_indptr: torch.Tensor  # [num_rows + 1] int32, device; counts pages
    kv_indices: torch.Tensor  # [num_pages_of_all_rows] int32, device
    kv_last_page_len: torch.Tensor  # [num_rows] int32, device; 1 .. page_size
    seq_lens: torch.Tensor  # [num_rows] int32, device
    qo_indptr_host: torch.Tensor  # the same, on the host, for planners that read there
    kv_indptr_host: torch.Tensor
    kv_indices_host: torch.Tensor
    kv_last_page_len_host: torch.Tensor
    seq_lens_host: torch.Tensor
    # [num_sampled_rows + num_targets] int64, device; indices into the tokens: the last of each sampled row, then every position whose
    # logits give a prompt token's log-probability; both in row order
    logits_indices: torch.Tensor
    num_decode_rows: int
    page_size: int

    @property
    def num_rows(self) -> int:
        return self.qo_indptr_host.shape[0] - 1

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]


def padding_batch(
    input_ids: torch.Tensor,
    num_decode_rows: int,
    page_size: int,
    positions: torch.Tensor | None = None,
    rows: Sequence[tuple[int, int]] | None = None,
) -> ForwardBatch:
    """Rows that read the padding page alone and write to its first place: (tokens, new ones) of each, by default one token each.

    input_ids, positions (default: zeros) [n] int64, n being the number of new tokens in all.
    """
    n, device = input_ids.shape[0], input_ids.device
    lens = torch.tensor([(1, 1)] * n if rows is None else rows, dtype=torch.int32)
    seq_lens, q_lens = lens[:, 0].contiguous(), lens[:, 1]
    qo_indptr, kv_indptr = indptr_of(q_lens), indptr_of((seq_lens + page_size - 1) // page_size)
    assert int(qo_indptr[-1]) == n, f"padding_batch: expected {int(qo_indptr[-1])} new tokens, got {n}"
    pages, last_page_len = torch.zeros(int(kv_indptr[-1]), dtype=torch.int32), (seq_lens - 1) % page_size + 1
    return ForwardBatch(
        input_ids=input_ids,
        positions=torch.zeros_like(input_ids) if positions is None else positions,
        out_slots=torch.zeros_like(input_ids),
        qo_indptr=qo_indptr.to(device),
        kv_indptr=kv_indptr.to(device),
        kv_indices=pages.to(device),
        kv_last_page_len=last_page_len.to(device),
        seq_lens=seq_lens.to(device),
        qo_indptr_host=qo_indptr,
        kv_indptr_host=kv_indptr,
        kv_indices_host=pages,
        kv_last_page_len_host=last_page_len,
        seq_lens_host=seq_lens,
        logits_indices=(qo_indptr[1:].long() - 1).to(device),
        num_decode_rows=num_decode_rows,
        page_size=page_size,
    )


def indptr_of(counts: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """n counts -> their offsets [n + 1] int32, host, from 0 on."""
    return torch.nn.functional.pad(torch.as_tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
