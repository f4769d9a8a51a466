"""The tree by exact page ids: split, insert over an existing path, page tails, locks, trimming, eviction order, ghosts."""

import hashlib
import random
import time

import pytest

from radixserve.core import Namespace
from radixserve.tree.account import check_tree
from radixserve.tree.events import TreeEvent, path_hash
from radixserve.tree.explain import explain
from radixserve.tree.ghosts import GhostList
from radixserve.tree.node import TreeNode
from radixserve.tree.radix_tree import RadixTree
from tests.pure.helpers import ints, key, layered_key

A, B = Namespace(cache_salt="a"), Namespace(cache_salt="b")


def make(page_size: int = 1, max_ghost_tokens: int = 1000) -> RadixTree:
    return RadixTree(page_size, max_ghost_tokens=max_ghost_tokens)


def test_match_stops_inside_an_edge_and_changes_nothing() -> None:
    tree = make()
    tree.insert(key(1, 2, 3, 4), ints(11, 12, 13, 14), now=1)
    version = tree.version
    match = tree.match(key(1, 2, 9))
    assert (match.length, list(match.pages)) == (2, [11, 12])
    assert tree.version == version
    assert len(tree.nodes()) == 1


def test_max_len_caps_a_match() -> None:
    tree = make(page_size=2)
    tree.insert(key(range(8)), ints(1, 2, 3, 4), now=1)
    assert [tree.match(key(range(8)), max_len=n).length for n in (0, 1, 2, 3, 7, 8, 99)] == [0, 0, 2, 2, 6, 8, 8]


def test_insert_splits_where_paths_part() -> None:
    tree = make()
    tree.insert(key(1, 2, 3, 4), ints(11, 12, 13, 14), now=1)
    result = tree.insert(key(1, 2, 7, 8), ints(21, 22, 23, 24), now=2)
    assert list(result.existing_pages) == [11, 12]
    assert sorted(list(node.pages) for node in tree.nodes()) == [[11, 12], [13, 14], [23, 24]]
    assert list(tree.match(key(1, 2, 3, 4)).pages) == [11, 12, 13, 14]
    assert list(tree.match(key(1, 2, 7, 8)).pages) == [11, 12, 23, 24]
    check_tree(tree)


def test_inserting_an_existing_path_gives_the_callers_pages_back() -> None:
    tree = make()
    tree.insert(key(1, 2, 3), ints(11, 12, 13), now=1)
    assert list(tree.insert(key(1, 2, 3), ints(21, 22, 23), now=2).existing_pages) == [11, 12, 13]
    assert list(tree.insert(key(1, 2), ints(31, 32), now=3).existing_pages) == [11, 12]
    assert tree.num_evictable_pages == 3
    check_tree(tree)


def test_only_whole_pages_enter() -> None:
    tree = make(page_size=4)
    tree.insert(key(range(10)), ints(5, 6), now=1)
    assert tree.num_evictable_pages == 2
    assert tree.match(key(range(10))).length == 8


@pytest.mark.parametrize("num_tokens", range(5))
def test_a_key_below_a_page_is_nothing(num_tokens: int) -> None:
    """TREE-11, TREE-12: no node with an empty key ever exists."""
    tree = make(page_size=16)
    assert tree.match(key(range(num_tokens))).length == 0
    assert tree.insert(key(range(num_tokens)), ints(), now=1).node is tree.root
    assert tree.nodes() == []
    assert tree.num_evictable_pages == 0


def test_one_token_short_of_a_page() -> None:
    """TREE-11."""
    tree = make(page_size=64)
    tree.insert(key(range(64)), ints(1), now=1)
    assert tree.match(key(range(63))).length == 0
    tree.insert(key(range(63)), ints(), now=2)
    assert list(tree.evict(9, now=3)) == [1]
    check_tree(tree)


