"""PagePool: which page ids are free. It does not know what is in a page.

A page has exactly one owner: this pool, one running request, or the tree. Page 0 is padding and never handed out; ids start at 1.
"""

from array import array

from radixserve.core import IntArray


class PagePool:
    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 1, f"expected at least one page, got {num_pages}"
        self.num_pages = num_pages
        self._is_free = bytearray(num_pages + 1)
        self._free: IntArray = array("i")  # a stack: the last id is handed out first
        self.reset()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def reset(self) -> None:
        self._free = array("i", range(self.num_pages, 0, -1))
        self._is_free = bytearray([0]) + bytearray([1]) * self.num_pages

    def allocate(self, num_pages: int) -> IntArray:
        """Hand out that many page ids. Asking for more than num_free is a bug of the caller, who evicts first."""
        assert 0 <= num_pages <= len(self._free), f"expected 0 to {len(self._free)} free pages, asked for {num_pages}"
        first = len(self._free) - num_pages
        page_ids = self._free[first:]
        page_ids.reverse()
        del self._free[first:]
        for page_id in page_ids:
            self._is_free[page_id] = 0
        return page_ids

    def free(self, page_ids: IntArray) -> None:
        """Take page ids back. A page that is free already, or was never handed out, is a bug and refused."""
        is_free = self._is_free
        for page_id in page_ids:
            assert 0 < page_id <= self.num_pages and not is_free[page_id], f"page {page_id} is freed twice or was never handed out"
            is_free[page_id] = 1
        self._free.extend(page_ids)

    def free_ids(self) -> IntArray:
        """A copy of the free list, for the account."""
        return self._free[:]
