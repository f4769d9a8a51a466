"""Branch: depth first. It stays with what begins like the last one admitted, as long as any of that may go; else into the heaviest branch.

Each node keeps its children, and itself for its own requests, by what they are among their siblings:

    (class, 0, -weight, arrived, arrival)   a branch that is cached at least in part; arrived, arrival of the one that it would choose
    (class, 1, 0, arrived, arrival)         one that is not, and own requests

A change only marks the way up as stale; what is stale is put right where somebody looks, which is mostly a small branch deep down.
"""

from collections.abc import Iterable

from radixserve.core import BASE_NAMESPACE
from radixserve.scheduler.order.prompt_tree import PromptNode, PromptTree
from radixserve.scheduler.order.ranking import Ranking
from radixserve.scheduler.order.tour import Key
from radixserve.scheduler.state import RequestState


class Branch:
    """Told of each admission, of whatever a Ranking is told, and of each node that another one takes the place of; after the `ranking` of
    (class, arrived, arrival) that finds the first class, and the first of those that branches do not part."""

    def __init__(self, prompts: PromptTree, ranking: Ranking, index: int) -> None:
        self._prompts = prompts
        self._ranking = ranking
        self._index = index  # of PromptNode.ranks
        self._node = prompts.root  # its edge begins like the last one admitted
        self._namespace = BASE_NAMESPACE
        self._tokens = b""

    # ---- what changes

    def admitted(self, state: RequestState, node: PromptNode) -> None:
        """It hangs at `node` still."""
        self._node, self._namespace = node, state.request.namespace
        self._tokens = state.cacheable_tokens()

    def replaced(self, node: PromptNode, by: PromptNode) -> None:
        if self._node is node:
            self._node = by

    def take_out(self, child: PromptNode, parent: PromptNode) -> None:
        rank = parent.ranks[self._index]
        rank.stale.discard(child)
        rank.places.put(child, None)

    def refresh(self, node: PromptNode) -> None:
        own = self._ranking.first_at(node)
        node.ranks[self._index].places.put(node, self._plain(own) if own is not None else None)
        if node.children or node.parent is None:
            self._mark(node)
        else:  # thousands may come before anybody looks
            node.parent.ranks[self._index].places.put(node, self._place(node))
            self._mark(node.parent)

    def settle(self, nodes: Iterable[PromptNode]) -> None:
        pending = set(nodes)
        for node in pending:
            self._mark(node, pending)

    def _mark(self, node: PromptNode, pending: Iterable[PromptNode] = ()) -> None:
        """Stale, and so are all above; above a covered node that has something stale already they are."""
        step, parent = node, node.parent
        while parent is not None:
            stale = parent.ranks[self._index].stale
            if step in stale and parent.is_covered:
                return
            stale.add(step)
            if parent in pending:
                return
            step, parent = parent, parent.parent

    # ---- who is first

    def first(self) -> RequestState | None:
        """Of all that are not held."""
        best = self._ranking.first()
        if best is None:
            return None
        node = self._find(self._ranking.key(best.request.request_id)[0])
        self._bring_up(node)
        while node.is_covered:
            place = node.ranks[self._index].places.first()
            assert place is not None
            if place[1] is node:
                own = self._ranking.first_at(node)
                assert own is not None
                return own
            node = place[1]
        return self._ranking.first_below(node)

    def _find(self, first_class: float) -> PromptNode:
        """The deepest cached node that begins like the last one admitted and has somebody of this class who may go."""
        node = self._node
        while node.parent is not None and not self._may_stay(node, first_class):
            node = node.parent
        while (child := self._next(node)) is not None and self._may_stay(child, first_class):
            node = child
        self._node = node
        return node

    def _may_stay(self, node: PromptNode, first_class: float) -> bool:
        if not node.covered:
            return False
        self._bring_up(node)
        place = self._place(node)
        return place is not None and place[0] == first_class

    def _next(self, node: PromptNode) -> PromptNode | None:
        if not node.is_covered or not self._tokens.startswith(node.tokens, node.start):
            return None
        return node.children.get((self._namespace, self._tokens[node.end : node.end + self._prompts.page_bytes]))

    def _bring_up(self, node: PromptNode) -> None:
        """Put right all that is stale below it, as far down as it shows."""
        pending = [node]
        for step in pending:
            if step.is_covered and step.holder is None:
                rank = step.ranks[self._index]
                pending.extend(rank.stale)
                rank.stale.clear()
        for step in reversed(pending[1:]):
            assert step.parent is not None
            step.parent.ranks[self._index].places.put(step, self._place(step))

    def _place(self, node: PromptNode) -> Key | None:
        """Among its siblings, if nothing below it is stale; None where nobody may go."""
        if node.holder is not None:
            return None
        if not node.is_covered:
            best: Key | None = self._plain(self._ranking.first_below(node))
        else:
            first = node.ranks[self._index].places.first()
            best = first[0] if first is not None else None
        return (best[0], 0, -node.weight, *best[3:]) if best is not None and node.covered else best

    def _plain(self, state: RequestState) -> Key:
        first_class, *arrived = self._ranking.key(state.request.request_id)
        return first_class, 1, 0, *arrived
