"""Coverage: how much of each waiting prompt is cached, kept as tree and queue change, so that nothing is ever matched twice.

A set of waiting prompts and the cache are both trees over tokens, so on each edge of the prompts' tree a leading part is cached. Where that
part ends, the prompt node is noted at the cache's node: a change of the cache finds the one prompt node that it may move, by pointer.

    prompts    root ── [SYS DOC_A] ─┬─ [Q1]      one note for DOC_A's edge, whether one question waits below it or five thousand
    cache      root ── [SYS DO]     └─ [Q2]
                             ^ noted: depth 6 of this node -> the prompt node [SYS DOC_A]
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable

from radixserve.scheduler.order.prompt_tree import PromptNode
from radixserve.tree.key import common_length
from radixserve.tree.node import TreeNode


class _Notes:
    """Prompt nodes whose coverage ends on one node of the cache: at depths above its start, up to its end."""

    __slots__ = ("_depths", "by_depth", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.by_depth: dict[int, PromptNode] = {}
        self._depths: list[int] = []  # sorted

    def put(self, depth: int, prompt: PromptNode) -> None:
        if depth not in self.by_depth:
            insort(self._depths, depth)
        self.by_depth[depth] = prompt

    def remove(self, depth: int) -> None:
        del self.by_depth[depth]
        del self._depths[bisect_left(self._depths, depth)]

    def up_to(self, depth: int) -> list[PromptNode]:
        return [self.by_depth[one] for one in self._depths[: bisect_right(self._depths, depth)]]

    def beyond(self, depth: int) -> list[PromptNode]:
        return [self.by_depth[one] for one in self._depths[bisect_right(self._depths, depth) :]]


class Coverage:
    """A TreeWatcher of the cache; nothing is cached before cleared() names its root. It calls `on_change` for each prompt node whose
    `covered` has changed."""

    def __init__(self, root: PromptNode, page_bytes: int, on_change: Callable[[PromptNode], None]) -> None:
        self._root = root
        self._page_bytes = page_bytes
        self._on_change = on_change
        self._notes: dict[TreeNode, _Notes] = {}

    # ---- the cache changes

    def grew(self, node: TreeNode, num_bytes: int) -> None:
        length = len(node.tokens)
        above = node if num_bytes < length else node.parent
        assert above is not None
        notes = self._notes.get(above)
        if notes is None:
            return
        prompt = notes.by_depth.get(notes.start + (length - num_bytes if above is node else len(above.tokens)))
        if prompt is None:
            return
        if prompt.is_covered:
            first_page = node.tokens[length - num_bytes : length - num_bytes + self._page_bytes]
            child = prompt.children.get((node.namespace, first_page))
            if child is None:
                return
            prompt = child
        self._extend(prompt)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        notes = self._notes.get(lower)
        if notes is None:
            return
        start, middle = notes.start, notes.start + len(upper.tokens)
        notes.start = middle
        for prompt in notes.up_to(middle):
            self._note(self._forget(prompt), upper, start)

    def cut(self, leaf: TreeNode, num_bytes: int) -> None:
        notes = self._notes.get(leaf)
        if notes is None:
            return
        limit = notes.start + num_bytes
        at, at_start = leaf, notes.start
        if num_bytes == 0:
            assert leaf.parent is not None
            at, at_start = leaf.parent, notes.start - len(leaf.parent.tokens)
        for prompt in notes.beyond(limit):
            self._forget(prompt)
            prompt.covered = max(0, limit - prompt.start)
            if prompt.covered:
                self._note(prompt, at, at_start)
            self._on_change(prompt)

    def cleared(self, root: TreeNode) -> None:
        prompts = [prompt for notes in self._notes.values() for prompt in notes.by_depth.values()]
        self._notes.clear()
        for prompt in prompts:
            prompt.covered, prompt.at = 0, None
        self._note(self._root, root, 0)
        for prompt in prompts:
            self._on_change(prompt)

    # ---- the prompts change

    def node_added(self, node: PromptNode) -> None:
        if node.parent is not None and node.parent.is_covered:
            self._extend(node)

    def node_split(self, upper: PromptNode, lower: PromptNode) -> None:
        covered, at, length = lower.covered, lower.at, len(upper.tokens)
        if at is None:
            return
        # by now lower.depth is off by the length that it gave away
        depth, notes = upper.start + covered, self._notes[at]
        if covered <= length:
            notes.put(depth, upper)
            upper.covered, upper.at, lower.covered, lower.at = covered, at, 0, None
            return
        upper.covered, lower.covered = length, covered - length
        start = notes.start
        while start >= upper.end:
            assert at.parent is not None
            at = at.parent
            start -= len(at.tokens)
        self._note(upper, at, start)

    def node_removed(self, node: PromptNode) -> None:
        if node.at is not None:
            self._forget(node)

    def node_joined(self, upper: PromptNode, lower: PromptNode) -> None:
        if upper.at is None:
            return
        if lower.at is not None:
            self._notes[upper.at].remove(upper.end)
            self._drop_if_empty(upper.at)
            lower.covered += len(upper.tokens)
        else:
            self._notes[upper.at].put(upper.depth, lower)
            lower.covered, lower.at = upper.covered, upper.at

    # ---- notes

    def _note(self, prompt: PromptNode, at: TreeNode, start: int) -> None:
        notes = self._notes.get(at)
        if notes is None:
            notes = self._notes[at] = _Notes(start)
        assert notes.start == start
        notes.put(prompt.depth, prompt)
        prompt.at = at

    def _forget(self, prompt: PromptNode) -> PromptNode:
        """Call while `covered` is what it was when the note was made."""
        at = prompt.at
        assert at is not None
        self._notes[at].remove(prompt.depth)
        self._drop_if_empty(at)
        prompt.at = None
        return prompt

    def _drop_if_empty(self, at: TreeNode) -> None:
        if not self._notes[at].by_depth:
            del self._notes[at]

    def _extend(self, node: PromptNode) -> None:
        """Look how far coverage goes on from where it ends on this node's edge; the parent is covered wholly."""
        pending = [node]
        while pending:
            prompt = pending.pop()
            parent = prompt.parent
            at = prompt.at if prompt.at is not None else parent.at if parent is not None else None
            if at is None:
                return  # there is no cache
            covered, at, start = self._go_on(prompt, at)
            if covered == prompt.covered:
                continue
            if prompt.at is not None:
                self._forget(prompt)
            prompt.covered = covered
            self._note(prompt, at, start)
            if prompt.is_covered:
                pending.extend(self._may_go_on(prompt, at, start))
            self._on_change(prompt)

    def _go_on(self, prompt: PromptNode, at: TreeNode) -> tuple[int, TreeNode, int]:
        """How much of the edge is cached, and the cache's node where that ends, with the depth of its start."""
        edge, covered, start = prompt.tokens, prompt.covered, self._notes[at].start
        while covered < len(edge):
            inside = prompt.start + covered - start
            if inside < len(at.tokens):
                if at.namespace != prompt.namespace:
                    break
                length = common_length(at.tokens[inside:], edge, covered, len(edge), self._page_bytes)
            else:
                child = at.children.get((prompt.namespace, edge[covered : covered + self._page_bytes]))
                if child is None or child.pages is None:
                    break
                start += len(at.tokens)
                at, inside = child, 0
                length = common_length(child.tokens, edge, covered, len(edge), self._page_bytes)
            covered += length
            if inside + length < len(at.tokens):
                break
        return covered, at, start

    def _may_go_on(self, prompt: PromptNode, at: TreeNode, start: int) -> list[PromptNode]:
        """Children whose first page is cached, or may be."""
        inside = prompt.end - start
        if inside < len(at.tokens):
            child = prompt.children.get((at.namespace, at.tokens[inside : inside + self._page_bytes]))
            return [child] if child is not None else []
        if len(prompt.children) <= len(at.children):
            return [child for key, child in prompt.children.items() if key in at.children]
        return [prompt.children[key] for key in at.children if key in prompt.children]
