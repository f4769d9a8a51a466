"""PagePool: which page ids are free. It does not know what is in a page.

A page has exactly one owner: this pool, one running request, or the tree. Page 0 is padding and never handed out; ids start at 1.

Pages that follow each other in a request lie side by side where that can be had: a kernel on a CPU reads them up to 1.4 times as fast
as scattered ones (bench/LOG.md). So a request goes on behind its last page, and whoever begins anew leaves a run of free pages behind
the one before, for that one to grow into. Nothing is set aside by it: where pages are short, any free page will do.
"""

from array import array
from itertools import compress, islice

from radixserve.core import IntArray

RUN_TOKENS = 64  # side by side; shorter runs gain nothing
_MAX_SEARCHED = 1 << 16  # pages that one look for a run goes over


class PagePool:
    def __init__(self, num_pages: int, page_size: int = 1) -> None:
        assert num_pages >= 1, f"expected at least one page, got {num_pages}"
        self.num_pages = num_pages
        self._run = -(-RUN_TOKENS // page_size)
        self._two_runs = b"\1" * (2 * self._run)
        self._is_free = bytearray()
        self.reset()

    @property
    def num_free(self) -> int:
        return self._num_free

    def reset(self) -> None:
        self._is_free = bytearray(1) + b"\1" * self.num_pages + bytearray(1)  # neither page 0 nor the one behind the last is free
        self._num_free = self.num_pages
        self._lowest = 1  # no page below is free
        self._lowest_runs = 1  # nor begin two free runs below this one

    def allocate(self, num_pages: int, behind: int = 0) -> IntArray:
        """Hand out that many page ids, from the one behind `behind` on if it is free. Asking for more than num_free is a bug of the caller,
        who evicts first."""
        assert 0 <= num_pages <= self._num_free, f"expected 0 to {self._num_free} free pages, asked for {num_pages}"
        is_free = self._is_free
        if num_pages == 1 and is_free[behind + 1]:  # a decode step's, by far the most
            is_free[behind + 1] = 0
            self._num_free -= 1
            return array("i", (behind + 1,))
        page_ids = self._take(behind + 1, num_pages) if behind else array("i")
        while len(page_ids) < num_pages:
            first = self._find_runs()
            missing = num_pages - len(page_ids)
            page_ids.extend(self._take(first, missing) if first else self._take_any(missing))
        self._num_free -= num_pages
        return page_ids

    def free(self, page_ids: IntArray) -> None:
        """Take page ids back. A page that is free already, or was never handed out, is a bug and refused."""
        is_free = self._is_free
        for page_id in page_ids:
            assert 0 < page_id <= self.num_pages and not is_free[page_id], f"page {page_id} is freed twice or was never handed out"
            is_free[page_id] = 1
        self._num_free += len(page_ids)
        if page_ids:
            lowest = min(page_ids)
            self._lowest = min(self._lowest, lowest)
            self._lowest_runs = min(self._lowest_runs, max(1, lowest - len(self._two_runs) + 1))

    def free_ids(self) -> IntArray:
        """All free page ids, for the account."""
        import numpy as np  # as the account does, and for its reason

        return array("i", np.flatnonzero(np.frombuffer(self._is_free, np.uint8)).astype(np.intc).tobytes())

    def _take(self, first: int, most: int) -> IntArray:
        """The free pages from `first` on, side by side; perhaps none."""
        taken = self._is_free.find(0, first, first + most)  # at the latest behind the last page
        end = first + most if taken < 0 else taken
        self._is_free[first:end] = bytes(end - first)
        return array("i", range(first, end))

    def _take_any(self, num_pages: int) -> IntArray:
        """The lowest free pages."""
        lowest = self._is_free.find(1, self._lowest)
        ids = compress(range(lowest, len(self._is_free)), memoryview(self._is_free)[lowest:])
        page_ids = array("i", islice(ids, num_pages))
        for page_id in page_ids:
            self._is_free[page_id] = 0
        self._lowest = page_ids[-1] + 1
        return page_ids

    def _find_runs(self) -> int:
        """Where to begin anew: in the lowest two free runs, behind the one that belongs to whoever lies before. 0 if there are none."""
        is_free, start = self._is_free, self._lowest_runs
        end = min(start + _MAX_SEARCHED, len(is_free))
        runs = is_free.find(self._two_runs, start, end)
        if runs < 0:
            self._lowest_runs = max(start, end - len(self._two_runs) + 1)
            return 0
        self._lowest_runs = runs
        return runs if runs == 1 else runs + self._run
