"""From a ScheduledBatch of integers to the ForwardBatch of tensors. Reads the page table and the last tokens; changes neither."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from radixserve.attention.batch import ForwardBatch
from radixserve.core import ScheduledBatch, ScheduledRow
from radixserve.kv import PageTable
from radixserve.runner.upload import Uploader

_TABLES = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len", "seq_lens")


def check_rows(batch: ScheduledBatch, vocab_size: int) -> None:
    """AssertionError where the rows break the contract of core.ScheduledRow, or ask for what the runner does not do yet."""
    seen_prompt_row = False
    slots: set[int] = set()
    for index, row in enumerate(batch.rows):
        assert row.slot not in slots, f"{_name(index, row)}: expected one row per slot and step"
        slots.add(row.slot)
        if row.is_decode:
            assert not seen_prompt_row, f"{_name(index, row)}: expected decode rows before all others"
            assert row.count == 1, f"{_name(index, row)}: expected count 1 in a row without token ids, got {row.count}"
        else:
            seen_prompt_row = True
            _check_prompt(row, vocab_size, _name(index, row))
        if row.target_ids:
            _check_targets(row, vocab_size, _name(index, row))
        assert row.adapter_id == 0, f"{_name(index, row)}: the runner has no adapters, got adapter_id {row.adapter_id}"


def _name(index: int, row: ScheduledRow) -> str:
    return f"row {index} (slot {row.slot})"


def _check_prompt(row: ScheduledRow, vocab_size: int, where: str) -> None:
    assert row.count == len(row.token_ids), f"{where}: expected count == len(token_ids) == {len(row.token_ids)}, got {row.count}"
    low, high = min(row.token_ids), max(row.token_ids)
    assert 0 <= low <= high < vocab_size, f"{where}: expected token ids in 0..{vocab_size - 1}, got {low}..{high}"


def _check_targets(row: ScheduledRow, vocab_size: int, where: str) -> None:
    first, last, end = row.target_start, row.target_start + len(row.target_ids), row.start + row.count
    assert row.start <= first and last <= end, f"{where}: expected targets inside of {row.start}..{end}, got {first}..{last}"
    low, high = min(row.target_ids), max(row.target_ids)
    assert 0 <= low <= high < vocab_size, f"{where}: expected target ids in 0..{vocab_size - 1}, got {low}..{high}"


def _logits_indices(rows: Sequence[ScheduledRow], qo_indptr: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Indices into the step's tokens: the last one of each sampled row, then the positions of all targets."""
    ends = qo_indptr[1:]
    if not all(row.is_sampled for row in rows):
        ends = ends[[row.is_sampled for row in rows]]
    of_sampled = ends.astype(np.int64) - 1
    if not any(row.target_ids for row in rows):
        return of_sampled
    indices = [of_sampled]
    for row, first_token in zip(rows, qo_indptr[:-1].tolist(), strict=True):
        if row.target_ids:
            first = first_token + row.target_start - row.start
            indices.append(np.arange(first, first + len(row.target_ids), dtype=np.int64))
    return np.concatenate(indices)


def build_forward_batch(
    batch: ScheduledBatch, page_table: PageTable, last_token_ids: torch.Tensor, device: torch.device, uploader: Uploader | None = None
) -> ForwardBatch:
    """The tensors of one step. last_token_ids [num_slots] int64, device: the token that each slot sampled last."""
    rows = batch.rows
    slots = [row.slot for row in rows]
    csr = page_table.build_csr(slots, [row.start for row in rows], [row.count for row in rows])
    num_decode_rows = batch.num_decode_rows
    prompt_ids = [np.frombuffer(row.token_ids, dtype=np.int32) for row in rows[num_decode_rows:]]
    arrays: dict[str, npt.NDArray[np.generic]] = {name: getattr(csr, name) for name in _TABLES}
    arrays |= {
        "positions": csr.positions,
        "out_slots": csr.out_slots,
        "logits_indices": _logits_indices(rows, csr.qo_indptr),
        "decode_slots": np.array(slots[:num_decode_rows], dtype=np.int64),
        "prompt_ids": np.concatenate(prompt_ids).astype(np.int64) if prompt_ids else np.zeros(0, dtype=np.int64),
    }
    sent = (uploader or Uploader(device)).upload(arrays)
    on_device = sent.device
    input_ids = last_token_ids.index_select(0, on_device["decode_slots"])
    if prompt_ids:
        input_ids = torch.cat([input_ids, on_device["prompt_ids"]])
    return ForwardBatch(
        input_ids=input_ids,
        positions=on_device["positions"],
        out_slots=on_device["out_slots"],
        logits_indices=on_device["logits_indices"],
        num_decode_rows=num_decode_rows,
        page_size=page_table.page_size,
        **{name: on_device[name] for name in _TABLES},
        **{f"{name}_host": sent.host[name] for name in _TABLES},
    )
