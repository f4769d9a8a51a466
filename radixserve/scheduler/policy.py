"""WaitingQueue: who waits, and who is admitted next.

The wait is bounded, in two ways, whatever else comes (order/policies.py says what `arrived` means for classes of priority):

- by score (lpm): only requests that arrived at most ceil(max_match / credit) passes later can go before a waiting one, as nobody's match
  is longer than max_match and each pass is worth `credit` tokens; a class of priority adds its own passes. Likewise for cost, with the
  largest cost for max_match; dfs-weight has no such bound
- hard, in every policy: each admission of a later arrival counts, from when a request begins to wait, and who was overtaken
  --lpm-max-overtaken times is not overtaken again: only those go first that arrived before it, a more urgent class as far as its aging
  puts it there, and if they or it do not fit, nobody is admitted until they do. A burst of any size in one pass counts like any other

Who waits for a leader (sharing.py) neither goes first nor blocks others meanwhile: the bound holds from when its leader is done with it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from radixserve.config import SchedulerConfig
from radixserve.scheduler.order.bound import Overtakings
from radixserve.scheduler.order.branch import Branch
from radixserve.scheduler.order.coverage import Coverage
from radixserve.scheduler.order.policies import arrival, make_rules
from radixserve.scheduler.order.prompt_tree import PromptNode, PromptTree
from radixserve.scheduler.order.ranking import Ranking, Rules
from radixserve.scheduler.sharing import InFlight
from radixserve.scheduler.state import RequestState
from radixserve.tree.key import TOKEN_BYTES
from radixserve.tree.prefix_cache import PageCache


class WaitingQueue:
    """The waiting requests by id. start_pass(), then head() and admitted() in turn, with no add() between."""

    def __init__(self, config: SchedulerConfig, cache: PageCache, rules: Rules | None = None) -> None:
        """rules: for tests, another policy than the config's."""
        self._cache = cache
        self._states: dict[str, RequestState] = {}
        self._priorities: Counter[int] = Counter()  # how many wait with each
        self._pass = 0
        self._has_admitted = False  # in this pass
        self._prompt_tokens, self._cached_tokens = 1, 0  # of admitted requests
        self._overtakings = Overtakings(config.lpm_max_overtaken)
        page_bytes = cache.page_size * TOKEN_BYTES
        if rules is None and config.schedule_policy != "fcfs":
            rules = make_rules(config, self._num_short_tokens)
        all_rules = [arrival(config)] if rules is None else [arrival(config), rules]
        is_depth_first = rules is not None and rules.is_depth_first
        self._prompts = PromptTree(page_bytes, len(all_rules), self, has_branches=is_depth_first)
        self._rankings = [Ranking(one, index, TOKEN_BYTES, self._prompts.tour) for index, one in enumerate(all_rules)]
        self._arrival = self._rankings[0]
        self._kept: list[Ranking | Branch] = [*self._rankings]
        self._branch: Branch | None = None
        if is_depth_first:
            self._branch = Branch(self._prompts, self._rankings[-1], len(all_rules))
            self._kept.append(self._branch)
        self._changed: dict[int, PromptNode] = {}  # by id: nodes whose coverage or mark changed since the last look
        self._in_flight = InFlight(self._prompts, self._note_change, self._overdue_in)
        self._coverage = Coverage(self._prompts.root, page_bytes, self._note_change)
        cache_root = cache.watch(self._coverage)
        if cache_root is not None:
            self._coverage.cleared(cache_root)

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def get(self, request_id: str) -> RequestState | None:
        return self._states.get(request_id)

    def add(self, state: RequestState) -> None:
        """Take in a request. One that was retracted stands where its arrival belongs."""
        comes_back = state.arrival_pass >= 0
        if not comes_back:
            state.arrival_pass = self._pass + self._has_admitted
        self._states[state.request.request_id] = state
        self._priorities[state.request.priority] += 1
        node = self._prompts.add(state, state.cacheable_tokens())
        for ranking in self._rankings:
            ranking.add(state, node)
        self._refresh(node)
        self._overtakings.add(state, self._arrival.key(state.request.request_id), comes_back)

    def remove(self, request_id: str) -> RequestState | None:
        state = self._states.pop(request_id, None)
        if state is not None:
            state.leader = None
            self._overtakings.remove(state)
            self._priorities[state.request.priority] -= 1
            if not self._priorities[state.request.priority]:
                del self._priorities[state.request.priority]
            for ranking in self._rankings:
                ranking.drop(state, self._prompts.place(request_id))
            self._refresh(self._prompts.remove(request_id))
        return state

    @property
    def highest_priority(self) -> int:
        """Of all that wait; there must be one."""
        return max(self._priorities)

    # ---- a pass of admissions

    def start_pass(self, running: Iterable[RequestState]) -> None:
        """Look who runs. Several in a row are one pass."""
        self._pass += self._has_admitted
        self._has_admitted = False
        if self._cache.is_shared:
            self._in_flight.look(running)

    def head(self) -> RequestState | None:
        """Who is admitted next, or else nobody; None if all wait for a leader."""
        self._settle()
        oldest = self._arrival.first()
        if oldest is None:
            return None
        best = self._kept[-1].first()
        bar = self._overtakings.bar(oldest, self._arrival.key(oldest.request.request_id))
        assert best is not None
        return oldest if bar is not None and self._arrival.key(best.request.request_id) > bar else best

    def admitted(self, state: RequestState) -> None:
        """The head runs now: it is no longer here, and others may follow it."""
        self._has_admitted = True
        self._prompt_tokens += len(state.token_ids)
        self._cached_tokens += state.num_computed
        self._overtakings.admitted(self._arrival.key(state.request.request_id))
        if self._branch is not None:
            self._branch.admitted(state, self._prompts.place(state.request.request_id))
        self.remove(state.request.request_id)
        if self._cache.is_shared:
            self._in_flight.follow(state)

    def stands_before(self, waiting: RequestState, running: RequestState) -> bool:
        """Whether a waiting request would go first if the other were retracted now, and came to wait with all that it computed cached."""
        return all(ranking.key_at(waiting, 0) < ranking.key_at(running, running.num_computed) for ranking in self._rankings)

    def _overdue_in(self, node: PromptNode) -> RequestState | None:
        """The first that is overdue, of all at and below the node. That need not be the oldest: who came back begins to wait anew."""
        oldest = self._arrival.first_below(node)
        if self._is_overdue(oldest):
            return oldest
        if not self._overtakings.is_any_overdue:
            return None
        overdue = [state for state in node.all_requests() if self._is_overdue(state)]
        return min(overdue, key=lambda state: self._arrival.key(state.request.request_id), default=None)

    def _is_overdue(self, state: RequestState) -> bool:
        return self._overtakings.is_overdue(state, self._arrival.key(state.request.request_id))

    def _num_short_tokens(self, state: RequestState) -> float:
        """Tokens of the cache that it displaces, times the share of prompts that was found again so far. What it matches now it keeps."""
        num_missing = state.total_pages - self._cache.num_free_pages
        if num_missing > 0:  # else there is nothing to look up
            match = self._cache.match(state.request.namespace, state.token_ids, state.max_cached)
            num_missing -= match.num_tokens // self._cache.page_size
        return max(0, num_missing) * self._cache.page_size * self._cached_tokens / self._prompt_tokens

    # ---- the prompts' tree changes its shape (prompt_tree.Follower)

    def _refresh(self, node: PromptNode) -> None:
        for one in self._kept:
            one.refresh(node)

    def _note_change(self, node: PromptNode) -> None:
        """Coverage or mark of a node changed. Many do so together, one below the other: they are put right when it matters."""
        self._changed[id(node)] = node

    def _settle(self) -> None:
        if self._changed:
            self._in_flight.rise()
        for one in self._kept:
            one.settle(self._changed.values())
        self._changed.clear()

    def node_added(self, node: PromptNode) -> None:
        self._coverage.node_added(node)

    def node_split(self, upper: PromptNode, lower: PromptNode) -> None:
        self._coverage.node_split(upper, lower)
        assert upper.parent is not None
        if self._branch is not None:
            self._branch.replaced(lower, upper)
        for one in self._kept:
            one.take_out(lower, upper.parent)
        self._refresh(lower)

    def node_removed(self, node: PromptNode) -> None:
        self._coverage.node_removed(node)
        self._changed.pop(id(node), None)
        self._in_flight.removed(node)
        assert node.parent is not None
        if self._branch is not None:
            self._branch.replaced(node, node.parent)
        for one in self._kept:
            one.take_out(node, node.parent)

    def node_joined(self, upper: PromptNode, lower: PromptNode) -> None:
        self._coverage.node_joined(upper, lower)
        self._changed.pop(id(upper), None)
        self._in_flight.removed(upper)
        assert lower.parent is not None
        if self._branch is not None:
            self._branch.replaced(upper, lower)
        for one in self._kept:
            one.take_out(upper, lower.parent)
        self._refresh(lower)
