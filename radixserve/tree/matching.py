"""The longest cached prefix of a key: how far it goes, and with which pages. Looks, and changes nothing."""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from radixserve.core import IntArray
from radixserve.tree.key import TOKEN_BYTES, Segment, common_length
from radixserve.tree.node import TreeNode


class Match(NamedTuple):
    """A longest cached prefix. Valid until the tree's version changes."""

    length: int  # tokens, a multiple of the page size
    pages: IntArray  # not to be changed: it may be a node's own
    num_unlocked_pages: int  # of them; taking the lock makes so many pages unevictable
    node: TreeNode  # the deepest node reached
    node_length: int  # tokens matched on that node's own edge
    version: int

    def path(self) -> list[TreeNode]:
        """From below the root to `node`."""
        return [*self.node.lineage()][-2::-1]


def longest_match(root: TreeNode, segments: Iterable[Segment], page_size: int, version: int) -> Match:
    """`segments` are cut to whole pages."""
    page_bytes = page_size * TOKEN_BYTES
    node, node_bytes, num_unlocked = root, 0, 0
    parts: list[IntArray] = []
    is_inside = False  # an edge: nothing goes on from there
    for namespace, tokens in segments:
        offset, stop = 0, len(tokens)
        while offset < stop:
            child = node.children.get((namespace, bytes(tokens[offset : offset + page_bytes])))
            if child is None or child.pages is None:
                break
            node, node_bytes = child, common_length(child.tokens, tokens, offset, stop, page_bytes)
            num_pages = node_bytes // page_bytes
            parts.append(child.pages if num_pages == len(child.pages) else child.pages[:num_pages])
            if child.lock_ref == 0:
                num_unlocked += num_pages
            offset += node_bytes
            is_inside = node_bytes < len(child.tokens)
            if is_inside:
                break
        if is_inside or offset < stop:
            break
    pages = joined(parts)
    return Match(len(pages) * page_size, pages, num_unlocked, node, node_bytes // TOKEN_BYTES, version)


def num_unlocked_by(nodes: Iterable[TreeNode | None], match: Match) -> Iterator[int]:
    """For each of some locked nodes: pages that its unlocking, after those before it, leaves unlocked, but for the match's own."""
    page_size = len(match.pages) and match.length // len(match.pages)
    matched = {id(node): node.num_pages for node in match.path()}
    if matched:
        matched[id(match.node)] = match.node_length // page_size
    num_locks: Counter[int] = Counter()
    for node in nodes:
        num_unlocked = 0
        while node is not None:
            num_locks[id(node)] += 1
            if num_locks[id(node)] == node.lock_ref:
                num_unlocked += node.num_pages - matched.get(id(node), 0)
            node = node.parent
        yield num_unlocked


def joined(parts: list[IntArray]) -> IntArray:
    """One array; of a single part that part itself, since long prefixes are mostly one edge and pages of an edge never change in place."""
    if len(parts) == 1:
        return parts[0]
    whole: IntArray = array("i")
    for part in parts:
        whole.extend(part)
    return whole
