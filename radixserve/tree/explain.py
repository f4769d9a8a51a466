"""Why did a prompt miss? Read off the tree: what is cached, what was and is gone, where the nearest known path parts from the prompt."""

from dataclasses import dataclass

from radixserve.core import IntArray, Namespace
from radixserve.tree.key import TOKEN_BYTES, common_length, unpacked
from radixserve.tree.node import TreeNode
from radixserve.tree.radix_tree import RadixTree

SHOWN_TOKENS = 8


@dataclass(frozen=True, slots=True)
class MatchExplanation:
    """Lengths in tokens. 0 <= num_cached <= num_remembered <= num_common <= len(prompt)."""

    num_prompt: int
    num_cached: int  # pages are there, before the cap of len(prompt) - 1
    num_remembered: int  # whole pages that are or once were there
    num_common: int  # equal tokens along the nearest path, page rounding aside
    evicted_at: float | None  # when the first missing page went, on the clock given to the tree
    eviction_cause: str
    asked_tokens: IntArray  # the prompt from num_common on, a few tokens
    known_tokens: IntArray  # the nearest path from num_common on, a few tokens; empty where it ends
    other_namespaces: tuple[Namespace, ...]  # that hold the prompt's first page


def explain(tree: RadixTree, namespace: Namespace, token_ids: IntArray) -> MatchExplanation:
    """Follow the prompt through pages and ghosts alike. Changes nothing."""
    tokens, page_bytes = token_ids.tobytes(), tree.page_size * TOKEN_BYTES
    node, offset, num_cached, gone = tree.root, 0, 0, None
    edge_left = b""  # of the node where the walk ended, what lies beyond the equal part
    while True:
        child = node.children.get((namespace, tokens[offset : offset + page_bytes]))
        if child is None:
            break
        num_bytes = common_length(child.tokens, tokens, offset, len(tokens), page_bytes)
        if child.pages is None:
            gone = gone or child
        else:
            num_cached += num_bytes
        node, offset, edge_left = child, offset + num_bytes, child.tokens[num_bytes:]
        if edge_left:
            break
    known = edge_left or _nearest_edge(node, namespace, tokens[offset:])
    num_common = offset + common_length(known, tokens, offset, len(tokens), TOKEN_BYTES)
    first_page = tokens[:page_bytes]
    return MatchExplanation(
        num_prompt=len(token_ids),
        num_cached=num_cached // TOKEN_BYTES,
        num_remembered=offset // TOKEN_BYTES,
        num_common=num_common // TOKEN_BYTES,
        evicted_at=gone.evicted_at if gone else None,
        eviction_cause=gone.eviction_cause if gone else "",
        asked_tokens=unpacked(tokens[num_common : num_common + SHOWN_TOKENS * TOKEN_BYTES]),
        known_tokens=unpacked(known[num_common - offset :][: SHOWN_TOKENS * TOKEN_BYTES]),
        other_namespaces=tuple(other for other, page in tree.root.children if page == first_page and other != namespace),
    )


def _nearest_edge(node: TreeNode, namespace: Namespace, tokens: bytes) -> bytes:
    """The edge below `node` that shares the most leading tokens with `tokens`, all of them less than a page."""
    edges = [child.tokens for child in node.children.values() if child.namespace == namespace]
    return max(edges, key=lambda edge: common_length(edge, tokens, 0, len(tokens), TOKEN_BYTES), default=b"")
