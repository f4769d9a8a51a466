"""Memory pressure: how many pages running requests will need, and who gives way when there are too few.

    held pages | promised: what its known tokens lack | expected: a share of the output that it may still ask for |  ...  total_pages
               '---- needed to go on at all ----------'---- an estimate, which the next admissions respect -------'

A request is admitted with its output expected in full (CLIP_MAX_NEW_TOKENS at most); from the next step on the share is the new-token
ratio, which falls while all goes well and rises when somebody had to give way. Names and figures are SGLang's.
"""

from collections.abc import Collection, Iterable
from math import ceil

from radixserve.scheduler.state import RequestState

INIT_NEW_TOKEN_RATIO = 0.7
MIN_NEW_TOKEN_RATIO_FACTOR = 0.14
NEW_TOKEN_RATIO_DECAY_STEPS = 600
RETRACT_DECODE_STEPS = 20  # so many steps without another retraction are hoped for after one
CLIP_MAX_NEW_TOKENS = 4096


class NewTokenRatio:
    """The share of max_tokens that a running request is expected to use: high at first, less with each decode step."""

    def __init__(self, conservativeness: float = 1.0) -> None:
        self._init = min(INIT_NEW_TOKEN_RATIO * conservativeness, 1.0)
        self._min = self._init * MIN_NEW_TOKEN_RATIO_FACTOR
        self.value = self._init

    def reset(self) -> None:
        """Nothing runs."""
        self.value = self._init

    def after_decode_steps(self, num_steps: int = 1) -> None:
        """One by one, so that the sum is the same to the last bit."""
        step = (self._init - self._min) / NEW_TOKEN_RATIO_DECAY_STEPS
        while num_steps > 0 and self.value > self._min:
            self.value = max(self._min, self.value - step)
            num_steps -= 1

    def after_retraction(self, survivors: Collection[RequestState]) -> None:
        """What the survivors have used of their max_tokens, and some steps more; it was too little, so it never falls here."""
        used = sum(state.num_output for state in survivors) + RETRACT_DECODE_STEPS * len(survivors)
        asked = sum(state.request.sampling.max_tokens for state in survivors) + 1
        self.value = max(self.value, min(1.0, used / asked))


def expected_output(state: RequestState, ratio: float) -> int:
    """Tokens that it is expected to generate from now on, at least 1."""
    sampling = state.request.sampling
    remaining = sampling.max_tokens - state.num_output
    if not state.is_guaranteed:
        # one that ends at nothing but max_tokens will use all of it
        share = 1.0 if sampling.ignore_eos and not sampling.stop and not sampling.stop_token_ids else ratio
        estimate = ceil(min(remaining, CLIP_MAX_NEW_TOKENS) * share)
        remaining = max(estimate, sampling.min_tokens - state.num_output)
    return max(remaining, 1)


def expected_pages(state: RequestState, ratio: float, page_size: int) -> int:
    """Pages that it is expected to take from now on, the promised ones included; the last token is not fed back."""
    if state.is_ending:
        return 0
    return max(0, -(-(len(state.token_ids) + expected_output(state, ratio) - 1) // page_size) - state.num_pages)


def promised_pages(state: RequestState, page_size: int) -> int:
    """Pages without which it cannot go on: of its known tokens, or of all that it may ask for once it may not be retracted any more."""
    if state.is_ending:
        return 0
    num_pages = state.total_pages if state.is_guaranteed else -(-len(state.token_ids) // page_size)
    return max(0, num_pages - state.num_pages)


def loses_least(states: Iterable[RequestState]) -> RequestState:
    """Lowest priority first; then fewest output tokens; then the longest prompt; then the latest arrival."""
    return min(states, key=lambda state: (state.request.priority, state.num_output, -state.num_prompt, -state.arrival))


def forced_victim(states: Collection[RequestState], turn: int) -> RequestState | None:
    """For RADIXSERVE_TEST_RETRACT: somebody who is not alone and has new output since its last retraction, if it had one; in turn."""
    if len(states) < 2:
        return None
    eligible = [state for state in states if state.num_output > state.num_output_at_retraction]
    return eligible[turn % len(eligible)] if eligible else None
