"""PromptTree: the waiting prompts as a radix tree, so that what prompts have in common is looked at once, however many wait.

    root ── [SYS DOC_A] ─┬─ [Q1]  two requests        each edge: a run of tokens, whole pages; requests hang where the part of their
                         └─ [Q2]  one request         prompt ends that may be re-used at all

It says nothing of what is cached: `covered` and `at` are written by coverage.py, `holder` by sharing.py, `ranks` by ranking.py, branch.py.
"""

from collections.abc import Iterator
from typing import Protocol

from radixserve.core import BASE_NAMESPACE, Namespace
from radixserve.scheduler.order.chain import Chain
from radixserve.scheduler.order.ranking import NodeRank
from radixserve.scheduler.order.tour import Mark, Tour
from radixserve.scheduler.state import RequestState
from radixserve.tree.key import common_length
from radixserve.tree.node import ChildKey, TreeNode


class PromptNode:
    """An edge and the node below it. Depths and lengths are in bytes, a multiple of the page's."""

    __slots__ = (
        "at",
        "chain",
        "children",
        "closes",
        "covered",
        "holder",
        "namespace",
        "opens",
        "parent",
        "ranks",
        "requests",
        "start",
        "tokens",
        "weight",
    )

    def __init__(self, namespace: Namespace, tokens: bytes, start: int, parent: "PromptNode | None", num_ranks: int) -> None:
        self.namespace = namespace
        self.tokens = tokens
        self.start = start  # depth where the edge begins
        self.parent = parent
        self.children: dict[ChildKey, PromptNode] = {}
        self.chain: Chain | None = None  # the root has none
        self.requests: dict[str, RequestState] = {}
        self.weight = 0  # requests here and below; stays 0 in a tree without weights
        self.covered = 0  # bytes of the edge that are cached
        self.at: TreeNode | None = None  # the cache's node where they end; None where none are
        self.holder: int | None = None  # `arrival` of a running request that computes what comes next below here
        self.ranks = tuple(NodeRank() for _ in range(num_ranks))
        self.opens, self.closes = Mark(), Mark()  # its place in the tree's tour

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def depth(self) -> int:
        """Up to which its path is cached, given that its parent's is."""
        return self.start + self.covered

    @property
    def is_covered(self) -> bool:
        return self.covered == len(self.tokens)

    def all_requests(self) -> Iterator[RequestState]:
        """Here and below."""
        pending = [self]
        for node in pending:
            pending.extend(node.children.values())
            yield from node.requests.values()

    def __repr__(self) -> str:
        return f"<PromptNode {self.start}..{self.end}, {self.covered} covered, {self.weight} requests>"


class Follower(Protocol):
    """Told of changes of shape, each time when the tree is whole again."""

    def node_added(self, node: PromptNode) -> None:
        """A new leaf."""

    def node_split(self, upper: PromptNode, lower: PromptNode) -> None:
        """`lower` gave the beginning of its edge to `upper`, its parent now."""

    def node_removed(self, node: PromptNode) -> None:
        """A leaf without requests is gone."""

    def node_joined(self, upper: PromptNode, lower: PromptNode) -> None:
        """`upper`, which had nothing but `lower` below it, is gone; lower's edge begins where its edge began."""


