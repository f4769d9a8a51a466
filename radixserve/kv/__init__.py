"""KV bytes: the pool of pages on the device, and the table that says which pages hold which slot's sequence."""

from radixserve.kv import device_state, pinned
from radixserve.kv.page_table import PageCsr, PageTable
from radixserve.kv.pool import KVPool, bytes_per_token

__all__ = ["KVPool", "PageCsr", "PageTable", "bytes_per_token", "device_state", "pinned"]
