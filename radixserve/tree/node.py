"""TreeNode: one edge of the tree and the node below it."""

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

from radixserve.core import IntArray, Namespace

if TYPE_CHECKING:
    from radixserve.tree.eviction import LeafQueue

_next_id = count()

ChildKey = tuple[Namespace, bytes]  # namespace of the child's segment, tokens of its first page


class TreeNode:
    """The edge's tokens, and the pages where their keys and values lie, one id per page.

    `pages` is None for a ghost: remembered, so that a miss can be explained, but gone. A ghost has only ghosts below it.
    """

    __slots__ = (
        "children",
        "created_at",
        "evicted_at",
        "eviction_cause",
        "hits",
        "last_access",
        "lock_ref",
        "namespace",
        "node_id",
        "num_live_children",
        "order_queue",
        "order_ticket",
        "pages",
        "parent",
        "pinned_until",
        "priority",
        "tokens",
    )

    def __init__(self, namespace: Namespace, tokens: bytes, pages: IntArray | None, parent: "TreeNode | None", now: float) -> None:
        self.node_id = next(_next_id)
        self.namespace = namespace
        self.tokens = tokens
        self.pages = pages
        self.parent = parent
        self.children: dict[ChildKey, TreeNode] = {}
        self.num_live_children = 0  # children with pages
        self.lock_ref = 0  # requests whose node is this one or lies below
        self.last_access = now
        self.created_at = now  # or got pages again
        self.hits = 0  # times that it was found again: locked by a match, or met by an insert, also as a ghost
        self.priority = 0  # the highest of the requests that used it since it has pages
        self.pinned_until = 0.0  # see pins.py; 0: not pinned
        self.order_queue: LeafQueue | None = None  # see eviction.py; None: it is no evictable leaf
        self.order_ticket = 0
        self.evicted_at = 0.0
        self.eviction_cause = ""

    @property
    def num_pages(self) -> int:
        return len(self.pages) if self.pages is not None else 0

    @property
    def is_evictable_leaf(self) -> bool:
        return self.pages is not None and self.parent is not None and self.lock_ref == 0 and self.num_live_children == 0

    def lineage(self) -> "Iterator[TreeNode]":
        """This node, then what is above it; the root last."""
        node: TreeNode | None = self
        while node is not None:
            yield node
            node = node.parent

    def descendants(self) -> "list[TreeNode]":
        """All nodes below, parents first."""
        found = list(self.children.values())
        for node in found:
            found.extend(node.children.values())
        return found

    def __repr__(self) -> str:
        held = "ghost" if self.pages is None else f"{len(self.pages)} pages"
        return f"<TreeNode {self.node_id} {held}, lock_ref {self.lock_ref}, {len(self.children)} children>"
