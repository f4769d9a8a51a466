"""Branch: where a depth-first order stands. It stays with what begins like the last one admitted, as long as any of that may go."""

from radixserve.core import BASE_NAMESPACE
from radixserve.scheduler.order.prompt_tree import PromptNode, PromptTree
from radixserve.scheduler.order.ranking import Ranking
from radixserve.scheduler.state import RequestState


class Branch:
    """Told of each admission, and of each node that another one takes the place of."""

    def __init__(self, prompts: PromptTree, ranking: Ranking) -> None:
        self._prompts = prompts
        self._ranking = ranking
        self._node = prompts.root  # its edge begins like the last one admitted
        self._namespace = BASE_NAMESPACE
        self._tokens = b""

    def admitted(self, state: RequestState, node: PromptNode) -> None:
        """It hangs at `node` still."""
        self._node, self._namespace = node, state.request.namespace
        self._tokens = state.cacheable_tokens()

    def replaced(self, node: PromptNode, by: PromptNode) -> None:
        if self._node is node:
            self._node = by

    def find(self) -> PromptNode:
        """The deepest cached node that begins like the last one admitted and has somebody of the first class of all who may go."""
        node = self._node
        top = self._ranking.value(self._prompts.root)
        if top is None:
            return self._prompts.root
        while node.parent is not None and not self._may_stay(node, top[0]):
            node = node.parent
        while (child := self._next(node)) is not None and self._may_stay(child, top[0]):
            node = child
        self._node = node
        return node

    def _may_stay(self, node: PromptNode, priority: float) -> bool:
        value = self._ranking.value(node) if node.covered else None
        return value is not None and value[0] == priority

    def _next(self, node: PromptNode) -> PromptNode | None:
        if not node.is_covered or not self._tokens.startswith(node.tokens, node.start):
            return None
        return node.children.get((self._namespace, self._tokens[node.end : node.end + self._prompts.page_bytes]))
