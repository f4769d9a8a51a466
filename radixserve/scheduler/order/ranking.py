"""Who is first, kept by the prompts' tree: each node knows the first of what waits at and below it, so a change touches one path upward.

Below a node whose edge is not wholly cached all requests match the same length, and stand in an order that does not depend on it (`rank`).
Above, what a node hands to its parent is the best of its children and its own requests (`value`), or nothing while a running request
computes what they all begin with.

    value(node) = none                                      held: they wait for a leader
                | rank of the first, at the depth covered   the edge is covered in part, or not at all
                | first of children's and own values        covered wholly
"""

import heapq
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from radixserve.scheduler.state import RequestState

if TYPE_CHECKING:
    from radixserve.scheduler.order.prompt_tree import PromptNode

Key = tuple[float, ...]  # the smallest goes first; no two requests have equal ones
Item = TypeVar("Item")


class LazyMin(Generic[Item]):
    """Items with keys that may change, the smallest at hand. Stale entries stay in the heap until they come up.

    Most hold one item for as long as they live, and need no heap: `_only`.
    """

    __slots__ = ("_heap", "_items", "_only")

    def __init__(self) -> None:
        self._only: tuple[Key, Item] | None = None
        self._items: dict[int, tuple[Key, Item]] | None = None
        self._heap: list[tuple[Key, int]] = []

    def put(self, item: Item, key: Key | None) -> bool:
        """None takes it out. Returns whether anything changed."""
        only, items = self._only, self._items
        if items is None:
            if only is None or only[1] is item:
                self._only = (key, item) if key is not None else None
                return (only[0] if only is not None else None) != key
            if key is None:
                return False
            items = self._items = {id(only[1]): only}
            self._heap, self._only = [(only[0], id(only[1]))], None
        number = id(item)  # the item is kept alive by the dict as long as the number counts
        held = items.get(number)
        if key is None:
            return items.pop(number, None) is not None
        if held is not None and held[0] == key:
            return False
        items[number] = (key, item)
        heapq.heappush(self._heap, (key, number))
        if len(self._heap) > 2 * len(items) + 16:
            self._heap = [(key, number) for number, (key, _) in items.items()]
            heapq.heapify(self._heap)
        return True

    def get(self, item: Item) -> tuple[Key, Item] | None:
        if self._items is None:
            return self._only if self._only is not None and self._only[1] is item else None
        return self._items.get(id(item))

    def first(self) -> tuple[Key, Item] | None:
        items = self._items
        if items is None:
            return self._only
        heap = self._heap
        while heap:
            key, number = heap[0]
            held = items.get(number)
            if held is not None and held[0] == key:
                return held
            heapq.heappop(heap)
        return None


class NodeRank:
    """What one ranking keeps at one node: children (the node) and own requests (the state), by rank and by value."""

    __slots__ = ("ranks", "values")

    def __init__(self) -> None:
        self.ranks: LazyMin[PromptNode | RequestState] = LazyMin()
        self.values: LazyMin[PromptNode | RequestState] = LazyMin()


class Rules(NamedTuple):
    """A policy in three functions. `depth` is in tokens."""

    rank: Callable[[RequestState], Key]  # among requests that match the same length; fixed while it waits
    at_depth: Callable[[Key, int], Key]  # the same key where `depth` tokens are cached: comparable with others at other depths
    of_branch: "Callable[[PromptNode, Key], Key]"  # of a node, from the best key in it: its place among its siblings
    stays: bool = False  # in the branch of the last one admitted, until it is empty; a key's first part is its class then


def keep(node: "PromptNode", best: Key) -> Key:
    """A branch stands where the best of it would stand alone."""
    return best


