"""ChunkSize: how many prompt tokens a step takes, so that it lasts about as long as it should (--target-step-ms)."""

MIN_PROMPT_TOKENS = 16  # prompts go on, however slow a step is
MEMORY = 0.8  # weight of all earlier steps beside the last one


class ChunkSize:
    """Fits seconds = base + per_token * prompt tokens to the latest steps.

    base: steps of decode rows alone. per_token: decaying sums over steps with prompt chunks, so that small chunks, which say little,
    weigh little.
    """

    def __init__(self, target_s: float, max_tokens: int) -> None:
        self._target_s = target_s
        self._max_tokens = max_tokens
        self._base_s = 0.0
        self._num_tokens = 0.0
        self._seconds = 0.0
        self.num_tokens = max(min(MIN_PROMPT_TOKENS, max_tokens), max_tokens // 8)  # of the next step; the first one is a guess

    def after_step(self, num_prompt_tokens: int, seconds: float) -> None:
        """Learn from a step that took `seconds` (0 or more) and held so many prompt tokens."""
        if num_prompt_tokens == 0:
            self._base_s = MEMORY * self._base_s + (1 - MEMORY) * seconds if self._base_s else seconds
        else:
            self._num_tokens = MEMORY * self._num_tokens + num_prompt_tokens
            self._seconds = MEMORY * self._seconds + max(0.0, seconds - self._base_s)
        if not self._num_tokens:
            return
        left = self._target_s - self._base_s
        affordable = left * self._num_tokens / self._seconds if self._seconds > 0 else self._max_tokens
        # a wrong fit is not worth more than a doubling
        self.num_tokens = int(max(min(affordable, 2 * self.num_tokens, self._max_tokens), min(MIN_PROMPT_TOKENS, self._max_tokens)))
