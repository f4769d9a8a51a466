"""The plainest attention there is: one sequence, all keys in one tensor. Lets a Decoder be tested without pool, pages or runner."""

import torch

from radixserve.attention import ForwardBatch


class DenseAttention:
    name = "dense"
    waited_s = 0.0

    def __init__(self) -> None:
        self._k: dict[int, torch.Tensor] = {}
        self._v: dict[int, torch.Tensor] = {}

    def plan(self, batch: ForwardBatch) -> None:
        pass

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if layer in self._k:
            k, v = torch.cat([self._k[layer], k]), torch.cat([self._v[layer], v])
        else:
            k, v = k.clone(), v.clone()  # the caller's memory is used again
        self._k[layer], self._v[layer] = k, v
        group = q.shape[1] // k.shape[1]
        keys, values = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, keys).float() * q.shape[-1] ** -0.5
        num_queries, num_keys = len(q), len(k)
        future = torch.arange(num_keys) > torch.arange(num_keys - num_queries, num_keys)[:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1).to(q.dtype)
        return torch.einsum("hqk,khd->qhd", weights, values)


def single_sequence_batch(token_ids: list[int], start: int = 0) -> ForwardBatch:
    """Positions start .. start + len(token_ids) of one sequence, in pages of one token from page 1 on."""
    count, end = len(token_ids), start + len(token_ids)
    int32 = {"dtype": torch.int32}
    qo_indptr, kv_indptr = torch.tensor([0, count], **int32), torch.tensor([0, end], **int32)
    last_page_len, seq_lens = torch.tensor([1], **int32), torch.tensor([end], **int32)
    return ForwardBatch(
        input_ids=torch.tensor(token_ids),
        positions=torch.arange(start, end),
        out_slots=torch.arange(start + 1, end + 1),
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=torch.arange(1, end + 1, **int32),
        kv_last_page_len=last_page_len,
        seq_lens=seq_lens,
        qo_indptr_host=qo_indptr,
        kv_indptr_host=kv_indptr,
        kv_indices_host=torch.arange(1, end + 1, **int32),
        kv_last_page_len_host=last_page_len,
        seq_lens_host=seq_lens,
        logits_indices=torch.tensor([count - 1]),
        num_decode_rows=0,
        page_size=1,
    )
