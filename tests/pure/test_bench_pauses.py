"""What keeps the load generator from its work is measured, and its own collector walks only what a run made."""

import gc
import time

from bench.load import ClosedLoop, Target, run
from bench.pauses import Pauses
from bench.workloads import make_workload
from tests.support.bench_servers import RadixServer, WholeWords, serving


def test_old_objects_are_left_alone_and_given_back() -> None:
    began = time.process_time()
    gc.collect()
    whole_s = time.process_time() - began
    with Pauses() as pauses:
        assert gc.get_freeze_count() > 10_000  # all that this process has imported
        began = time.process_time()
        gc.collect()
        within_s = time.process_time() - began
        num_frozen = gc.get_freeze_count()
        made_in_the_run = [[i] for i in range(20_000)]
        gc.collect()
        assert gc.get_freeze_count() >= num_frozen + len(made_in_the_run)
    assert within_s < 0.3 * whole_s
    assert pauses.gc_max_s > 0
    assert (gc.get_freeze_count(), gc.isenabled()) == (0, True)
    gc.collect()  # not counted any more
    assert pauses.gc_max_s < whole_s


def test_waiting_for_a_core_is_counted_where_the_system_tells() -> None:
    with Pauses() as pauses:
        pass
    assert pauses.core_wait_s is None or 0 <= pauses.core_wait_s < 60


async def test_a_run_records_its_pauses() -> None:
    load = make_workload("random", WholeWords(), 1, num_prompts=5, input_len=3, output_len=1)

    class Collecting(RadixServer):
        async def handle(self, path, body, writer) -> None:  # type: ignore[no-untyped-def]
            if path != "/metrics":
                gc.collect()  # this server is in the generator's process
            await super().handle(path, body, writer)

    async with serving(Collecting().handle) as url:
        done = await run(load, Target(url), ClosedLoop(1))
    assert 0 < done.overhead.gc_max_s < 1
    assert gc.get_freeze_count() == 0