class Ranking:
    """One order over all waiting requests; `index` is its place in PromptNode.ranks."""

    def __init__(self, rules: Rules, index: int, token_bytes: int) -> None:
        self._rules = rules
        self._index = index
        self._token_bytes = token_bytes
        self._keys: dict[str, Key] = {}  # ranks by request id

    def key(self, request_id: str) -> Key:
        return self._keys[request_id]

    def key_at(self, state: RequestState, depth: int) -> Key:
        """The key that it would have, waiting, if `depth` of its tokens were cached."""
        return self._rules.at_depth(self._rules.rank(state), depth)

    def add(self, state: RequestState, node: "PromptNode") -> None:
        """A request hangs at `node` now."""
        key = self._keys[state.request.request_id] = self._rules.rank(state)
        self._put(state, node, key)
        self.refresh(node)

    def drop(self, state: RequestState, node: "PromptNode") -> None:
        """It hangs there no more; `node` may be gone from the tree."""
        del self._keys[state.request.request_id]
        rank = node.ranks[self._index]
        rank.ranks.put(state, None)
        rank.values.put(state, None)

    def _put(self, state: RequestState, node: "PromptNode", key: Key) -> None:
        rank = node.ranks[self._index]
        rank.ranks.put(state, key)
        rank.values.put(state, self._rules.at_depth(key, node.end // self._token_bytes))

    def refresh(self, node: "PromptNode") -> None:
        """Somebody came to or left `node`: put it right in all nodes above, as far as it shows."""
        index, step, parent = self._index, node, node.parent
        is_kept = self._rules.of_branch is keep
        while parent is not None:
            above = parent.ranks[index]
            has_changed = above.values.put(step, self._value(step))
            first = step.ranks[index].ranks.first()
            has_changed = above.ranks.put(step, first[0] if first is not None else None) or has_changed
            if not has_changed and is_kept:
                return  # another rule may look at more than the best key: the weight
            step, parent = parent, parent.parent

    def settle(self, nodes: Iterable["PromptNode"]) -> None:
        """Coverage or marks of these changed, nobody came or went: put values right from below, each node once."""
        pending = {id(node): node for node in nodes}
        heap = [(-node.start, number) for number, node in pending.items()]
        heapq.heapify(heap)
        while heap:
            node = pending[heapq.heappop(heap)[1]]
            parent = node.parent
            if parent is None or not parent.ranks[self._index].values.put(node, self._value(node)) or id(parent) in pending:
                continue  # one that is pending comes later: it begins above
            pending[id(parent)] = parent
            heapq.heappush(heap, (-parent.start, id(parent)))

    def _value(self, node: "PromptNode") -> Key | None:
        if node.holder is not None:
            return None
        rank = node.ranks[self._index]
        if node.covered == len(node.tokens):
            best = rank.values.first()
            if best is None:
                return None
            key = best[0]
        else:
            first = rank.ranks.first()
            if first is None:
                return None
            key = self._rules.at_depth(first[0], (node.start + node.covered) // self._token_bytes)
        return key if self._rules.of_branch is keep else self._rules.of_branch(node, key)

    def take_out(self, child: "PromptNode", parent: "PromptNode") -> None:
        """`child` hangs below `parent` no more."""
        rank = parent.ranks[self._index]
        rank.ranks.put(child, None)
        rank.values.put(child, None)

    def first(self, root: "PromptNode") -> RequestState | None:
        """Of all that are not held."""
        item: PromptNode | RequestState = root
        while not isinstance(item, RequestState):
            rank = item.ranks[self._index]
            best = rank.values.first() if item.is_covered else rank.ranks.first()
            if best is None:
                return None
            item = best[1]
        return item

    def value(self, node: "PromptNode") -> Key | None:
        """What the node is to its parent; None where nobody below may go."""
        best = node.parent.ranks[self._index].values.get(node) if node.parent is not None else node.ranks[self._index].values.first()
        return best[0] if best is not None else None

    def oldest(self, node: "PromptNode") -> RequestState | None:
        """First by rank of all at and below the node, held ones too."""
        item: PromptNode | RequestState = node
        while not isinstance(item, RequestState):
            best = item.ranks[self._index].ranks.first()
            if best is None:
                return None
            item = best[1]
        return item
