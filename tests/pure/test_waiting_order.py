"""The waiting queue against its plain twin, which matches every prompt anew and sorts: same matches, same followers, same head, always."""

import copy
import dataclasses

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixserve.config import SchedulerConfig
from radixserve.core import Namespace
from radixserve.scheduler.order.cost import CostModel
from radixserve.scheduler.order.prompt_tree import PromptNode
from radixserve.scheduler.policy import WaitingQueue
from radixserve.scheduler.state import RequestState
from radixserve.tree.key import TOKEN_BYTES
from radixserve.tree.prefix_cache import PrefixCache
from tests.pure.helpers import request
from tests.support.examples import examples

NUM_PAGES = 400
BASES = ([2, 3, 2, 2, 3, 3] * 8, [2] * 48, [2, 3, 2, 2, 3, 3, 2, 3, 3] * 5)
# most begin with a long part of one of a few bases, so that they meet one another and the cache in the middle of edges
prompts = st.builds(
    lambda base, cut, tail: [*base[:cut], *tail],
    st.sampled_from(BASES),
    st.integers(0, 44),
    st.lists(st.integers(2, 3), min_size=1, max_size=4),
)


class PlainTwin:
    """What policy.py, sharing.py and order/ promise, from their docstrings, without any structure that is kept."""

    def __init__(self, config: SchedulerConfig, cache: PrefixCache) -> None:
        self.config, self.cache = config, cache
        self.admissions: list[tuple[int, int]] = []  # arrived, arrival
        self.short: dict[int, float] = {}
        self.begun: dict[int, int] = {}  # by arrival: admissions before it began to wait
        self.came_back: set[int] = set()
        self.last: RequestState | None = None  # admitted
        self.page = cache.page_size

    def matched(self, state: RequestState) -> int:
        return self.cache.match(state.request.namespace, state.token_ids, state.max_cached).num_tokens

    def arrived(self, state: RequestState) -> tuple[int, int]:
        return state.arrival_pass - self.config.priority_aging_passes * state.request.priority, state.arrival

    def is_overdue(self, state: RequestState) -> bool:
        since = self.admissions[self.begun[state.arrival] :]
        return sum(key > self.arrived(state) for key in since) >= self.config.lpm_max_overtaken

    def lane(self, state: RequestState) -> tuple[int, int]:
        return (1, state.arrival) if state.arrival in self.came_back else (0, state.request.priority)

    def bar(self, oldest: RequestState, waiting: list[RequestState]) -> tuple[int, int] | None:
        """Who is overdue, of this one and the first of each other lane; who is later than the bar must not go first."""
        if self.is_overdue(oldest):
            return self.arrived(oldest)
        lanes = {self.lane(one) for one in waiting} - {self.lane(oldest)}
        firsts = [min((one for one in waiting if self.lane(one) == lane), key=self.arrived) for lane in lanes]
        return min((max(self.arrived(one), self.arrived(oldest)) for one in firsts if self.is_overdue(one)), default=None)

    def shares_next(self, state: RequestState, leader: RequestState) -> bool:
        """The leader computes at least a page that this one needs next and the tree does not have."""
        if leader.is_decoding or leader.request.namespace != state.request.namespace:
            return False
        page, end = self.cache.page_size, self.matched(state) + self.cache.page_size
        usable = max(0, state.max_cached) // page * page
        return end <= usable and end <= len(leader.token_ids) and state.token_ids[:end] == leader.token_ids[:end]

    def key(self, state: RequestState) -> tuple[float, ...]:
        arrived, arrival = self.arrived(state)
        matched, credit, model = self.matched(state), self.config.lpm_age_credit, CostModel()
        if self.config.schedule_policy == "fcfs":
            return arrived, arrival
        if self.config.schedule_policy == "lpm":
            return credit * arrived - matched, arrival
        work = model.prefill_s(len(state.token_ids)) - model.prefill_s(matched)
        extra = model.decode_s(state) + model.pressure_s(self.short[state.arrival])
        return round(work + extra + model.prefill_s(credit) * arrived, 9), arrival

    def dfs(self, free: list[RequestState], waiting: list[RequestState]) -> RequestState:
        """Of the first class, those that have the most in common with the last one admitted, of what is cached; then down."""
        top = max(one.request.priority for one in free)
        common = [self.common(one) for one in free if one.request.priority == top]
        depth = max(common)
        if depth == 0:
            return self.down(free, waiting, 0)
        last = self.last
        assert last is not None

        def is_here(one: RequestState) -> bool:
            alike = one.request.namespace == last.request.namespace
            return alike and usable(one, self.page)[:depth] == usable(last, self.page)[:depth]

        return self.down([one for one in free if is_here(one)], [one for one in waiting if is_here(one)], depth)

    def common(self, state: RequestState) -> int:
        if self.last is None or self.last.request.namespace != state.request.namespace:
            return 0
        mine, theirs = usable(state, self.page), usable(self.last, self.page)
        return common_start([mine, theirs[: self.matched(state)]], self.page)

    def down(self, free: list[RequestState], waiting: list[RequestState], depth: int) -> RequestState:
        """All of `waiting` begin alike for `depth` tokens, in whole pages: one edge further, then into a branch or to who ends there."""
        if depth:
            depth = common_start([usable(one, self.page) for one in waiting], self.page)
        if self.matched(free[0]) < depth:
            return min(free, key=self.plain)
        choices: list[tuple[tuple[int, ...], RequestState]] = []
        branches: dict[object, list[RequestState]] = {}
        for one in waiting:
            rest = tuple(usable(one, self.page)[depth : depth + self.page])
            if rest:
                branches.setdefault((one.request.namespace, rest), []).append(one)
            elif one in free:
                choices.append((self.plain(one), one))
        for branch in branches.values():
            inside = [one for one in branch if one in free]
            if inside:
                first = self.down(inside, branch, depth + self.page)
                is_cached = self.matched(first) > depth
                place = (-first.request.priority, 0, -len(branch), *self.arrived(first)) if is_cached else self.plain(first)
                choices.append((place, first))
        return min(choices, key=lambda choice: choice[0])[1]

    def plain(self, state: RequestState) -> tuple[int, ...]:
        return -state.request.priority, 1, 0, *self.arrived(state)

    def head(self, free: list[RequestState], waiting: list[RequestState]) -> RequestState | None:
        oldest = min(free, key=self.arrived, default=None)
        if oldest is None:
            return None
        best = self.dfs(free, waiting) if self.config.schedule_policy == "dfs-weight" else min(free, key=self.key)
        bar = self.bar(oldest, waiting)
        return oldest if bar is not None and self.arrived(best) > bar else best


