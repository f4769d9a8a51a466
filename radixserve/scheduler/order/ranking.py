"""Who is first. A change costs about the same however deep the prompts' tree is: nothing is handed upward from node to node.

Coverage parts the tree: from the root down to some depth its nodes are covered wholly, below they are not. Requests below one node where
coverage ends match the same length, and stand in an order that does not depend on it (`rank`): their first is found in the tree's
tour. Only covered nodes are compared with one another, all of them in one heap:

    tops      every covered node, by the first of its places
    places    of a node: itself, for its own requests; each child that is not covered wholly, by the rank of the first below it, at the
              depth covered; not one that is held: all below it wait for a running request that computes what they begin with

Below what is not covered nobody looks at places: those of chains' first nodes are noted as stale, and looked up when the node above is
covered; those of the others in a chain are looked up then in any case.
"""

import heapq
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from radixserve.scheduler.order.tour import NO_KEY, Key, Tour
from radixserve.scheduler.state import RequestState

if TYPE_CHECKING:
    from radixserve.scheduler.order.prompt_tree import PromptNode

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
    """What one ranking keeps at one node."""

    __slots__ = ("own", "places", "stale")

    def __init__(self) -> None:
        self.own: LazyMin[RequestState] = LazyMin()  # requests that hang here, by rank
        self.places: LazyMin[PromptNode] = LazyMin()
        self.stale: set[PromptNode] = set()  # children whose places must be looked up before they count


class Rules(NamedTuple):
    """A policy in two functions. `depth` is in tokens."""

    rank: Callable[[RequestState], Key]  # among requests that match the same length; fixed while it waits
    at_depth: Callable[[Key, int], Key]  # the same key where `depth` tokens are cached: comparable with others at other depths
    is_depth_first: bool = False  # order/branch.py chooses among those whose key has the smallest first part


class Ranking:
    """One order over all waiting requests; `index` is its place in PromptNode.ranks."""

    def __init__(self, rules: Rules, index: int, token_bytes: int, tour: Tour) -> None:
        self._rules = rules
        self._index = index
        self._token_bytes = token_bytes
        self._tour = tour
        self._keys: dict[str, Key] = {}  # ranks by request id
        self._states: dict[Key, RequestState] = {}
        self._tops: LazyMin[PromptNode] = LazyMin()

    def key(self, request_id: str) -> Key:
        return self._keys[request_id]

    def key_at(self, state: RequestState, depth: int) -> Key:
        """The key that it would have, waiting, if `depth` of its tokens were cached."""
        return self._rules.at_depth(self._rules.rank(state), depth)

    # ---- requests come and go, the tree changes its shape

    def add(self, state: RequestState, node: "PromptNode") -> None:
        """A request hangs at `node` now. refresh() must follow."""
        key = self._keys[state.request.request_id] = self._rules.rank(state)
        self._states[key] = state
        node.ranks[self._index].own.put(state, key)

    def drop(self, state: RequestState, node: "PromptNode") -> None:
        """It hangs there no more. refresh() of what is left of its path must follow."""
        del self._states[self._keys.pop(state.request.request_id)]
        node.ranks[self._index].own.put(state, None)

    def take_out(self, child: "PromptNode", parent: "PromptNode") -> None:
        """`child` hangs below `parent` no more. If it is still in the tree, refresh() must follow."""
        rank = parent.ranks[self._index]
        rank.stale.discard(child)
        if rank.places.put(child, None):
            self._put_top(parent)
        self._tops.put(child, None)

    def refresh(self, node: "PromptNode") -> None:
        """Somebody came to or left `node`, or it has another parent: put right what shows of it above."""
        rank = node.ranks[self._index]
        own = rank.own.first()
        self._tour.put(node.opens, self._index, own[0] if own is not None else NO_KEY)
        rank.places.put(node, self._key_at_depth(own[0], node.end) if own is not None else None)
        top = node
        if node.parent is not None and not node.is_covered:
            node.parent.ranks[self._index].places.put(node, self._place(node))
            top = self._show(node)
        self._put_top(top)

    def _show(self, node: "PromptNode") -> "PromptNode":
        """Put right the place that shows of a node that is not covered, and note those between them. Returns the covered node above."""
        step = node
        while True:
            assert step.chain is not None
            first = step.chain.first_uncovered(step)
            parent = first.parent
            assert parent is not None
            rank = parent.ranks[self._index]
            if parent.is_covered:
                rank.places.put(first, self._place(first))
                return parent
            if first is not node:  # its own place is right
                rank.stale.add(first)
            step = parent

    def settle(self, nodes: Iterable["PromptNode"]) -> None:
        """Coverage or marks of these changed, nobody came or went."""
        tops: dict[int, PromptNode] = {}
        for node in nodes:
            parent, rank = node.parent, node.ranks[self._index]
            if node.is_covered:
                tops[id(node)] = node
                self._look_up(node, rank)
            else:
                self._tops.put(node, None)
            if parent is None:
                continue
            if node.is_covered or parent.is_covered:
                parent.ranks[self._index].places.put(node, self._place(node))
                tops[id(parent)] = parent
            else:
                parent.ranks[self._index].stale.add(node)
        for node in tops.values():
            self._put_top(node)

    def _look_up(self, node: "PromptNode", rank: NodeRank) -> None:
        following = node.chain.after(node) if node.chain is not None else None
        if following is not None:
            rank.stale.add(following)
        for child in rank.stale:
            rank.places.put(child, self._place(child))
        rank.stale.clear()

    def _put_top(self, node: "PromptNode") -> None:
        best = node.ranks[self._index].places.first() if node.is_covered else None
        self._tops.put(node, best[0] if best is not None else None)

    def _place(self, node: "PromptNode") -> Key | None:
        """Among the places of its parent."""
        if node.holder is not None or node.is_covered:
            return None
        return self._key_at_depth(self._first_below(node), node.depth)

    def _key_at_depth(self, key: Key, depth: int) -> Key:
        return self._rules.at_depth(key, depth // self._token_bytes)

    def _first_below(self, node: "PromptNode") -> Key:
        if node.children:
            return self._tour.first(node.opens, node.closes, self._index)
        own = node.ranks[self._index].own.first()
        assert own is not None, "a leaf without requests"
        return own[0]

    # ---- who is first

    def first(self) -> RequestState | None:
        """Of all that are not held."""
        top = self._tops.first()
        if top is None:
            return None
        best = top[1].ranks[self._index].places.first()
        assert best is not None
        return self.first_at(top[1]) if best[1] is top[1] else self.first_below(best[1])

    def first_at(self, node: "PromptNode") -> RequestState | None:
        """By rank of those that hang here."""
        own = node.ranks[self._index].own.first()
        return own[1] if own is not None else None

    def first_below(self, node: "PromptNode") -> RequestState:
        """By rank of all at and below the node, held ones too. There must be one."""
        return self._states[self._first_below(node)]
