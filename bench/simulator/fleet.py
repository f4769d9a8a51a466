"""Many replicas behind one router. Replicas know nothing of one another, so they run in several processes; the router runs here.

Time goes in windows. Per window the router deals out what arrives in it, knowing what it sent and who had ended by the window's start (so
its picture of the loads is old by up to a window); then every replica runs to the window's end. The outcome depends on the window, but
not on how many processes there are. Processes exchange int32 arrays and JSON over pipes, never pickles.
"""

import multiprocessing
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from bench.simulator.cost import CostModel
from bench.simulator.load import Load
from bench.simulator.replica import Replica, Settings
from bench.simulator.result import Counts, Result, result_of
from bench.simulator.router import make_router
from radixserve.core import IntArray

FOREVER = float("inf")


@dataclass(frozen=True, slots=True)
class Fleet:
    num_replicas: int = 1
    router: str = "round-robin"
    window_s: float = 0.25
    num_processes: int = 1
    seed: int = 0
    with_bounds: bool = True


class _Group:
    """The replicas of one process."""

    def __init__(self, load: Load, settings: Settings, cost: CostModel, replicas: Sequence[int]) -> None:
        self._load = load
        self._replicas = {one: Replica(load, settings, cost) for one in replicas}
        self._started = time.process_time()

    def run(self, orders: Sequence[int], until_s: float) -> IntArray:
        """orders: replica, number, replica, number, ... Returns how many requests each replica has done, in the order given at first."""
        for replica, number in zip(orders[::2], orders[1::2], strict=True):
            self._replicas[replica].submit(number)
        for one in self._replicas.values():
            one.run_until(until_s)
        return array("i", [one.num_done for one in self._replicas.values()])

    def result(self, with_bounds: bool) -> Result:
        merged = Result.merged([result_of(one, self._load, with_bounds) for one in self._replicas.values()])
        return Result(replace(merged.counts, cpu_s=time.process_time() - self._started), merged.ttft_s)


def _serve(pipe: Connection, group: _Group, with_bounds: bool) -> None:
    """A process's loop: 8 bytes of until_s, then the orders; an end of time is followed by the result."""
    while True:
        message = pipe.recv_bytes()
        until_s, orders = array("d"), array("i")
        until_s.frombytes(message[:8])
        orders.frombytes(message[8:])
        pipe.send_bytes(group.run(orders, until_s[0]).tobytes())
        if until_s[0] == FOREVER:
            pipe.send_bytes(group.result(with_bounds).to_bytes())
            return


def run_fleet(load: Load, settings: Settings, cost: CostModel, fleet: Fleet, on_window: Callable[[int], None] = lambda _: None) -> Result:
    """Run all of the load; on_window is told how many requests are done so far. Raises RuntimeError if a process dies."""
    shares = [list(range(first, fleet.num_replicas, fleet.num_processes)) for first in range(min(fleet.num_processes, fleet.num_replicas))]
    if len(shares) == 1:
        group, done = _Group(load, settings, cost, shares[0]), [0] * fleet.num_replicas
        for until_s, orders in _dealt(load, settings, fleet, done):
            done[:] = group.run(orders[0], until_s)
            on_window(sum(done))
        return group.result(fleet.with_bounds)
    return _run_processes(load, settings, cost, fleet, shares, on_window)


def _run_processes(
    load: Load, settings: Settings, cost: CostModel, fleet: Fleet, shares: list[list[int]], on_window: Callable[[int], None]
) -> Result:
    context = multiprocessing.get_context("fork")  # the load is shared, nothing is pickled
    pipes, processes = [], []
    for share in shares:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve_share, args=(theirs, load, settings, cost, share, fleet.with_bounds), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    started = time.process_time()
    done = [0] * fleet.num_replicas
    try:
        for until_s, orders in _dealt(load, settings, fleet, done):
            for pipe, order in zip(pipes, orders, strict=True):
                pipe.send_bytes(array("d", [until_s]).tobytes() + order.tobytes())
            for pipe, share in zip(pipes, shares, strict=True):
                counts = array("i")
                counts.frombytes(pipe.recv_bytes())
                for replica, count in zip(share, counts, strict=True):
                    done[replica] = count
            on_window(sum(done))
        results = [Result.from_bytes(pipe.recv_bytes()) for pipe in pipes]
    except (EOFError, ConnectionError) as error:
        raise RuntimeError("a process of the simulator died; its error stands above") from error
    for process in processes:
        process.join()
    merged = Result.merged(results)
    return Result(merged.counts + Counts(cpu_s=time.process_time() - started), merged.ttft_s)


def _serve_share(pipe: Connection, load: Load, settings: Settings, cost: CostModel, share: list[int], with_bounds: bool) -> None:
    _serve(pipe, _Group(load, settings, cost, share), with_bounds)


def _dealt(load: Load, settings: Settings, fleet: Fleet, done: list[int]) -> Iterator[tuple[float, list[IntArray]]]:
    """Window by window: its end, and per process the orders. `done` is filled in by the caller before it asks for the next window."""
    num_groups = min(fleet.num_processes, fleet.num_replicas)
    router = make_router(fleet.router, fleet.num_replicas, settings.pool_tokens // load.trace.page_size, fleet.seed)
    num_sent = [0] * fleet.num_replicas
    number = 0
    # a single replica needs no router's picture: one window will do
    window_s = FOREVER if fleet.num_replicas == 1 else fleet.window_s
    until_s = window_s
    while number < load.num_requests:
        orders = [array("i") for _ in range(num_groups)]
        loads = [sent - ended for sent, ended in zip(num_sent, done, strict=True)]
        while number < load.num_requests and load.arrival_s(number) < until_s:
            replica = router.choose(load.prompt_blocks(number), loads)
            num_sent[replica] += 1
            loads[replica] += 1
            orders[replica % num_groups].extend((replica, number))
            number += 1
        if number == load.num_requests:
            until_s = FOREVER
        yield until_s, orders
        until_s += window_s