@pytest.mark.parametrize("extra", range(1, 64))
def test_tails_shorter_than_a_page(extra: int) -> None:
    """TREE-15."""
    tree = make(page_size=64)
    tree.insert(key(range(64)), ints(1), now=1)
    assert tree.match(key(range(64 + extra))).length == 64


def test_no_split_inside_a_page() -> None:
    """TREE-10."""
    tree = make(page_size=3)
    tree.insert(key(1, 2, 3), ints(1), now=1)
    assert tree.match(key(1, 2, 9)).length == 0
    tree.insert(key(1, 2, 9), ints(2), now=2)
    assert sorted(list(node.pages) for node in tree.nodes()) == [[1], [2]]


def test_lock_pins_exactly_the_match() -> None:
    """TREE-06, TREE-07: the matched node itself is protected, and nothing below it."""
    tree = make()
    tree.insert(key(range(1, 11)), ints(range(101, 111)), now=1)
    node = tree.lock(tree.match(key(1, 2, 3, 4, 5, 99)), now=2)
    assert (tree.num_locked_pages, tree.num_evictable_pages) == (5, 5)
    assert sorted(tree.evict(99, now=3)) == list(range(106, 111))
    check_tree(tree)
    tree.insert(key(1, 2, 3, 4, 5, 99), ints(range(201, 207)), now=4)
    tree.unlock(node, now=50)
    assert sorted(tree.evict(99, now=5)) == [101, 102, 103, 104, 105, 206]
    check_tree(tree)
    assert (tree.num_locked_pages, tree.num_evictable_pages, tree.root.lock_ref) == (0, 0, 0)


@pytest.mark.parametrize("first", [0, 1])
def test_a_split_copies_the_locks(first: int) -> None:
    """TREE-09: two locks on one node, a third request splits it, unlock in both orders."""
    tree = make()
    tree.insert(key(range(10)), ints(range(1, 11)), now=1)
    nodes = [tree.lock(tree.match(key(range(10))), now=2) for _ in range(2)]
    tree.insert(key(0, 1, 2, 77), ints(21, 22, 23, 24), now=3)
    check_tree(tree)
    assert sorted(node.lock_ref for node in tree.nodes()) == [0, 2, 2]
    tree.unlock(nodes[first], now=4)
    check_tree(tree)
    tree.unlock(nodes[1 - first], now=5)
    assert all(node.lock_ref == 0 for node in tree.nodes())
    with pytest.raises(AssertionError, match="expected a locked node"):
        tree.unlock(nodes[0], now=6)


def test_a_match_does_not_outlive_a_change() -> None:
    tree = make()
    tree.insert(key(1, 2, 3), ints(1, 2, 3), now=1)
    match = tree.match(key(1, 2))
    tree.evict(2, now=2)
    with pytest.raises(AssertionError, match="kept over a change"):
        tree.lock(match, now=3)


def test_a_leaf_is_trimmed_from_its_end() -> None:
    tree = make()
    tree.insert(key(range(6)), ints(range(1, 7)), now=1)
    assert list(tree.evict(2, now=2)) == [5, 6]
    assert tree.match(key(range(6))).length == 4
    assert list(tree.evict(1, now=3)) == [4]
    assert sum(node.pages is None for node in tree.nodes()) == 1, "however often it is trimmed, there is one ghost below it"
    check_tree(tree)


def test_a_chain_is_evicted_up_to_the_root() -> None:
    tree = make()
    tree.insert(key(1, 2), ints(1, 2), now=1)
    tree.insert(key(1, 2, 3, 4), ints(1, 2, 3, 4), now=2)
    tree.insert(key(1, 2, 3, 4, 5, 6), ints(1, 2, 3, 4, 5, 6), now=3)
    assert [list(tree.evict(2, now=4)) for _ in range(4)] == [[5, 6], [3, 4], [1, 2], []]
    check_tree(tree)


