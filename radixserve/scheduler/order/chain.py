"""Chain: a run of nodes of the prompts' tree, each a child of the one before, stepped over as one: their tokens are compared at once.

    a ── b ── c ── d       of a node's children the one whose path goes on furthest carries the chain on, as of when the last one came;
         └ e  └ f ── g     every other begins a chain of its own: [a b c d], [e], [f g]

Prompts cut anywhere in one document hang along it by the hundred, and still lie a chain or two from the root.
"""

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixserve.scheduler.order.prompt_tree import PromptNode


class Chain:
    __slots__ = ("nodes", "starts", "tokens")

    def __init__(self, nodes: "list[PromptNode]", tokens: bytes) -> None:
        self.nodes = nodes
        self.starts = [node.start for node in nodes]  # depths, as those of the nodes
        self.tokens = tokens  # of the nodes' edges; may go on where the last ones are gone
        for node in nodes:
            node.chain = self

    @property
    def end(self) -> int:
        return self.nodes[-1].end

    def node_at(self, depth: int) -> "PromptNode":
        """On whose edge the last byte before `depth` lies."""
        return self.nodes[bisect_left(self.starts, depth) - 1]

    def first_uncovered(self, last: "PromptNode") -> "PromptNode":
        """`last` is not covered: of the nodes up to it the first that is not; those before it are."""
        return self.nodes[bisect_left(self.nodes, True, hi=bisect_left(self.starts, last.start), key=lambda node: not node.is_covered)]

    def after(self, node: "PromptNode") -> "PromptNode | None":
        at = bisect_left(self.starts, node.start) + 1
        return self.nodes[at] if at < len(self.nodes) else None

    # ---- the tree changes its shape

    def grew(self) -> None:
        """It is a new leaf: let it carry on each chain that it comes from and reaches beyond."""
        chain = self
        while (parent := chain.nodes[0].parent) is not None and (above := parent.chain) is not None and above.end < self.end:
            at = bisect_left(above.starts, parent.start) + 1
            if at < len(above.nodes):
                rest = Chain(above.nodes[at:], above.tokens[parent.end - above.starts[0] :])
                for rank in parent.ranks:
                    rank.stale.add(rest.nodes[0])  # until now nobody noted it (ranking.py)
                del above.nodes[at:], above.starts[at:]
            above._carry_on(chain)
            chain = above

    def _carry_on(self, other: "Chain") -> None:
        self.tokens = self.tokens[: self.end - self.starts[0]] + other.tokens
        self.nodes += other.nodes
        self.starts += other.starts
        for node in other.nodes:
            node.chain = self

    def split(self, upper: "PromptNode", lower: "PromptNode") -> None:
        """`upper` is new, and begins where `lower` began."""
        at = bisect_left(self.starts, upper.start)
        self.nodes.insert(at, upper)
        self.starts.insert(at + 1, lower.start)
        upper.chain = self

    def remove_last(self) -> None:
        self.nodes.pop()
        self.starts.pop()

    def join(self, upper: "PromptNode", lower: "PromptNode") -> None:
        """`upper` is gone, and `lower` begins where it began."""
        other = lower.chain
        assert other is not None
        if other is self:
            at = bisect_left(self.starts, upper.start)
            del self.nodes[at], self.starts[at + 1]
            return
        self.remove_last()
        other.tokens, other.starts[0] = upper.tokens + other.tokens, upper.start
        if self.nodes:
            self._carry_on(other)
