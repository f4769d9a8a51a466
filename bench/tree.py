"""Times the tree: match, insert, evict in µs per call, by size of the tree and by length of the prompt; and beside SGLang's Python tree.

usage: python -m bench.tree [--nodes 1000,10000,100000,1000000] [--peer-script FILE --peer-wheel DIR]

Building the key from a request's token array is inside the timed part.
Wall time, as the peer script takes it: the least of several rounds, since what else runs can only add.
The peer script prints one JSON line {"op", "us", "tokens" | "nodes"} per measurement; it is run before each of our rounds.
"""

import argparse
import json
import random
import subprocess
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable, Sequence

from radixserve.core import BASE_NAMESPACE, IntArray
from radixserve.tree.key import TreeKey
from radixserve.tree.radix_tree import RadixTree

VOCABULARY = 50_000
SYSTEM_TOKENS, TAIL_TOKENS = 512, 64
Figures = dict[tuple[str, int], float]  # (operation, tokens or nodes) -> µs


def random_tokens(rng: random.Random, num_tokens: int) -> IntArray:
    return array("i", [rng.randrange(VOCABULARY) for _ in range(num_tokens)])


def micros(operation: Callable[[int], object], num_calls: int) -> float:
    start = time.perf_counter()  # the clock of the peer script, so that both suffer alike from what else runs
    for i in range(num_calls):
        operation(i)
    return (time.perf_counter() - start) / num_calls * 1e6


def key(tokens: IntArray) -> TreeKey:
    return TreeKey.of(BASE_NAMESPACE, tokens)


def by_length(lengths: Sequence[int], rng: random.Random) -> Figures:
    """A tree of one prompt."""
    figures: Figures = {}
    for length in lengths:
        figures |= of_one_prompt(length, rng)
    return figures


def of_one_prompt(length: int, rng: random.Random) -> Figures:
    tree, base = RadixTree(max_ghost_tokens=length), random_tokens(rng, length)
    pages = array("i", range(1, length + TAIL_TOKENS + 1))
    tree.insert(key(base), pages, 0)
    prompts = [base + random_tokens(rng, TAIL_TOKENS) for _ in range(50)]
    return {
        ("match fully cached", length): micros(lambda i: tree.match(key(prompts[0]), len(prompts[0]) - 1), 50),
        ("insert prefix + 64 new", length): micros(lambda i: tree.insert(key(prompts[i]), pages, i + 1), 50),
    }


def by_nodes(num_nodes: int, rng: random.Random) -> Figures:
    """A tree of many prompts: 512 tokens that 50 prompts share, then 64 of their own."""
    tree, systems = grown_tree(num_nodes, rng)
    prompts = [systems[i % len(systems)] + random_tokens(rng, TAIL_TOKENS) for i in range(200)]
    pages = array("i", range(1, SYSTEM_TOKENS + TAIL_TOKENS + 1))
    now = num_nodes
    return {
        ("match 512 of 576", num_nodes): micros(lambda i: tree.match(key(prompts[i]), len(prompts[i]) - 1), 200),
        ("insert 512 + 64", num_nodes): micros(lambda i: tree.insert(key(prompts[i]), pages, now + i), 200),
        ("evict 64", num_nodes): micros(lambda i: tree.evict(TAIL_TOKENS, now + 200 + i), 200),
        ("lock and unlock", num_nodes): micros(lambda i: tree.unlock(tree.lock(tree.match(key(prompts[i])), now + 400), now + 400), 200),
    }


def grown_tree(num_nodes: int, rng: random.Random) -> tuple[RadixTree, list[IntArray]]:
    systems = [random_tokens(rng, SYSTEM_TOKENS) for _ in range(max(1, num_nodes // 50))]
    tails = random_tokens(rng, 100_000)
    tree = RadixTree(max_ghost_tokens=num_nodes * TAIL_TOKENS)
    pages = array("i", range(1, SYSTEM_TOKENS + TAIL_TOKENS + 1))
    for i in range(num_nodes):
        start = rng.randrange(len(tails) - TAIL_TOKENS)
        tree.insert(key(systems[i % len(systems)] + tails[start : start + TAIL_TOKENS]), pages, i)
    return tree, systems


def bytes_per_node(num_nodes: int) -> tuple[float, float]:
    """Of a tree's nodes: all bytes, and those beyond the bytes of token and page ids."""
    tracemalloc.start()
    tree, _ = grown_tree(num_nodes, random.Random(1))
    total = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    nodes = tree.nodes()
    payload = sum(8 * len(node.tokens) // 4 for node in nodes)
    return total / len(nodes), (total - payload) / len(nodes)


def peer_figures(script: str, wheel: str) -> Figures:
    ran = subprocess.run([sys.executable, script, wheel, "1"], capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    return {(row["op"], row.get("tokens", row.get("nodes"))): row["us"] for row in rows}


def least(runs: Sequence[Figures]) -> Figures:
    return {name: min(run[name] for run in runs) for name in runs[0]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="1000,10000,100000,1000000")
    parser.add_argument("--lengths", default="100,1000,16000,100000")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-script")
    parser.add_argument("--peer-wheel")
    args = parser.parse_args(arguments)
    rng = random.Random(0)
    ours: list[Figures] = []
    theirs: list[Figures] = []
    for _ in range(args.rounds):
        if args.peer_script:
            theirs.append(peer_figures(args.peer_script, args.peer_wheel))
        ours.append(by_length([int(length) for length in args.lengths.split(",")], rng))
        for num_nodes in map(int, args.nodes.split(",")):
            ours[-1] |= by_nodes(num_nodes, rng)
    peer = least(theirs) if theirs else {}
    for (operation, size), value in least(ours).items():
        beside = f"   peer {peer[operation, size]:7.1f}   {peer[operation, size] / value:5.1f} x" if (operation, size) in peer else ""
        print(f"{operation:24} {size:9} {value:8.1f} us{beside}")
    shared = [name for name in least(ours) if name in peer]
    if shared:
        theirs_us, ours_us = (sum(figures[name] for name in shared) for figures in (peer, least(ours)))
        print(f"all of these together: {ours_us:.1f} us, peer {theirs_us:.1f} us, {theirs_us / ours_us:.1f} x")
    total, overhead = bytes_per_node(100_000)
    print(f"bytes per node at 100,000 nodes: {total:.0f}, of which {overhead:.0f} beyond its token and page ids")


if __name__ == "__main__":
    main()