class PromptTree:
    def __init__(self, page_bytes: int, num_rankings: int, follower: Follower, has_branches: bool) -> None:
        """has_branches: its nodes have a weight, and after their ranks those of order/branch.py."""
        self.page_bytes = page_bytes
        self._num_ranks = num_rankings + has_branches
        self._follower = follower
        self._has_weights = has_branches
        self._places: dict[str, PromptNode] = {}  # by request id
        self.root = PromptNode(BASE_NAMESPACE, b"", 0, None, self._num_ranks)
        self.tour = Tour(num_rankings, self.root.opens, self.root.closes)

    def place(self, request_id: str) -> PromptNode:
        return self._places[request_id]

    def add(self, state: RequestState, tokens: bytes) -> PromptNode:
        """Hang a request at the end of `tokens`, of which only whole pages count."""
        node = self._reach(state.request.namespace, tokens[: len(tokens) - len(tokens) % self.page_bytes])
        node.requests[state.request.request_id] = state
        self._places[state.request.request_id] = node
        self._weigh(node, 1)
        return node

    def _reach(self, namespace: Namespace, tokens: bytes) -> PromptNode:
        """The node where `tokens` end; made where there is none."""
        node, offset, stop = self.root, 0, len(tokens)
        while offset < stop:
            step = self._step(node, namespace, tokens, stop)
            if step is None:
                return self._grow(node, namespace, tokens[offset:])
            node, offset = step
            if offset < node.end:
                node = self._split(node, offset - node.start)
        return node

    def _step(self, node: PromptNode, namespace: Namespace, tokens: bytes, stop: int) -> tuple[PromptNode, int] | None:
        """Below a node where tokens[:node.end] lead: the last node of one chain that they go on to, and how far they do, up to `stop`."""
        child = node.children.get((namespace, tokens[node.end : node.end + self.page_bytes]))
        if child is None:
            return None
        chain = child.chain
        assert chain is not None and chain.nodes[0] is child
        depth = node.end + common_length(chain.tokens, tokens, node.end, stop, self.page_bytes)
        last = chain.node_at(depth)
        return last, min(depth, last.end)

    def _grow(self, parent: PromptNode, namespace: Namespace, tokens: bytes) -> PromptNode:
        leaf = PromptNode(namespace, tokens, parent.end, parent, self._num_ranks)
        parent.children[self.key(leaf)] = leaf
        Chain([leaf], tokens).grew()
        self.tour.insert(leaf.opens, parent.opens, is_after=True)
        self.tour.insert(leaf.closes, leaf.opens, is_after=True)
        self._follower.node_added(leaf)
        return leaf

    def _split(self, lower: PromptNode, length: int) -> PromptNode:
        parent = lower.parent
        assert parent is not None
        upper = PromptNode(lower.namespace, lower.tokens[:length], lower.start, parent, self._num_ranks)
        upper.weight = lower.weight
        parent.children[self.key(lower)] = upper
        lower.tokens, lower.start, lower.parent = lower.tokens[length:], lower.start + length, upper
        upper.children[self.key(lower)] = lower
        assert lower.chain is not None
        lower.chain.split(upper, lower)
        self.tour.insert(upper.opens, lower.opens, is_after=False)
        self.tour.insert(upper.closes, lower.closes, is_after=True)
        self._follower.node_split(upper, lower)
        return upper

    def remove(self, request_id: str) -> PromptNode:
        """Take a request out. Returns the deepest node that is left of its path."""
        node = self._places.pop(request_id)
        del node.requests[request_id]
        self._weigh(node, -1)
        while node.parent is not None and not node.requests and not node.children:
            parent = node.parent
            del parent.children[self.key(node)]
            assert node.chain is not None
            node.chain.remove_last()
            self._leave_tour(node)
            self._follower.node_removed(node)
            node.ranks = ()
            node = parent
        if node.parent is not None and not node.requests and len(node.children) == 1:
            node = self._join(node)
        return node

    def _join(self, upper: PromptNode) -> PromptNode:
        lower = next(iter(upper.children.values()))
        parent = upper.parent
        assert parent is not None
        if lower.namespace != upper.namespace:
            return upper
        parent.children[self.key(upper)] = lower
        lower.tokens, lower.start, lower.parent = upper.tokens + lower.tokens, upper.start, parent
        assert upper.chain is not None
        upper.chain.join(upper, lower)
        self._leave_tour(upper)
        self._follower.node_joined(upper, lower)
        upper.ranks = ()
        return lower

    def _leave_tour(self, node: PromptNode) -> None:
        self.tour.remove(node.opens)
        self.tour.remove(node.closes)

    def key(self, node: PromptNode) -> ChildKey:
        return node.namespace, node.tokens[: self.page_bytes]

    def _weigh(self, node: PromptNode, change: int) -> None:
        step: PromptNode | None = node if self._has_weights else None
        while step is not None:
            step.weight += change
            step = step.parent

    def nodes(self) -> Iterator[PromptNode]:
        """All but the root, parents first."""
        pending = list(self.root.children.values())
        for node in pending:
            pending.extend(node.children.values())
            yield node

    def end_of_coverage(self, node: PromptNode) -> PromptNode:
        """`node` is not covered: the first one from the root to it that is not."""
        while True:
            assert node.chain is not None
            first = node.chain.first_uncovered(node)
            assert first.parent is not None
            if first.parent.is_covered:
                return first
            node = first.parent

    def frontier(self, namespace: Namespace, tokens: bytes) -> PromptNode | None:
        """The node on the path of `tokens` where coverage ends, if they go on for a page of its edge from there."""
        node, offset, stop = self.root, 0, len(tokens) - len(tokens) % self.page_bytes
        while offset < stop and (step := self._step(node, namespace, tokens, stop)) is not None:
            node, offset = step
            if not node.is_covered:
                assert node.chain is not None
                node = node.chain.first_uncovered(node)
                return node if offset > node.depth else None
            if offset < node.end:
                break
        return None
