"""What happened to the tree, as plain data: the one source for KV events, pictures and explanations."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from radixserve.core import BASE_NAMESPACE, Namespace
from radixserve.tree.node import TreeNode


@dataclass(frozen=True, slots=True)
class TreeEvent:
    """Tokens that became cached (cause "insert") or stopped being so ("evict", "trim", "flush"), below the path with parent_hash.

    insert: whole pages, a new edge, one whose pages were gone, or more tokens at the end of an edge. evict: a whole edge, nothing is cached
    below it. trim: the end of an edge. A split, a lock and a pin change nothing of what is cached, and are no events.
    """

    cause: str
    namespace: Namespace
    parent_hash: bytes  # path_hash of the path that these tokens follow; b"" at the root and for "flush", which means everything
    tokens: bytes  # int32 each
    time_s: float


def path_hash(node: TreeNode) -> bytes:
    """SHA-256 over namespaces and tokens from the root to the end of `node`; a split does not change it. b"" for the root."""
    path = [*node.lineage()][-2::-1]
    if not path:
        return b""
    digest = hashlib.sha256()
    namespace: Namespace | None = None
    for step in path:
        if step.namespace != namespace:
            namespace = step.namespace
            for part in namespace:
                encoded = part.encode()
                digest.update(len(encoded).to_bytes(8, "little") + encoded)
        digest.update(step.tokens)
    return digest.digest()


class EventLog:
    """Hands events to whoever listens; makes none where nobody does."""

    def __init__(self, listener: Callable[[TreeEvent], None] | None) -> None:
        self._listener = listener

    def emit(self, cause: str, node: TreeNode, tokens: bytes, now: float, is_below: bool = False) -> None:
        """Tokens of `node`'s own edge, or of what lies below it."""
        if self._listener is not None:
            above = node if is_below else node.parent
            assert above is not None
            self._listener(TreeEvent(cause, node.namespace, path_hash(above), tokens, now))

    def emit_flush(self, now: float) -> None:
        if self._listener is not None:
            self._listener(TreeEvent("flush", BASE_NAMESPACE, b"", b"", now))
