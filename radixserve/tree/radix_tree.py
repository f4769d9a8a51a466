"""RadixTree: the longest prefix that is already computed, and what may be forgotten. It does not know the pool, requests or the scheduler.

    root ── [SYS DOC_A] ─┬─ [Q1 ANSWER1]          each edge: a run of tokens (a multiple of the page size) and its page ids
                         └─ [Q2 ANSWER2]          a lock on a node counts on every ancestor, so nothing above it can go

Page accounts: every page of the tree is either locked (its node has lock_ref > 0) or evictable.
"""

from array import array
from collections.abc import Callable
from typing import NamedTuple

from radixserve.core import BASE_NAMESPACE, IntArray, Namespace
from radixserve.tree.events import EventLog, TreeEvent
from radixserve.tree.eviction import EvictionOrder, lru
from radixserve.tree.ghosts import GhostList
from radixserve.tree.key import TOKEN_BYTES, TreeKey, common_length
from radixserve.tree.matching import Match, joined, longest_match
from radixserve.tree.node import TreeNode
from radixserve.tree.pins import PinBook, PinResult
from radixserve.tree.watcher import NO_WATCHER, TreeWatcher


class InsertResult(NamedTuple):
    node: TreeNode  # where the inserted key ends
    existing_pages: IntArray  # not to be changed: the tree's, for the leading part that was there; the caller's own for it are duplicates


