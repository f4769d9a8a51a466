"""The queue of leaves against a plain list, whatever its priorities do; its memory stays that of the leaves that are in it."""

import random

import pytest

from radixserve.core import BASE_NAMESPACE
from radixserve.tree.eviction import LeafQueue
from radixserve.tree.node import TreeNode

NUM_NODES = 60


@pytest.mark.parametrize("kind", ["rising", "falling", "constant", "random", "mostly rising"])
def test_two_queues_against_lists(kind: str) -> None:
    """Nodes move from one queue to the other and back, as pins and the adaptive policy move them."""
    rng = random.Random(kind)
    nodes = [TreeNode(BASE_NAMESPACE, b"", None, None, 0.0) for _ in range(NUM_NODES)]
    queues = [LeafQueue(), LeafQueue()]
    lists: list[dict[TreeNode, tuple[float, int]]] = [{}, {}]

    def take_out(node: TreeNode) -> None:
        for queue, plain in zip(queues, lists, strict=True):
            if plain.pop(node, None) is not None:
                queue.remove(node)

    for step in range(1, 1500):
        node, at, choice = rng.choice(nodes), rng.randrange(2), rng.random()
        take_out(node)
        if choice < 0.7:
            late = step - rng.randrange(30) * (rng.random() < 0.1)
            priority = {"rising": step, "falling": -step, "constant": 0, "random": rng.randrange(20), "mostly rising": late}[kind]
            queues[at].put(node, priority, step)
            lists[at][node] = (priority, step)
        elif choice < 0.701:
            queues[at].clear()
            lists[at].clear()
        for queue, plain in zip(queues, lists, strict=True):
            head = queue.head()
            assert (head[:2] if head is not None else None) == min(plain.values(), default=None)
            assert len(queue) == len(plain) and sorted(map(id, queue)) == sorted(map(id, plain))
            assert len(queue._run) + len(queue._heap) <= 2 * NUM_NODES + 64
