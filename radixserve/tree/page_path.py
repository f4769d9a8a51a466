"""PagePath: the pages of one running request, in order of position.

pages  |--- num_shared: the tree's, locked through `node` ---|--- private: the request's own ---|
replaced: own pages that the tree's took the place of while a step that writes to them was under way
"""

from array import array
from collections.abc import Sequence

from radixserve.core import IntArray, Namespace, PageWrite
from radixserve.tree.node import TreeNode
from radixserve.tree.page_pool import PagePool


class PagePath:
    """Owned by the scheduler, changed by the cache alone."""

    __slots__ = ("namespace", "node", "num_shared", "pages", "priority", "replaced")

    def __init__(self, namespace: Namespace, pages: IntArray, node: TreeNode | None, priority: int = 0) -> None:
        self.priority = priority
        self.namespace = namespace
        self.pages = pages
        self.num_shared = len(pages)
        self.node = node
        self.replaced: IntArray = array("i")

    @property
    def private_pages(self) -> IntArray:
        """Those in use; `replaced` ones are its own too."""
        return self.pages[self.num_shared :]

    def num_missing(self, num_tokens: int, page_size: int) -> int:
        """Pages that it lacks to cover num_tokens positions; 0 or less where it has enough."""
        return -(-num_tokens // page_size) - len(self.pages)

    def grow_from(self, pool: PagePool, num_missing: int) -> PageWrite | None:
        """Take so many pages from the pool, side by side with the last one where that can be had; None if none are missing."""
        if num_missing <= 0:
            return None
        pages = self.pages
        write = PageWrite(len(pages), pool.allocate(num_missing, pages[-1] if pages else 0))
        pages.extend(write.page_ids)
        return write


def grow_all(pool: PagePool, wanted: Sequence[tuple[PagePath, int]], missing: Sequence[int]) -> list[PageWrite | None]:
    """Give each path the pages that it lacks, if any."""
    return [path.grow_from(pool, num_missing) for (path, _), num_missing in zip(wanted, missing, strict=True)]