def test_least_recently_used_goes_first_and_a_hit_counts_as_use() -> None:
    """MEM-06, MEM-07: S is hit between one-off inserts and survives; a new entry does not count as never used."""
    tree = make()
    tree.insert(key(1000), ints(1), now=0)
    for i in range(1, 21):
        tree.unlock(tree.lock(tree.match(key(1000)), now=2 * i), now=2 * i)
        tree.insert(key(i), ints(i + 1), now=2 * i + 1)
    assert list(tree.evict(19, now=99)) == list(range(2, 21))
    assert tree.match(key(1000)).length == 1


def test_matching_alone_does_not_change_the_order() -> None:
    tree = make()
    tree.insert(key(1), ints(1), now=1)
    tree.insert(key(2), ints(2), now=2)
    for _ in range(5):
        tree.match(key(1))
    assert list(tree.evict(1, now=9)) == [1]


def test_namespaces_never_share() -> None:
    """REUSE-03, REUSE-04 and the rule of section 4."""
    tree = make()
    tree.insert(key(1, 2, 3, namespace=A), ints(1, 2, 3), now=1)
    assert tree.match(key(1, 2, 3, namespace=B)).length == 0
    assert tree.match(key(1, 2, 3)).length == 0
    tree.insert(key(1, 2, 3, namespace=B), ints(4, 5, 6), now=2)
    assert list(tree.match(key(1, 2, 3, namespace=A)).pages) == [1, 2, 3]
    assert list(tree.match(key(1, 2, 3, namespace=B)).pages) == [4, 5, 6]


def test_two_thousand_extra_keys_over_the_same_tokens() -> None:
    """REUSE-06."""
    tree = make()
    for i in range(2000):
        tree.insert(key(7, 8, namespace=Namespace(extra_key=f"picture {i}")), ints(2 * i + 1, 2 * i + 2), now=i)
    for i in range(2000):
        match = tree.match(key(7, 8, namespace=Namespace(extra_key=f"picture {i}")))
        assert list(match.pages) == [2 * i + 1, 2 * i + 2]


def test_a_private_suffix_hangs_under_a_public_prefix() -> None:
    tree = make(page_size=2)
    public = Namespace()
    tree.insert(layered_key((public, [1, 2, 3, 4]), (A, [5, 6])), ints(1, 2, 3), now=1)
    assert list(tree.match(layered_key((public, [1, 2, 3, 4]), (A, [5, 6]))).pages) == [1, 2, 3]
    assert list(tree.match(layered_key((public, [1, 2, 3, 4]), (B, [5, 6]))).pages) == [1, 2]
    assert list(tree.match(key(1, 2, 3, 4, 5, 6)).pages) == [1, 2], "the private part is not public"
    # a segment that ends inside a page ends the key: no page crosses a namespace
    assert tree.insert(layered_key((public, [9, 9, 9]), (A, [5, 6])), ints(7), now=2).node.num_pages == 1
    check_tree(tree)


def test_where_runs_of_one_namespace_meet_does_not_matter() -> None:
    tree = make()
    tree.insert(key(1, 2, 3, 4), ints(1, 2, 3, 4), now=1)
    assert list(tree.match(layered_key((Namespace(), [1, 2]), (Namespace(), [3, 4]))).pages) == [1, 2, 3, 4]


def test_ghosts_explain_an_eviction() -> None:
    tree = make(page_size=2)
    tree.insert(key(range(8)), ints(1, 2, 3, 4), now=1)
    tree.insert(key(0, 1, 50, 51), ints(1, 9), now=2)
    tree.evict(2, now=7)
    told = explain(tree, Namespace(), ints(0, 1, 2, 3, 4, 5, 60, 61))
    assert (told.num_cached, told.num_remembered, told.num_common) == (4, 6, 6)
    assert (told.evicted_at, told.eviction_cause) == (7, "trim")
    assert (list(told.asked_tokens), list(told.known_tokens)) == ([60, 61], [6, 7])


