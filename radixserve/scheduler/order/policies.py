"""The policies, as rules for order/ranking.py: arrival (fcfs), lpm, dfs-weight, cost.

Time is counted in passes: a pass is a step that admits something. A request of priority p stands as if it had arrived p x
--priority-aging-passes passes earlier, in fcfs, lpm, cost and in the bound: a class goes before lower ones for so long, not for ever. In
dfs-weight a class goes before all lower ones however long they wait, and the bound alone ends that.

    arrived(r) = pass in which it arrived - priority x aging

    fcfs        arrived, then arrival
    lpm         credit x arrived - matched tokens: relative order never changes by waiting alone, so nothing is sorted again for age
    dfs-weight  of the highest class, in the branch of the last admission until it is empty; else into the heaviest branch of the waiting
                prompts that is cached at least in part, and so on down; then by arrival
    cost        seconds of prefill that are left + of decode + of what eviction destroys + credit x arrived
"""

from collections.abc import Callable

from radixserve.config import SchedulerConfig
from radixserve.scheduler.order.cost import CostModel
from radixserve.scheduler.order.ranking import Rules
from radixserve.scheduler.order.tour import Key
from radixserve.scheduler.state import RequestState


def make_rules(config: SchedulerConfig, num_short_tokens: Callable[[RequestState], float]) -> Rules:
    """num_short_tokens: of what a request takes, the tokens that would have to be evicted and are expected to be wanted again."""
    if config.schedule_policy == "lpm":
        return lpm(config)
    if config.schedule_policy == "dfs-weight":
        return dfs_weight(config)
    if config.schedule_policy == "cost":
        return cost(config, CostModel(), num_short_tokens)
    assert config.schedule_policy == "fcfs"
    return arrival(config)


def arrived(state: RequestState, config: SchedulerConfig) -> int:
    """In passes; may be negative."""
    return state.arrival_pass - config.priority_aging_passes * state.request.priority


def arrival(config: SchedulerConfig) -> Rules:
    def rank(state: RequestState) -> Key:
        return arrived(state, config), state.arrival

    return Rules(rank, lambda key, depth: key)


def lpm(config: SchedulerConfig) -> Rules:
    def rank(state: RequestState) -> Key:
        return config.lpm_age_credit * arrived(state, config), state.arrival

    def at_depth(key: Key, depth: int) -> Key:
        return key[0] - depth, key[1]

    return Rules(rank, at_depth)


def dfs_weight(config: SchedulerConfig) -> Rules:
    """Keys: (class, arrived, arrival); the rest is order/branch.py."""

    def rank(state: RequestState) -> Key:
        return -state.request.priority, arrived(state, config), state.arrival

    return Rules(rank, lambda key, depth: key, is_depth_first=True)


def cost(config: SchedulerConfig, model: CostModel, num_short_tokens: Callable[[RequestState], float]) -> Rules:
    """Fewest estimated seconds first. What was expected when it came to wait stays, and so does what it would displace then, less what it
    matched then; what its match saves of prefill is always the present one."""
    credit_s = model.prefill_s(config.lpm_age_credit)

    def rank(state: RequestState) -> Key:
        work = model.prefill_s(len(state.token_ids)) + model.decode_s(state) + model.pressure_s(num_short_tokens(state))
        return work + credit_s * arrived(state, config), state.arrival

    def at_depth(key: Key, depth: int) -> Key:
        return key[0] - model.prefill_s(depth), key[1]

    return Rules(rank, at_depth)
