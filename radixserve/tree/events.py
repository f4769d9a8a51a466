"""What happened to the tree, as plain data: the one source for KV events, pictures and explanations."""

import hashlib
from dataclasses import dataclass

from radixserve.core import Namespace
from radixserve.tree.node import TreeNode


@dataclass(frozen=True, slots=True)
class TreeEvent:
    """Tokens that became cached (cause "insert") or stopped being so ("evict", "trim", "flush"), below the path with parent_hash."""

    cause: str
    namespace: Namespace
    parent_hash: bytes  # path_hash of the path that these tokens follow; b"" at the root and for "flush", which means everything
    tokens: bytes  # int32 each
    time_s: float


def path_hash(node: TreeNode) -> bytes:
    """SHA-256 over namespaces and tokens from the root to the end of `node`; a split does not change it. b"" for the root."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    if not path:
        return b""
    digest = hashlib.sha256()
    namespace: Namespace | None = None
    for step in reversed(path):
        if step.namespace != namespace:
            namespace = step.namespace
            for part in namespace:
                encoded = part.encode()
                digest.update(len(encoded).to_bytes(8, "little") + encoded)
        digest.update(step.tokens)
    return digest.digest()
