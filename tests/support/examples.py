"""How many examples Hypothesis draws: few enough for every commit; RADIXSERVE_TEST_EXAMPLES=20 draws twenty times as many, by hand."""

import os


def examples(count: int) -> int:
    """`count`, times what the environment asks for."""
    return count * int(os.environ.get("RADIXSERVE_TEST_EXAMPLES", "1"))
