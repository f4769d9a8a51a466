"""The account: every page exactly once. Recounted from the free list, the running requests' pages and a walk of the tree.

free + evictable + locked + private pages of running requests == pool
"""

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from radixserve.core import IntArray
from radixserve.tree.key import TOKEN_BYTES
from radixserve.tree.page_pool import PagePool
from radixserve.tree.radix_tree import RadixTree


def check_tree(tree: RadixTree) -> None:
    """Recount the tree and compare with its counters. AssertionError at the first thing that is wrong."""
    page_bytes = tree.page_size * TOKEN_BYTES
    num_evictable = num_locked = num_pinned = 0
    pinned = set()
    evictable_leaves = set()
    ghosts = set()
    for node in tree.nodes():
        parent = node.parent
        assert parent is not None
        assert parent.children.get((node.namespace, node.tokens[:page_bytes])) is node, f"{node} is not filed under its own first page"
        assert node.tokens and len(node.tokens) % page_bytes == 0, f"{node} holds {len(node.tokens)} bytes of tokens"
        num_live = sum(child.pages is not None for child in node.children.values())
        assert node.num_live_children == num_live, f"{node} counts {node.num_live_children} children with pages, has {num_live}"
        assert node.lock_ref >= sum(child.lock_ref for child in node.children.values()), f"{node} has fewer locks than its children"
        assert parent is tree.root or parent.lock_ref >= node.lock_ref
        assert parent.pinned_until >= node.pinned_until or parent is tree.root, f"{node} is pinned for longer than what leads to it"
        if node.pinned_until:
            pinned.add(node.node_id)
            num_pinned += node.num_pages
        if node.pages is None:
            assert not node.pinned_until, f"{node} is a ghost and pinned"
            assert num_live == 0 and node.lock_ref == 0, f"{node} is a ghost with life below it or a lock on it"
            assert node in tree.ghosts, f"{node} is missing from the ghost list"
            ghosts.add(node.node_id)
            continue
        assert len(node.pages) * page_bytes == len(node.tokens), f"{node} holds {len(node.tokens) // TOKEN_BYTES} tokens"
        if node.lock_ref:
            num_locked += len(node.pages)
        else:
            num_evictable += len(node.pages)
        if node.is_evictable_leaf:
            evictable_leaves.add(node.node_id)
    root = tree.root
    assert root.num_live_children == sum(child.pages is not None for child in root.children.values())
    assert root.lock_ref >= sum(child.lock_ref for child in root.children.values())
    assert num_evictable == tree.num_evictable_pages, f"evictable: counted {num_evictable}, kept {tree.num_evictable_pages}"
    assert num_locked == tree.num_locked_pages, f"locked: counted {num_locked}, kept {tree.num_locked_pages}"
    assert num_pinned == tree.pins.num_pages, f"pinned: counted {num_pinned}, kept {tree.pins.num_pages}"
    assert num_pinned <= tree.pins.max_pages, f"{num_pinned} pages are pinned, expected at most {tree.pins.max_pages}"
    assert {node.node_id for node in tree.pins} == pinned, "the pins that will expire are not the pinned nodes"
    ordered = [node.node_id for node in tree.order]
    assert len(ordered) == len(evictable_leaves) and set(ordered) == evictable_leaves, "the eviction order is not the evictable leaves"
    assert len(tree.ghosts) == len(ghosts) == sum(1 for _ in tree.ghosts), "the ghost list is not the ghosts"
    assert tree.ghosts.num_tokens == sum(len(node.tokens) // TOKEN_BYTES for node in tree.ghosts), "ghost tokens are miscounted"


def check_pages(pool: PagePool, tree: RadixTree | None, private: Iterable[IntArray]) -> None:
    """Each page of the pool has exactly one owner. AssertionError names the pages that have none or several."""
    import numpy as np  # nothing else here needs it but the list of free pages

    of_tree = () if tree is None else (node.pages for node in tree.nodes() if node.pages is not None)
    owned = np.frombuffer(b"".join(chain((pool.free_ids(),), private, of_tree)), dtype=np.intc)
    # a pool of millions of pages is recounted between two requests: as many ids as pages, all in range, and each place marked
    if len(owned) == pool.num_pages and owned.min() == 1 and owned.max() == pool.num_pages:
        marks = np.zeros(pool.num_pages + 1, dtype=np.bool_)
        marks[owned] = True
        if marks[1:].all():
            return
    counts = Counter(owned.tolist())
    wrong = [page_id for page_id in {*counts, *range(1, pool.num_pages + 1)} if counts[page_id] != 1 or not 0 < page_id <= pool.num_pages]
    raise AssertionError(
        f"{len(wrong)} pages have no owner or several, the first ones: " + ", ".join(f"{page} ({counts[page]})" for page in wrong[:8])
    )
