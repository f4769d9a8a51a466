"""In-flight sharing: a request whose prefix is being computed right now by another one waits for it instead of computing it again.

leader     [ computed |    being computed, chunk by chunk    | its own end ]
follower   [ ........... begins the same ............ | its own end ]
                                                      ^ leader_end, whole pages
"""

from collections.abc import Iterable

from radixserve.core import IntArray
from radixserve.scheduler.state import RequestState
from radixserve.tree.key import TOKEN_BYTES, common_length
from radixserve.tree.prefix_cache import PageCache


def is_worth_waiting(state: RequestState, running: Iterable[RequestState], cache: PageCache) -> bool:
    """Whether a running request is about to compute at least a page of this one's prefix that the tree does not have yet.

    Nobody waits for ever: a leader computes in every step that computes prompts at all, and one that ends, or gets to where the two
    part, is no leader any more.
    """
    if not cache.is_shared:
        return False
    if state.is_following:
        return True
    state.leader, matched = None, None
    tokens = state.token_ids.tobytes()
    for leader in running:
        if not leader.is_prefilling or leader.request.namespace != state.request.namespace:
            continue
        shared = min(common_tokens(leader.request.prompt_ids, tokens), state.max_cached)
        end = shared - shared % cache.page_size
        if end < leader.num_computed + cache.page_size:
            continue
        if matched is None:
            matched = cache.match(state.request.namespace, state.token_ids, state.max_cached).num_tokens
        if end >= matched + cache.page_size:
            state.leader, state.leader_end = leader, end
            return True
    return False


def common_tokens(token_ids: IntArray, tokens: bytes) -> int:
    """How many leading tokens are equal; `tokens` are int32 each."""
    return common_length(token_ids.tobytes(), tokens, 0, len(tokens), TOKEN_BYTES) // TOKEN_BYTES