def test_explain_names_the_first_token_that_differs_inside_a_page() -> None:
    tree = make(page_size=4)
    tree.insert(key(range(8)), ints(1, 2), now=1)
    told = explain(tree, Namespace(), ints(0, 1, 2, 3, 4, 5, 99, 7))
    assert (told.num_cached, told.num_common) == (4, 6)
    assert (list(told.asked_tokens), list(told.known_tokens)) == ([99, 7], [6, 7])


def test_explain_names_other_namespaces() -> None:
    tree = make()
    tree.insert(key(1, 2, namespace=A), ints(1, 2), now=1)
    assert explain(tree, B, ints(1, 2)).other_namespaces == (A,)
    assert explain(tree, A, ints(1, 2)).other_namespaces == ()


def test_a_ghost_comes_back_to_life() -> None:
    tree = make()
    tree.insert(key(range(6)), ints(range(1, 7)), now=1)
    tree.evict(6, now=2)
    assert tree.match(key(range(6))).length == 0
    result = tree.insert(key(range(4)), ints(11, 12, 13, 14), now=3)
    assert list(result.existing_pages) == []
    assert list(tree.match(key(range(6))).pages) == [11, 12, 13, 14]
    assert tree.ghosts.num_tokens == 2
    check_tree(tree)


@pytest.mark.parametrize("bound", [0, 3, 10])
def test_ghosts_are_bounded(bound: int) -> None:
    tree = make(max_ghost_tokens=bound)
    for i in range(50):
        tree.insert(key(i, i, i), ints(1, 2, 3), now=i)
        tree.evict(3, now=i)
        check_tree(tree)
        assert tree.ghosts.num_tokens <= bound


def test_flush_returns_every_page_and_refuses_while_locked() -> None:
    tree = make()
    tree.insert(key(1, 2, 3), ints(1, 2, 3), now=1)
    tree.insert(key(1, 5), ints(1, 5), now=2)
    node = tree.lock(tree.match(key(1)), now=3)
    with pytest.raises(AssertionError, match="unlocked"):
        tree.clear(now=4)
    tree.unlock(node, now=50)
    assert sorted(tree.clear(now=5)) == [1, 2, 3, 5]
    check_tree(tree)
    assert tree.nodes() == []


def test_events_rebuild_the_set_of_cached_paths() -> None:
    """Wish 7: whoever replays the events knows exactly which paths are cached."""
    events: list[TreeEvent] = []
    tree = RadixTree(2, max_ghost_tokens=100, on_event=events.append)
    rng = random.Random(3)
    for now in range(400):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(13))]
        if rng.random() < 0.6:
            tree.insert(key(tokens), ints(range(1, 8)), now=now)
        elif rng.random() < 0.3:
            node = tree.lock(tree.match(key(tokens)), now=now)
            result = tree.insert(key(rng.randrange(2) for _ in range(6)), ints(1, 2, 3), now=now, at=node)
            tree.move_lock(node, result.node)
            tree.unlock(result.node, now=now)
        else:
            tree.evict(rng.randrange(4), now=now)
    known: dict[bytes, bytes] = {}  # tokens of each cached path, page by page, under its hash
    paths = {b"": b""}  # tokens of every path that was ever named
    for event in events:
        path = paths[event.parent_hash]
        for end in range(8, len(event.tokens) + 8, 8):
            whole = path + event.tokens[:end]
            digest = hashlib.sha256(b"\0" * 24 + whole).digest()  # three empty names in front: the base namespace
            paths[digest] = whole
            if event.cause == "insert":
                assert digest not in known
                known[digest] = whole
            else:
                del known[digest]
    assert set(known.values()) == {path for node in tree.nodes() if node.pages for path in _page_paths(node)}
    assert {event.cause for event in events} == {"insert", "evict", "trim"}


def _page_paths(node: TreeNode) -> list[bytes]:
    above = b""
    parent = node.parent
    while parent is not None:
        above = parent.tokens + above
        parent = parent.parent
    return [above + node.tokens[:end] for end in range(8, len(node.tokens) + 8, 8)]


