"""The process of a rank other than 0: loads its part of the model, then follows rank 0 step by step until its pipe closes.

It ignores SIGINT, SIGTERM and SIGHUP as the engine does, and ends with rank 0's process.
"""

import logging
import os
import signal
import sys
from pathlib import Path
from typing import BinaryIO

import torch

from radixserve.attention.registry import make_attention_backend
from radixserve.engine.build import load_rank, rank_device
from radixserve.engine.garbage import spare_pauses
from radixserve.engine.graphs import GraphPlan, attention_options
from radixserve.engine.pool import affordable_pages, allocate
from radixserve.engine.process import FAILED, die_with_parent, end_without_parent
from radixserve.engine.tp import messages
from radixserve.errors import RadixServeError
from radixserve.models.config import load_model_config
from radixserve.models.rank_group import RankGroup, RankLostError
from radixserve.runner.shard_runner import ShardRunner

logger = logging.getLogger("radixserve.engine")

NO_GRAPHS = GraphPlan([], 0)  # a graph's padding rows would meet other ranks' collectives


def main() -> int:
    """Returns the exit status. The file descriptor for answers is the last argument."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(int(sys.argv[-1]), "wb", buffering=0)
    setup = messages.read_to_rank(sys.stdin.buffer)
    if not isinstance(setup, messages.Setup):
        return 1
    logging.basicConfig(level=setup.log_level, format=f"%(asctime)s rank {setup.rank}: %(message)s", datefmt="[%Y-%m-%d %H:%M:%S]")
    # the kernel's way reaches one that is stopped too; but it counts the thread that spawned this process as its parent
    (die_with_parent if setup.is_of_main_thread else end_without_parent)(setup.parent_pid)
    try:
        _follow(setup, sys.stdin.buffer, answers)
        return 0
    except RankLostError as error:
        logger.info("another rank is gone: %s", error)
        return messages.LOST_STATUS
    except RadixServeError as error:
        answers.write(messages.encode(messages.Failed(error.message, is_users=True)))
        return 1
    except Exception:
        logger.exception("rank %d failed", setup.rank)
        answers.write(messages.encode(messages.Failed(FAILED, is_users=False)))
        return 1


def _follow(setup: messages.Setup, orders: BinaryIO, answers: BinaryIO) -> None:
    config, path = setup.config, Path(setup.model_path)
    model = load_model_config(path)
    device = rank_device(config, setup.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = RankGroup(setup.rank, config.tp_size, device)
    decoder = load_rank(config, model, path, device, group)
    answers.write(messages.encode(messages.Loaded(affordable_pages(config, model, decoder, NO_GRAPHS))))
    order = messages.read_to_rank(orders)
    if not isinstance(order, messages.Allocate):
        return
    pool, page_table = allocate(config, decoder.config, order.num_pages, decoder.dtype, device)
    options = attention_options(config, decoder.config, NO_GRAPHS)
    attention = make_attention_backend(order.attention_backend, pool, decoder.config.num_heads, options)
    answers.write(messages.encode(messages.Allocated()))
    group.connect(Path(setup.directory))
    runner = ShardRunner(decoder, pool, page_table, attention)
    spare_pauses()  # one rank's pause is every rank's
    while isinstance(order := messages.read_to_rank(orders), messages.Step):
        runner.execute(order.batch, order.decode_ids)


if __name__ == "__main__":
    # as engine/process.py: straight out, whatever threads and process groups there are
    status = main()
    sys.stderr.flush()
    os._exit(status)
