"""LeadRunner: rank 0's runner, which has the other ranks compute each step beside it."""

from array import array

from radixserve.core import IntArray, ScheduledBatch, StepOutput
from radixserve.engine.tp.workers import Workers
from radixserve.models.rank_group import RankLostError
from radixserve.runner.model_runner import ModelRunner


class LeadRunner:
    def __init__(self, runner: ModelRunner, workers: Workers, num_slots: int) -> None:
        self._runner = runner
        self._workers = workers
        self._last_token_ids: IntArray = array("i", bytes(4 * num_slots))

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """As ModelRunner.execute. EngineDeadError when a rank has ended; after any error there are no ranks, and every call raises."""
        self._workers.check()
        decode_ids = array("i", (self._last_token_ids[row.slot] for row in batch.rows if row.is_decode))
        self._workers.send_step(batch, decode_ids)
        try:
            output = self._runner.execute(batch)
        except RankLostError as error:
            raise self._workers.failure() from error
        except BaseException:
            self._workers.end()  # they wait for what will not come
            raise
        self._workers.check()  # NCCL is aborted when a rank ends: the step goes on to its end then, and what came out is no sum
        for row, token_id in zip(batch.rows, output.token_ids, strict=True):
            if row.is_sampled:
                self._last_token_ids[row.slot] = token_id
        return output
