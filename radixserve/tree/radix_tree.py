"""RadixTree: the longest prefix that is already computed, and what may be forgotten. It does not know the pool, requests or the scheduler.

    root ── [SYS DOC_A] ─┬─ [Q1 ANSWER1]          each edge: a run of tokens (a multiple of the page size) and its page ids
                         └─ [Q2 ANSWER2]          a lock on a node counts on every ancestor, so nothing above it can go

Page accounts: every page of the tree is either locked (its node has lock_ref > 0) or evictable.
"""

from array import array
from collections.abc import Callable
from typing import NamedTuple

from radixserve.core import BASE_NAMESPACE, IntArray, Namespace
from radixserve.tree.events import TreeEvent, path_hash
from radixserve.tree.eviction import EvictionOrder, EvictionPolicy, lru
from radixserve.tree.ghosts import GhostList
from radixserve.tree.key import TOKEN_BYTES, Segment, TreeKey, common_length
from radixserve.tree.node import TreeNode


class Match(NamedTuple):
    """A longest cached prefix. Valid until the tree's version changes."""

    length: int  # tokens, a multiple of the page size
    pages: IntArray
    num_unlocked_pages: int  # of them; taking the lock makes so many pages unevictable
    node: TreeNode  # the deepest node reached
    node_length: int  # tokens matched on that node's own edge
    version: int


class InsertResult(NamedTuple):
    node: TreeNode  # where the inserted key ends
    existing_pages: IntArray  # the tree's pages for the leading part that was there already; the caller's own for it are duplicates