class RadixTree:
    """See the module docstring. Lengths are in tokens; `now` is any clock that does not run backwards."""

    def __init__(
        self,
        page_size: int = 1,
        order: EvictionOrder | None = None,
        max_ghost_tokens: int = 0,
        on_event: Callable[[TreeEvent], None] | None = None,
        max_pinned_pages: int = 0,
    ) -> None:
        self.page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self.order = order if order is not None else EvictionOrder(lru)
        self.ghosts = GhostList(max_ghost_tokens, self._page_bytes)
        self.pins = PinBook(max_pinned_pages)
        self._events = EventLog(on_event)
        self.watcher: TreeWatcher = NO_WATCHER
        self.root = TreeNode(BASE_NAMESPACE, b"", None, None, 0.0)
        self.version = 0  # grows with every change of which tokens are matched by which page
        self.growth = 0  # grows with every change by which a match may become longer
        self.num_evictable_pages = 0
        self.num_locked_pages = 0

    # ---- match and lock

    def match(self, key: TreeKey, max_len: int | None = None) -> Match:
        """The longest cached prefix of at most max_len tokens. Changes nothing."""
        return longest_match(self.root, key.page_aligned(self._page_bytes, max_len), self.page_size, self.version)

    def lock(self, match: Match, now: float, priority: int = 0) -> TreeNode:
        """Hold exactly the matched path, splitting its last edge if only part of it was matched. Returns the node to unlock."""
        node = self._cut(match)
        for step in node.lineage():
            step.last_access = now
            step.hits += 1
            step.priority = max(step.priority, priority)
            self._add_lock(step)
        return node

    def _cut(self, match: Match) -> TreeNode:
        """The node that ends where the match ends."""
        assert match.version == self.version, f"a match of version {match.version} was kept over a change to version {self.version}"
        whole = match.node_length * TOKEN_BYTES == len(match.node.tokens)
        return match.node if whole else self._split(match.node, match.node_length * TOKEN_BYTES)

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
            self.order.discard(node)

    def unlock(self, node: TreeNode, now: float) -> None:
        """Give back one lock. The whole path was in use until now."""
        for step in node.lineage():
            assert step.lock_ref > 0, f"expected a locked node, got {step}"
            step.lock_ref -= 1
            step.last_access = now
            if step.lock_ref == 0 and step.pages is not None:
                self.num_locked_pages -= len(step.pages)
                self.num_evictable_pages += len(step.pages)
                self._reorder(step)

    # ---- pin

    def pin(self, key: TreeKey, until: float, now: float) -> PinResult:
        """Keep what is cached of the key until then, as far from its start as the budget goes. Not a use: no order changes."""
        assert until > now, f"expected a time after {now}, got {until}"
        self.expire_pins(now)
        match = self.match(key)
        num_pages = self.pins.affordable(match.path(), len(match.pages))
        if num_pages < len(match.pages):
            match = self.match(key, num_pages * self.page_size)
        step = self._cut(match)
        while step.parent is not None:
            self.pins.add(step, until)
            if step.is_evictable_leaf:
                self.order.put(step)
            step = step.parent
        return PinResult(match.length, until)

    def expire_pins(self, now: float) -> None:
        """Give pins that have expired back to the policy's order."""
        for node in self.pins.pop_expired(now):
            if node.is_evictable_leaf:
                self.order.put(node)

    # ---- insert

    def insert(self, key: TreeKey, pages: IntArray, now: float, at: TreeNode | None = None, priority: int = 0) -> InsertResult:
        """Put the key's whole pages below `at` (default: the root; otherwise a node on which the caller holds a lock).

        `pages` holds at least as many ids as the key has whole pages; further ones are not looked at. Where tokens are in the tree
        already its own pages win: they are returned, and the caller frees as many of its leading ones. The others are the tree's now.
        """
        node = at if at is not None else self.root
        existing: list[IntArray] = []
        num_done = 0  # pages walked so far
        for namespace, tokens in key.page_aligned(self._page_bytes, None):
            offset, stop = 0, len(tokens)
            while offset < stop:
                child = node.children.get((namespace, bytes(tokens[offset : offset + self._page_bytes])))
                if child is None:
                    mine = pages[num_done : num_done + (stop - offset) // self._page_bytes]
                    node = self._grow(node, namespace, bytes(tokens[offset:]), mine, now, priority, is_callers=node is at)
                    num_done += len(mine)
                    break
                num_bytes = common_length(child.tokens, tokens, offset, stop, self._page_bytes)
                node = child if num_bytes == len(child.tokens) else self._split(child, num_bytes)
                num_pages = num_bytes // self._page_bytes
                if node.pages is None:
                    self.ghosts.discard(node)
                    node.created_at, node.priority = now, priority
                    node.hits += 1
                    self._fill(node, pages[num_done : num_done + num_pages], now)
                else:
                    existing.append(node.pages)
                    node.last_access, node.priority = now, max(node.priority, priority)
                    node.hits += 1
                    self._reorder(node)
                num_done += num_pages
                offset += num_bytes
        assert num_done <= len(pages), f"expected at least {num_done} pages, got {len(pages)}"
        return InsertResult(node, joined(existing))

    def _grow(
        self, node: TreeNode, namespace: Namespace, tokens: bytes, pages: IntArray, now: float, priority: int, is_callers: bool
    ) -> TreeNode:
        """Put new tokens below `node`: as a leaf, or, where only the caller holds it, at the end of its edge, whose hits they inherit."""
        is_alone = is_callers and node.lock_ref == 1 and not node.children and not node.pinned_until
        if is_alone and node.pages is not None and node.namespace == namespace:
            self._events.emit("insert", node, tokens, now, is_below=True)
            node.tokens += tokens
            node.pages = node.pages + pages
            node.priority = max(node.priority, priority)
            self.num_locked_pages += len(pages)
            self.version += 1
            self.growth += 1
            self.watcher.grew(node, len(tokens))
            return node
        leaf = TreeNode(namespace, tokens, None, node, now)
        leaf.priority = priority
        node.children[namespace, tokens[: self._page_bytes]] = leaf
        self._fill(leaf, pages, now)
        return leaf

    def _fill(self, node: TreeNode, pages: IntArray, now: float) -> None:
        assert len(pages) * self._page_bytes == len(node.tokens), f"expected {len(node.tokens) // self._page_bytes} pages, got {len(pages)}"
        assert node.lock_ref == 0 and node.parent is not None
        node.pages = pages
        self.num_evictable_pages += len(pages)
        node.parent.num_live_children += 1
        self.order.discard(node.parent)
        self.version += 1
        self.growth += 1
        node.last_access = now
        self._reorder(node)
        self._events.emit("insert", node, node.tokens, now)
        self.watcher.grew(node, len(node.tokens))

    def _reorder(self, node: TreeNode) -> None:
        if node.is_evictable_leaf:
            self.order.put(node)
        else:
            self.order.discard(node)

    def _split(self, node: TreeNode, num_bytes: int) -> TreeNode:
        """Cut the edge of `node` in two and return the new upper half. The lower half is still `node`; both have the old lock count.

        parent ── [0 : num_bytes) upper ── [num_bytes : len) node ── children of node
        """
        parent = node.parent
        assert parent is not None and 0 < num_bytes < len(node.tokens) and num_bytes % self._page_bytes == 0
        num_pages = num_bytes // self._page_bytes
        upper_pages = node.pages[:num_pages] if node.pages is not None else None
        upper = TreeNode(node.namespace, node.tokens[:num_bytes], upper_pages, parent, node.last_access)
        upper.hits, upper.lock_ref, upper.created_at, upper.priority = node.hits, node.lock_ref, node.created_at, node.priority
        upper.evicted_at, upper.eviction_cause = node.evicted_at, node.eviction_cause
        parent.children[node.namespace, node.tokens[: self._page_bytes]] = upper
        node.parent = upper
        node.tokens = node.tokens[num_bytes:]
        upper.children[node.namespace, node.tokens[: self._page_bytes]] = node
        if node.pages is not None:
            node.pages = node.pages[num_pages:]
            upper.num_live_children = 1
            self.pins.split(upper, node)
        else:
            self.ghosts.shrink(num_bytes)  # the upper half of a ghost is split off only to be revived
        self.version += 1
        self.watcher.split(upper, node)
        return upper

    # ---- evict

    def evict(self, num_pages: int, now: float, cause: str = "evict") -> IntArray:
        """Forget up to num_pages pages, in the policy's order, pinned ones last, and return their ids; fewer only if the rest is locked.

        A leaf that holds more than what is still needed is trimmed from its end.
        """
        self.expire_pins(now)
        freed: IntArray = array("i")
        while len(freed) < num_pages:
            leaf = self.order.pop()
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
        self._events.emit(cause, leaf, leaf.tokens, now)
        self.pins.shrink(leaf, leaf.num_pages)
        leaf.pages = None
        parent.num_live_children -= 1
        self._reorder(parent)
        self.ghosts.add(leaf, now, cause)
        self.watcher.cut(leaf, 0)

    def _trim(self, leaf: TreeNode, num_pages: int, now: float) -> None:
        """Cut the last num_pages pages off a leaf; their tokens become a ghost below it."""
        assert leaf.pages is not None
        cut = len(leaf.tokens) - num_pages * self._page_bytes
        tail = leaf.tokens[cut:]
        self.pins.shrink(leaf, num_pages)
        leaf.tokens, leaf.pages = leaf.tokens[:cut], leaf.pages[:-num_pages]
        self._events.emit("trim", leaf, tail, now, is_below=True)
        ghost = self.ghosts.take_tail(leaf, tail)
        self.order.put(leaf)
        self.ghosts.add(ghost, now, "trim")
        self.watcher.cut(leaf, cut)

    def clear(self, now: float) -> IntArray:
        """Forget everything, ghosts too, and return all page ids. Nothing may be locked."""
        assert self.root.lock_ref == 0, f"expected an unlocked tree, got {self.root.lock_ref} locks"
        freed: IntArray = array("i")
        for node in self.nodes():
            freed.extend(node.pages or ())
        self.order.clear()
        self.ghosts.clear()
        self.pins.clear()
        self.root = TreeNode(BASE_NAMESPACE, b"", None, None, now)
        self.num_evictable_pages = 0
        self.version += 1
        self._events.emit_flush(now)
        self.watcher.cleared(self.root)
        return freed

    def nodes(self) -> list[TreeNode]:
        """All nodes but the root, ghosts included, parents first."""
        return self.root.descendants()
