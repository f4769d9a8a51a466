"""What the waiting order is found by: smallest keys of subtrees, and long paths stepped over as one. Against walks node by node."""

import random

import pytest

from radixserve.config import SchedulerConfig
from radixserve.core import BASE_NAMESPACE
from radixserve.scheduler.order import tour as tour_module
from radixserve.scheduler.order.prompt_tree import PromptNode, PromptTree
from radixserve.scheduler.order.ranking import LazyMin
from radixserve.scheduler.order.tour import NO_KEY, Key, Mark, Tour
from radixserve.scheduler.policy import WaitingQueue
from radixserve.scheduler.state import RequestState
from radixserve.tree.prefix_cache import PrefixCache
from tests.pure.helpers import ints, request
from tests.support.calls import calls_per_admission


@pytest.mark.parametrize("max_marks", [4, 16, 64])
def test_a_tour_against_a_list(max_marks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grown to a thousand marks and emptied again, so that blocks part and join."""
    monkeypatch.setattr(tour_module, "MAX_MARKS", max_marks)
    rng = random.Random(max_marks)
    row = [Mark(), Mark()]
    tour = Tour(2, row[0], row[1])
    keys = {(mark, ranking): NO_KEY for mark in row for ranking in (0, 1)}

    def check() -> None:
        start, stop = sorted(rng.sample(range(len(row)), 2))
        for ranking in (0, 1):
            assert tour.first(row[start], row[stop], ranking) == min(keys[mark, ranking] for mark in row[start:stop])
        assert [mark for block in tour._blocks for mark in block.marks] == row

    for step in range(3000):
        is_growing = rng.random() < (0.8 if step < 1500 else 0.2)
        at = rng.randrange(len(row))
        if is_growing:
            mark, is_after = Mark(), rng.random() < 0.5
            tour.insert(mark, row[at], is_after)
            row.insert(at + is_after, mark)
            keys.update({(mark, ranking): NO_KEY for ranking in (0, 1)})
        elif len(row) > 2:
            tour.remove(row.pop(at))
        mark, ranking = rng.choice(row), rng.randrange(2)
        key: Key = NO_KEY if rng.random() < 0.2 else (rng.randrange(50), step)
        tour.put(mark, ranking, key)
        keys[mark, ranking] = key
        check()


class Nobody:
    """A follower that does nothing."""

    def node_added(self, node: PromptNode) -> None: ...
    def node_removed(self, node: PromptNode) -> None: ...
    def node_split(self, upper: PromptNode, lower: PromptNode) -> None: ...
    def node_joined(self, upper: PromptNode, lower: PromptNode) -> None: ...


def check_tree(tree: PromptTree) -> None:
    """Each node is in one chain; a chain's nodes are each the child of the one before; its tokens are theirs; the tour encloses them."""
    seen: set[int] = set()
    for node in tree.nodes():
        chain = node.chain
        assert chain is not None and node in chain.nodes and chain.starts == [one.start for one in chain.nodes]
        assert chain.tokens.startswith(b"".join(one.tokens for one in chain.nodes))
        assert all(lower.parent is upper for upper, lower in zip(chain.nodes, chain.nodes[1:], strict=False))
        seen.add(id(chain))
    marks = [mark for block in tree.tour._blocks for mark in block.marks]
    expected: list[Mark] = []
    unwalked: list[PromptNode | Mark] = [tree.root]
    places = {mark: place for place, mark in enumerate(marks)}
    while unwalked:
        step = unwalked.pop()
        if isinstance(step, Mark):
            expected.append(step)
            continue
        expected.append(step.opens)
        unwalked.append(step.closes)
        unwalked.extend(sorted(step.children.values(), key=lambda child: -places[child.opens]))
    assert marks == expected


@pytest.mark.parametrize("page_size", [1, 4])
def test_chains_and_tour_stay_those_of_the_tree(page_size: int) -> None:
    rng = random.Random(page_size)
    tree = PromptTree(4 * page_size, 1, Nobody(), has_branches=False)
    document = [rng.randrange(3) for _ in range(200)]
    waiting: dict[str, bytes] = {}
    for step in range(1200):
        if rng.random() < (0.7 if step < 700 else 0.3) or not waiting:
            tail = [rng.randrange(3) for _ in range(rng.randrange(30))]
            tokens = ints([*document[: rng.randrange(200)], *tail]).tobytes()
            state = RequestState(request(str(step), [1]), 0.0, 1, step)
            node = tree.add(state, tokens)
            waiting[str(step)] = tokens
            path = b""
            while node.parent is not None:
                path, node = node.tokens + path, node.parent
            assert path == tokens[: len(tokens) - len(tokens) % (4 * page_size)]
        else:
            name = rng.choice(sorted(waiting))
            del waiting[name]
            tree.remove(name)
        if step % 20 == 0:
            check_tree(tree)


@pytest.mark.parametrize("order", ["random", "rising", "falling"])
def test_a_path_of_a_thousand_nodes_is_a_few_chains(order: str) -> None:
    rng = random.Random(0)
    tree = PromptTree(4, 1, Nobody(), has_branches=False)
    document = ints(range(1000, 2000)).tobytes()
    cuts = sorted(range(20, 1000), reverse=order == "falling")
    if order == "random":
        rng.shuffle(cuts)
    for number, cut in enumerate(cuts):
        own = ints([5000 + number, *range(40)]).tobytes()
        tree.add(RequestState(request(str(number), [1]), 0.0, 1, number), document[: 4 * cut] + own)
    for number in range(0, len(cuts), 3):
        tree.remove(str(number))
    node, chains = tree.place(str(next(n for n in range(len(cuts) - 1, 0, -1) if n % 3 and cuts[n] > 900))), set()
    depth = 0
    while node.parent is not None:
        chains.add(id(node.chain))
        node, depth = node.parent, depth + 1
    assert depth > 500 and len(chains) <= 12
    assert tree.frontier(BASE_NAMESPACE, document) is not None


@pytest.mark.parametrize("policy", ["lpm", "fcfs", "cost", "dfs-weight"])
def test_what_a_deep_path_costs(policy: str) -> None:
    """Calls per admission with 2,000 prompts cut anywhere in one document of 1,000 tokens: not as many as the path has nodes."""
    rng = random.Random(0)
    cache = PrefixCache(5000)
    queue = WaitingQueue(SchedulerConfig(schedule_policy=policy), cache)
    document = list(range(1000, 2000))
    path = cache.lock(cache.match(BASE_NAMESPACE, ints(document), 0), 0.0)
    cache.reserve(path, 1000, 0.0)
    cache.release(path, ints(document), 1000, 0.0)

    def add(number: int) -> None:
        prompt = [*document[: rng.randrange(100, 1000)], 3000 + number, *range(20)]
        queue.add(RequestState(request(str(number), prompt), 0.0, 1100, number))

    for number in range(2000):
        add(number)
    assert calls_per_admission(queue, add, range(2000, 2030)) < 1500


@pytest.mark.parametrize("policy", ["lpm", "fcfs", "cost", "dfs-weight"])
def test_each_place_is_right_where_coverage_comes_and_goes(policy: str) -> None:
    """Prompts within prompts of other prompts; changes deep below what is not cached, then cached step by step, and evicted again.

    Each covered node's places, and its place among all, are those that a walk through what waits below it gives.
    """
    rng = random.Random(1)
    cache = PrefixCache(3000)
    queue = WaitingQueue(SchedulerConfig(schedule_policy=policy), cache)
    stems = [[rng.randrange(2) for _ in range(60)] for _ in range(3)]
    waiting: list[str] = []

    def prompt() -> list[int]:
        stem = rng.choice(stems)
        cut, second = rng.randrange(60), rng.choice(stems)
        return [*stem[:cut], *(rng.randrange(5) for _ in range(rng.randrange(2))), *second[: rng.randrange(20)], rng.randrange(5), 7]

    for number in range(3000):
        waiting.append(str(number))
        one = RequestState(request(str(number), prompt()), 0.0, 100, number)
        queue.add(one)
        while len(waiting) > 150:
            queue.remove(waiting.pop(rng.choice([0, 0, rng.randrange(100)])))
        if number % 7 == 0:
            stem = ints(prompt()[: rng.randrange(1, 60)])
            path = cache.lock(cache.match(BASE_NAMESPACE, stem, 0), number)
            cache.reserve(path, len(stem), number)
            cache.release(path, stem, len(stem), number)
        if number % 40 == 0:
            cache.make_room(cache.num_free_pages + cache.num_evictable_pages * rng.randrange(11) // 10, number)
        if number % 5 == 0:
            queue.start_pass(())
            assert queue.head() is not None
            check_places(queue)


def check_places(queue: WaitingQueue) -> None:
    for index, ranking in enumerate(queue._rankings):
        tops = {}
        for node in [queue._prompts.root, *queue._prompts.nodes()]:
            if not node.is_covered:
                continue
            ways = [(node, node.end, list(node.requests.values()))]
            ways += [(child, child.depth, list(child.all_requests())) for child in node.children.values() if not child.is_covered]
            places = {way: min(ranking.key_at(one, depth // 4) for one in states) for way, depth, states in ways if states}
            held = {way: ranking_place[0] for way, ranking_place in place_of(node, index).items()}
            assert held == places
            if places:
                tops[node] = min(places.values())
        assert {node: key for key, node in all_of(ranking._tops)} == tops


def place_of(node: PromptNode, index: int) -> dict[PromptNode, tuple[Key, PromptNode]]:
    return {entry[1]: entry for entry in all_of(node.ranks[index].places)}


def all_of(kept: LazyMin[PromptNode]) -> list[tuple[Key, PromptNode]]:
    if kept._items is not None:
        return list(kept._items.values())
    return [kept._only] if kept._only is not None else []


def test_a_place_that_nobody_noted_is_looked_up_when_its_node_leaves_the_chain() -> None:
    cache = PrefixCache(3000)
    queue = WaitingQueue(SchedulerConfig(), cache)
    prompts = [[1, 2, 3, 4, 5, 6, own, 0] for own in (10, 11, 12)]
    prompts += [[1, 2, 3, 4, 13, 0], [1, 2, 9, 0]]
    for number, tokens in enumerate(prompts):
        queue.add(RequestState(request(str(number), tokens), 0.0, 100, number))
    queue.remove("0")  # below 1 2 3 4 5 6, where the way up is one chain
    queue.add(RequestState(request("long", [1, 2, 8, *[0] * 20]), 0.0, 100, 9))  # it carries the chain on from 1 2
    path = cache.lock(cache.match(BASE_NAMESPACE, ints([1, 2]), 0), 0.0)
    cache.reserve(path, 2, 0.0)
    cache.release(path, ints([1, 2]), 2, 0.0)
    head = queue.head()
    assert head is not None and head.request.request_id == "1"
    check_places(queue)