def usable(state: RequestState, page_size: int) -> list[int]:
    return list(state.token_ids[: max(0, state.max_cached) // page_size * page_size])


def common_start(all_tokens: list[list[int]], page_size: int) -> int:
    length = next((i for i, column in enumerate(zip(*all_tokens, strict=False)) if len(set(column)) > 1), min(map(len, all_tokens)))
    return length // page_size * page_size


class QueueAgainstTwin(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.num_added = 0
        self.now = 0.0
        self.running: list[RequestState] = []

    @initialize(
        policy=st.sampled_from(["lpm", "fcfs", "cost", "dfs-weight"]),
        page_size=st.sampled_from([1, 2, 4]),
        limit=st.sampled_from([1, 3, 50]),
    )
    def start(self, policy: str, page_size: int, limit: int) -> None:
        config = SchedulerConfig(schedule_policy=policy, lpm_age_credit=3, lpm_max_overtaken=limit, priority_aging_passes=4)
        self.cache = PrefixCache(NUM_PAGES, page_size)
        self.queue = WaitingQueue(config, self.cache)
        self.twin = PlainTwin(config, self.cache)

    @rule(tokens=st.lists(prompts, min_size=1, max_size=5), salt=st.sampled_from(["", "", "x"]), priority=st.sampled_from([0, 0, 0, 1, -2]))
    def add_some(self, tokens: list[list[int]], salt: str, priority: int) -> None:
        for one in tokens:
            self.add(one, salt, priority, -1)

    @rule(tokens=prompts, salt=st.sampled_from(["", "", "x"]), priority=st.sampled_from([0, 0, 0, 1, -2]), scored=st.integers(0, 9))
    def add(self, tokens: list[int], salt: str, priority: int, scored: int) -> None:
        self.num_added += 1
        sampling = {"prompt_logprobs": 0, "prompt_logprobs_start": scored} if scored >= 0 else {}
        one = request(str(self.num_added), tokens, 4, Namespace(cache_salt=salt), **sampling)
        state = RequestState(dataclasses.replace(one, priority=priority), self.now, NUM_PAGES, self.num_added)
        self.wait(state)

    def wait(self, state: RequestState) -> None:
        self.twin.short[state.arrival] = self.queue._num_short_tokens(state)  # as WaitingQueue takes it when the request comes
        self.twin.begun[state.arrival] = len(self.twin.admissions)
        self.queue.add(state)

    @precondition(lambda self: len(self.queue))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        states = list(self.queue)
        self.queue.remove(states[data.draw(st.integers(0, len(states) - 1))].request.request_id)

    @rule(num_admitted=st.integers(0, 3), num_evicted=st.sampled_from([0, 0, 1, 3, 9]))
    def admit(self, num_admitted: int, num_evicted: int) -> None:
        """A pass: look for leaders, then take the head, which leads others at once; room for it is made then."""
        self.queue.start_pass(self.running)
        for number in range(num_admitted):
            head = self.check_head(has_evicted=number > 0 and num_evicted > 0)
            if head is None:
                return
            match = self.cache.match(head.request.namespace, head.token_ids, head.max_cached)
            head.path, head.num_computed = self.cache.lock(match, self.now), match.num_tokens
            self.twin.last = copy.copy(head)
            self.twin.admissions.append(self.twin.arrived(head))
            self.queue.admitted(head)
            self.running.append(head)
            self.evict(num_evicted)
        self.check_head(has_evicted=num_admitted > 0 and num_evicted > 0)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 12))
    def compute(self, data: st.DataObject, count: int) -> None:
        self.now += 1
        state = self.running[data.draw(st.integers(0, len(self.running) - 1))]
        assert state.path is not None
        end = min(state.num_computed + count, len(state.token_ids))
        self.cache.reserve(state.path, end, self.now)
        state.num_computed = end
        self.cache.commit(state.path, state.token_ids, end, self.now)
        if end == len(state.token_ids):
            self.stop(state)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), is_retracted=st.booleans())
    def leave(self, data: st.DataObject, is_retracted: bool) -> None:
        state = self.running[data.draw(st.integers(0, len(self.running) - 1))]
        self.stop(state)
        if is_retracted:
            state.retract()
            self.twin.came_back.add(state.arrival)
            self.wait(state)

    def stop(self, state: RequestState) -> None:
        assert state.path is not None
        self.running.remove(state)
        self.cache.release(state.path, state.token_ids, state.num_computed, self.now)

    @rule(num_pages=st.sampled_from([1, 1, 2, 3, 5, 100]))
    def evict(self, num_pages: int) -> None:
        self.cache.make_room(self.cache.num_free_pages + min(num_pages, self.cache.num_evictable_pages), self.now)

    def check_head(self, has_evicted: bool) -> RequestState | None:
        """has_evicted: in this pass; then those are held who were, and who goes on like them, and the next pass finds the others."""
        states = list(self.queue)
        followers = {one.arrival for one in states if any(self.twin.shares_next(one, leader) for leader in self.running)}
        # an overdue one waits for one leader at most; which, the queue has noted
        free = [one for one in states if one.arrival not in followers or self.is_let_go(one)]
        head = self.queue.head()
        held = {id(state) for node in self.nodes() if node.holder is not None for state in below(node)}
        if has_evicted:
            assert all(one.arrival in followers for one in states if id(one) in held)
            free = [one for one in states if id(one) not in held]
        assert {one.arrival for one in states if id(one) in held} == {one.arrival for one in states} - {one.arrival for one in free}
        assert head is self.twin.head(free, states)
        return head

    def is_let_go(self, state: RequestState) -> bool:
        """Of those who begin alike and go on alike, some are overdue, and the oldest of them had another leader before."""
        page, matched = self.cache.page_size, self.twin.matched(state)
        alike = [
            one
            for one in self.queue
            if one.request.namespace == state.request.namespace
            and self.twin.matched(one) == matched
            and one.max_cached >= matched + page
            and one.token_ids[: matched + page] == state.token_ids[: matched + page]
        ]
        overdue = [one for one in alike if self.twin.is_overdue(one)]
        if not overdue:
            return False
        oldest = min(overdue, key=self.twin.arrived)
        leaders = [leader.arrival for leader in self.running if self.twin.shares_next(state, leader)]
        return oldest.leader is not None and oldest.leader not in leaders

    def nodes(self) -> list[PromptNode]:
        return list(self.queue._prompts.nodes())

    @invariant()
    def covered_is_matched(self) -> None:
        if not hasattr(self, "queue"):
            return
        for state in self.queue:
            node = self.queue._prompts.place(state.request.request_id)
            path = [node]
            while path[-1].parent is not None:
                path.append(path[-1].parent)
            depth = 0
            for step in reversed(path):
                depth = step.depth
                if not step.is_covered:
                    break
            assert depth // TOKEN_BYTES == self.twin.matched(state)
        for node in self.nodes():
            assert len(below(node)) > 0
            assert node.weight == (len(below(node)) if self.twin.config.schedule_policy == "dfs-weight" else 0)
            assert node.requests or len(node.children) > 1, "a chain that is not joined"
        noted = [one for notes in self.queue._coverage._notes.values() for one in notes.by_depth.values()]
        assert len(noted) == len(set(map(id, noted))) == 1 + sum(node.covered > 0 for node in self.nodes()), "a note is lost or left over"


def below(node: PromptNode) -> list[RequestState]:
    return [*node.requests.values(), *(state for child in node.children.values() for state in below(child))]


TestQueueAgainstTwin = QueueAgainstTwin.TestCase
TestQueueAgainstTwin.settings = settings(max_examples=examples(50), stateful_step_count=60, deadline=None)