def test_chunks_of_one_prompt_become_one_node() -> None:
    tree = make()
    node = tree.lock(tree.match(key()), now=0)
    for chunk in range(6):
        result = tree.insert(key(range(10 * chunk, 10 * chunk + 10)), ints(range(10 * chunk + 1, 10 * chunk + 11)), now=chunk, at=node)
        tree.move_lock(node, result.node)
        node = result.node
        check_tree(tree)
    assert len(tree.nodes()) == 1
    assert list(tree.match(key(range(60))).pages) == list(range(1, 61))
    other = tree.lock(tree.match(key(range(60))), now=7)  # from now on two hold it: it may not grow under the other's feet
    result = tree.insert(key(99), ints(99), now=8, at=node)
    tree.move_lock(node, result.node)
    assert len(tree.nodes()) == 2
    check_tree(tree)
    tree.unlock(result.node, now=9)
    tree.unlock(other, now=10)
    check_tree(tree)


def test_what_was_in_use_until_now_is_not_the_oldest() -> None:
    """MEM-06's kind: a prefix that a long request held until a moment ago outlives a one-off that ended before."""
    tree = make()
    tree.insert(key(1, 2), ints(1, 2), now=1)
    node = tree.lock(tree.match(key(1, 2)), now=2)
    tree.insert(key(7, 8), ints(7, 8), now=50)
    tree.unlock(node, now=100)
    assert list(tree.evict(2, now=101)) == [7, 8]


def test_a_split_does_not_change_a_path_hash() -> None:
    tree = make()
    leaf = tree.insert(key(1, 2, 3, 4), ints(1, 2, 3, 4), now=1).node
    before = path_hash(leaf)
    tree.insert(key(1, 2, 9), ints(1, 2, 9), now=2)
    assert path_hash(leaf) == before
    assert path_hash(tree.root) == b""


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_ten_thousand_random_steps(page_size: int) -> None:
    """TREE-13: for every node, the parent's entry under the node's own first page is that node."""
    tree, rng = make(page_size, max_ghost_tokens=500 * page_size), random.Random(page_size)
    locks = []
    for now in range(10_000):
        tokens = [rng.randrange(2) for _ in range(page_size * rng.randrange(8) + rng.randrange(page_size))]
        match rng.randrange(5):
            case 0 | 1:
                tree.insert(key(tokens), ints(range(1, 9)), now=now)
            case 2:
                locks.append(tree.lock(tree.match(key(tokens)), now=now))
            case 3 if locks:
                tree.unlock(locks.pop(rng.randrange(len(locks))), now=now)
            case 4:
                tree.evict(rng.randrange(12), now=now)
        if now % 100 == 0:
            check_tree(tree)
    for node in locks:
        tree.unlock(node, now=50)
    check_tree(tree)
    assert tree.num_locked_pages == 0


def seconds_to_forget(num_ghosts: int, num_adds: int) -> float:
    """Processor time of so many ghosts that each put an older one out."""
    ghosts, root = GhostList(num_ghosts, page_bytes=4), TreeNode(A, b"", None, None, 0)
    nodes = []
    for i in range(num_ghosts + num_adds):
        nodes.append(TreeNode(A, ints(i).tobytes(), None, root, 0))
        root.children[A, nodes[-1].tokens] = nodes[-1]
    for node in nodes[:num_ghosts]:
        ghosts.add(node, 0, "evict")
    start = time.process_time()
    for node in nodes[num_ghosts:]:
        ghosts.add(node, 0, "evict")
    seconds = time.process_time() - start
    assert len(ghosts) == num_ghosts
    return seconds


def test_the_oldest_of_many_ghosts_is_found_as_fast_as_of_few() -> None:
    """In a plain dict it is not: its front fills with the holes of those that were forgotten."""
    few, many = (min(seconds_to_forget(num_ghosts, 25_000) for _ in range(2)) for num_ghosts in (500, 16_000))
    assert many < 2.5 * few
