"""GhostList: nodes whose pages are gone, kept for a while so that a miss can be explained. Bounded; the oldest is forgotten first.

Eviction goes from the leaves up, so a ghost is always older than the ghost above it: the oldest has no children.
"""

from collections import OrderedDict
from collections.abc import Iterator

from radixserve.tree.key import TOKEN_BYTES
from radixserve.tree.node import TreeNode

MIN_MAX_GHOSTS = 16384
TOKENS_PER_GHOST = 256  # the number is bounded too: a ghost of one token costs as much memory as one of a hundred


class GhostList:
    def __init__(self, max_tokens: int, page_bytes: int) -> None:
        self._max_tokens = max_tokens
        self._max_ghosts = max(MIN_MAX_GHOSTS, max_tokens // TOKENS_PER_GHOST)
        self._page_bytes = page_bytes
        # by node id, oldest first; in a plain dict the first is found by a walk over all that went before it
        self._ghosts: OrderedDict[int, TreeNode] = OrderedDict()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._ghosts)

    def __iter__(self) -> Iterator[TreeNode]:
        return iter(self._ghosts.values())

    def __contains__(self, node: TreeNode) -> bool:
        return node.node_id in self._ghosts

    def add(self, node: TreeNode, now: float, cause: str) -> None:
        """Take in a node that lost its pages, as the newest; then forget the oldest ones beyond the bound."""
        self.discard(node)
        node.evicted_at, node.eviction_cause = now, cause
        self._ghosts[node.node_id] = node
        self.num_tokens += len(node.tokens) // TOKEN_BYTES
        while self.num_tokens > self._max_tokens or len(self._ghosts) > self._max_ghosts:
            self._forget(next(iter(self._ghosts.values())))

    def discard(self, node: TreeNode) -> None:
        """Take out a node that has pages again, or is about to be added anew."""
        if self._ghosts.pop(node.node_id, None) is not None:
            self.num_tokens -= len(node.tokens) // TOKEN_BYTES

    def shrink(self, num_bytes: int) -> None:
        """A ghost lost its leading num_bytes bytes of tokens to a node that is no ghost."""
        self.num_tokens -= num_bytes // TOKEN_BYTES

    def prepend(self, node: TreeNode, tokens: bytes) -> None:
        node.tokens = tokens + node.tokens
        if node in self:
            self.num_tokens += len(tokens) // TOKEN_BYTES

    def take_tail(self, leaf: TreeNode, tail: bytes) -> TreeNode:
        """Put the tokens that were just cut off the end of a leaf into a ghost below it: one ghost, however often it is trimmed, unless it
        was found again in between.

        The caller adds it as the newest.
        """
        only_child = next(iter(leaf.children.values())) if len(leaf.children) == 1 else None
        if only_child is not None and (only_child.namespace, only_child.hits) == (leaf.namespace, leaf.hits):
            self.prepend(only_child, tail)
            ghost = only_child
        else:
            ghost = TreeNode(leaf.namespace, tail, None, leaf, leaf.last_access)
            ghost.hits = leaf.hits
            ghost.children = leaf.children
            for child in ghost.children.values():
                child.parent = ghost
        leaf.children = {(ghost.namespace, ghost.tokens[: self._page_bytes]): ghost}
        return ghost

    def clear(self) -> None:
        self._ghosts.clear()
        self.num_tokens = 0

    def _forget(self, node: TreeNode) -> None:
        self.discard(node)
        parent = node.parent
        assert parent is not None and not node.children, f"expected the oldest ghost to be a leaf, got {node}"
        del parent.children[node.namespace, node.tokens[: self._page_bytes]]
