"""In-flight sharing: a request whose prefix is being computed right now by another one waits for it instead of computing it again.

leader     [ computed |    being computed, chunk by chunk    | its own end ]
follower   [ ........... begins the same ............ | its own end ]
                      ^ cached up to here; the next page is the leader's next: it waits

All prompts that go on with the leader's next page lie below one node of the prompts' tree: one mark on it holds them all, however many.

Nobody waits for ever: a leader computes in every step that computes prompts at all, and one that ends, or gets to where the two part, is
no leader any more. A request that is overdue (order/bound.py) waits for one leader at most, the one it has when that is noticed; after
that it goes first, and computes for itself.
"""

from collections.abc import Callable, Iterable

from radixserve.scheduler.order.prompt_tree import PromptNode, PromptTree
from radixserve.scheduler.state import RequestState


class InFlight:
    """Marks the nodes of the prompts' tree below which all wait for a leader. `on_change` is called for each whose mark changed;
    `overdue_in` gives the first overdue one of a node's requests. Leaders are named by number: nothing keeps one that has ended."""

    def __init__(
        self,
        prompts: PromptTree,
        on_change: Callable[[PromptNode], None],
        overdue_in: Callable[[PromptNode], RequestState | None],
    ) -> None:
        self._prompts = prompts
        self._on_change = on_change
        self._overdue_in = overdue_in
        self._held: dict[int, PromptNode] = {}  # by id

    def look(self, leaders: Iterable[RequestState]) -> None:
        """Hold whoever a running request computes for, and let go all others."""
        before, self._held = self._held, {}
        for leader in leaders:
            self.follow(leader)
        for number, node in before.items():
            if number not in self._held and node.holder is not None:
                node.holder = None
                self._on_change(node)

    def follow(self, leader: RequestState) -> None:
        """Hold those who go on with what this running request computes next."""
        if leader.is_decoding:
            return
        node = self._prompts.frontier(leader.request.namespace, leader.token_ids.tobytes())
        if node is not None:
            self._hold(node, leader.arrival)

    def rise(self) -> None:
        """An admission evicted pages: a mark below what is not covered any more goes up to where coverage ends now."""
        for node in [*self._held.values()]:
            assert node.parent is not None
            if node.holder is not None and not node.parent.is_covered:
                self._hold(self._prompts.end_of_coverage(node), node.holder)
                del self._held[id(node)]
                node.holder = None
                self._on_change(node)

    def _hold(self, node: PromptNode, leader: int) -> None:
        if id(node) in self._held:
            return
        overdue = self._overdue_in(node)
        if overdue is not None:
            if overdue.leader is not None and overdue.leader != leader:
                return
            overdue.leader = leader
        self._held[id(node)] = node
        if node.holder != leader:
            node.holder = leader
            self._on_change(node)

    def removed(self, node: PromptNode) -> None:
        """The node is gone from the tree. Other changes of shape wait for the next look()."""
        self._held.pop(id(node), None)