class RadixTree:
    """See the module docstring. Lengths are in tokens; `now` is any clock that does not run backwards."""

    def __init__(
        self,
        page_size: int = 1,
        policy: EvictionPolicy = lru,
        max_ghost_tokens: int = 0,
        on_event: Callable[[TreeEvent], None] | None = None,
    ) -> None:
        self.page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._order = EvictionOrder(policy)
        self._ghosts = GhostList(max_ghost_tokens, self._page_bytes)
        self._on_event = on_event
        self.root = TreeNode(BASE_NAMESPACE, b"", None, None, 0.0)
        self.version = 0  # grows with every change of which tokens are matched by which page
        self.growth = 0  # grows with every change by which a match may become longer
        self.num_evictable_pages = 0
        self.num_locked_pages = 0

    # ---- match and lock

    def match(self, key: TreeKey, max_len: int | None = None) -> Match:
        """The longest cached prefix of at most max_len tokens. Changes nothing."""
        node, node_bytes, pages, num_unlocked = self.root, 0, array("i"), 0
        for segment in self._page_aligned(key, max_len):
            offset, stop = 0, len(segment.tokens)
            while offset < stop:
                child = node.children.get((segment.namespace, segment.tokens[offset : offset + self._page_bytes]))
                if child is None or child.pages is None:
                    return self._matched(node, node_bytes, pages, num_unlocked)
                node_bytes = common_length(child.tokens, segment.tokens, offset, stop, self._page_bytes)
                num_pages = node_bytes // self._page_bytes
                pages.extend(child.pages if num_pages == len(child.pages) else child.pages[:num_pages])
                if child.lock_ref == 0:
                    num_unlocked += num_pages
                node = child
                if node_bytes < len(child.tokens):
                    return self._matched(node, node_bytes, pages, num_unlocked)
                offset += node_bytes
        return self._matched(node, node_bytes, pages, num_unlocked)

    def _matched(self, node: TreeNode, node_bytes: int, pages: IntArray, num_unlocked: int) -> Match:
        length = len(pages) * self.page_size
        return Match(length, pages, num_unlocked, node, node_bytes // TOKEN_BYTES, self.version)

    def lock(self, match: Match, now: float) -> TreeNode:
        """Pin exactly the matched path, splitting its last edge if only part of it was matched. Returns the node to unlock."""
        assert match.version == self.version, f"a match of version {match.version} was kept over a change to version {self.version}"
        node = match.node
        if match.node_length * TOKEN_BYTES < len(node.tokens):
            node = self._split(node, match.node_length * TOKEN_BYTES)
        step: TreeNode | None = node
        while step is not None:
            step.last_access = now
            step.hits += 1
            self._add_lock(step)
            step = step.parent
        return node

    def move_lock(self, node: TreeNode, below: TreeNode) -> None:
        """Turn a lock on `node` into one on `below`, a descendant of it (or node itself)."""
        while below is not node:
            self._add_lock(below)
            assert below.parent is not None, "expected a descendant of the locked node"
            below = below.parent

    def _add_lock(self, node: TreeNode) -> None:
        node.lock_ref += 1
        if node.lock_ref == 1 and node.pages is not None:
            self.num_evictable_pages -= len(node.pages)
            self.num_locked_pages += len(node.pages)
            self._order.discard(node)

    def unlock(self, node: TreeNode, now: float) -> None:
        """Give back one lock. The whole path was in use until now."""
        step: TreeNode | None = node
        while step is not None:
            assert step.lock_ref > 0, f"expected a locked node, got {step}"
            step.lock_ref -= 1
            step.last_access = now
            if step.lock_ref == 0 and step.pages is not None:
                self.num_locked_pages -= len(step.pages)
                self.num_evictable_pages += len(step.pages)
                self._reorder(step)
            step = step.parent

    # ---- insert

    def insert(self, key: TreeKey, pages: IntArray, now: float, at: TreeNode | None = None) -> InsertResult:
        """Put the key's whole pages below `at` (default: the root; otherwise a node on which the caller holds a lock).

        `pages` holds at least as many ids as the key has whole pages; further ones are not looked at. Where tokens are in the tree
        already its own pages win: they are returned, and the caller frees as many of its leading ones. The others are the tree's now.
        """
        node = at if at is not None else self.root
        existing: IntArray = array("i")
        num_done = 0  # pages walked so far
        for segment in self._page_aligned(key, None):
            offset, stop = 0, len(segment.tokens)
            while offset < stop:
                child = node.children.get((segment.namespace, segment.tokens[offset : offset + self._page_bytes]))
                if child is None:
                    mine = pages[num_done : num_done + (stop - offset) // self._page_bytes]
                    node = self._grow(node, segment.namespace, segment.tokens[offset:], mine, now, is_callers=node is at)
                    num_done += len(mine)
                    break
                num_bytes = common_length(child.tokens, segment.tokens, offset, stop, self._page_bytes)
                node = child if num_bytes == len(child.tokens) else self._split(child, num_bytes)
                num_pages = num_bytes // self._page_bytes
                if node.pages is None:
                    self._revive(node, pages[num_done : num_done + num_pages], now)
                else:
                    existing.extend(node.pages)
                    node.last_access = now
                    node.hits += 1
                    self._reorder(node)
                num_done += num_pages
                offset += num_bytes
        assert num_done <= len(pages), f"expected at least {num_done} pages, got {len(pages)}"
        return InsertResult(node, existing)

    def _grow(self, node: TreeNode, namespace: Namespace, tokens: bytes, pages: IntArray, now: float, is_callers: bool) -> TreeNode:
        """Put new tokens below `node`: as a leaf, or at the end of its edge where only the caller holds it (the next chunk of a prompt)."""
        if is_callers and node.lock_ref == 1 and not node.children and node.pages is not None and node.namespace == namespace:
            self._emit("insert", node, tokens, now, is_below=True)
            node.tokens += tokens
            node.pages = node.pages + pages
            self.num_locked_pages += len(pages)
            self.version += 1
            self.growth += 1
            return node
        leaf = TreeNode(namespace, tokens, None, node, now)
        node.children[namespace, tokens[: self._page_bytes]] = leaf
        self._fill(leaf, pages, now)
        return leaf

    def _revive(self, ghost: TreeNode, pages: IntArray, now: float) -> None:
        self._ghosts.discard(ghost)
        self._fill(ghost, pages, now)

    def _fill(self, node: TreeNode, pages: IntArray, now: float) -> None:
        assert len(pages) * self._page_bytes == len(node.tokens), f"expected {len(node.tokens) // self._page_bytes} pages, got {len(pages)}"
        assert node.lock_ref == 0 and node.parent is not None
        node.pages = pages
        self.num_evictable_pages += len(pages)
        node.parent.num_live_children += 1
        self._order.discard(node.parent)
        self.version += 1
        self.growth += 1
        node.last_access = now
        self._reorder(node)
        self._emit("insert", node, node.tokens, now)

    def _reorder(self, node: TreeNode) -> None:
        if node.is_evictable_leaf:
            self._order.put(node)
        else:
            self._order.discard(node)

    def _split(self, node: TreeNode, num_bytes: int) -> TreeNode:
        """Cut the edge of `node` in two and return the new upper half. The lower half is still `node`; both have the old lock count.

        parent ── [0 : num_bytes) upper ── [num_bytes : len) node ── children of node
        """
        parent = node.parent
        assert parent is not None and 0 < num_bytes < len(node.tokens) and num_bytes % self._page_bytes == 0
        num_pages = num_bytes // self._page_bytes
        upper_pages = node.pages[:num_pages] if node.pages is not None else None
        upper = TreeNode(node.namespace, node.tokens[:num_bytes], upper_pages, parent, node.last_access)
        upper.hits, upper.lock_ref = node.hits, node.lock_ref
        upper.evicted_at, upper.eviction_cause = node.evicted_at, node.eviction_cause
        parent.children[node.namespace, node.tokens[: self._page_bytes]] = upper
        node.parent = upper
        node.tokens = node.tokens[num_bytes:]
        upper.children[node.namespace, node.tokens[: self._page_bytes]] = node
        if node.pages is not None:
            node.pages = node.pages[num_pages:]
            upper.num_live_children = 1
        else:
            self._ghosts.shrink(num_bytes)  # the upper half of a ghost is split off only to be revived
        self.version += 1
        return upper

    # ---- evict

    def evict(self, num_pages: int, now: float, cause: str = "evict") -> IntArray:
        """Forget up to num_pages pages, in the policy's order, and return their ids. Fewer come back only if the rest is locked.

        A leaf that holds more than what is still needed is trimmed from its end.
        """
        freed: IntArray = array("i")
        while len(freed) < num_pages:
            leaf = self._order.pop()
            if leaf is None:
                break
            assert leaf.pages is not None
            needed = num_pages - len(freed)
            if len(leaf.pages) <= needed:
                freed.extend(leaf.pages)
                self._bury(leaf, now, cause)
            else:
                freed.extend(leaf.pages[-needed:])
                self._trim(leaf, needed, now)
        self.num_evictable_pages -= len(freed)
        if freed:
            self.version += 1
        return freed

    def _bury(self, leaf: TreeNode, now: float, cause: str) -> None:
        """Turn a leaf into a ghost; its parent may become a leaf."""
        parent = leaf.parent
        assert parent is not None
        self._emit(cause, leaf, leaf.tokens, now)
        leaf.pages = None
        parent.num_live_children -= 1
        self._reorder(parent)
        self._ghosts.add(leaf, now, cause)

    def _trim(self, leaf: TreeNode, num_pages: int, now: float) -> None:
        """Cut the last num_pages pages off a leaf; their tokens become a ghost below it (one ghost, however often it is trimmed)."""
        assert leaf.pages is not None
        cut = len(leaf.tokens) - num_pages * self._page_bytes
        tail = leaf.tokens[cut:]
        leaf.tokens, leaf.pages = leaf.tokens[:cut], leaf.pages[:-num_pages]
        self._emit("trim", leaf, tail, now, is_below=True)
        only_child = next(iter(leaf.children.values())) if len(leaf.children) == 1 else None
        if only_child is not None and only_child.namespace == leaf.namespace:
            self._ghosts.prepend(only_child, tail)
            ghost = only_child
            leaf.children.clear()
        else:
            ghost = TreeNode(leaf.namespace, tail, None, leaf, leaf.last_access)
            ghost.children, leaf.children = leaf.children, {}
            for child in ghost.children.values():
                child.parent = ghost
        leaf.children[ghost.namespace, ghost.tokens[: self._page_bytes]] = ghost
        self._order.put(leaf)
        self._ghosts.add(ghost, now, "trim")

    def clear(self, now: float) -> IntArray:
        """Forget everything, ghosts too, and return all page ids. Nothing may be locked."""
        assert self.root.lock_ref == 0, f"expected an unlocked tree, got {self.root.lock_ref} locks"
        freed: IntArray = array("i")
        for node in self.nodes():
            freed.extend(node.pages or ())
        self._order.clear()
        self._ghosts.clear()
        self.root = TreeNode(BASE_NAMESPACE, b"", None, None, now)
        self.num_evictable_pages = 0
        self.version += 1
        if self._on_event is not None:
            self._on_event(TreeEvent("flush", BASE_NAMESPACE, b"", b"", now))
        return freed

    # ---- look

    def nodes(self) -> list[TreeNode]:
        """All nodes but the root, ghosts included, parents first."""
        found = list(self.root.children.values())
        for node in found:
            found.extend(node.children.values())
        return found

    @property
    def ghosts(self) -> GhostList:
        return self._ghosts

    @property
    def evictable_leaves(self) -> list[TreeNode]:
        return list(self._order)

    def _page_aligned(self, key: TreeKey, max_len: int | None) -> list[Segment]:
        """The key's segments cut to whole pages and to max_len; the first one that is cut is the last."""
        room = None if max_len is None else max(0, max_len) * TOKEN_BYTES
        aligned = []
        for segment in key.segments:
            size = len(segment.tokens) if room is None else min(len(segment.tokens), room)
            size -= size % self._page_bytes
            if size:
                whole = size == len(segment.tokens)
                aligned.append(segment if whole else Segment(segment.namespace, segment.tokens[:size]))
            if size < len(segment.tokens):
                break
            if room is not None:
                room -= size
        return aligned

    def _emit(self, cause: str, node: TreeNode, tokens: bytes, now: float, is_below: bool = False) -> None:
        if self._on_event is not None:
            above = node if is_below else node.parent
            assert above is not None
            self._on_event(TreeEvent(cause, node.namespace, path_hash(above), tokens, now))
