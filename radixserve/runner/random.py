"""Uniform numbers as a pure function of (seed, choice index, output index): Philox4x32-10, vectorised.

Counter-based, so that no batch, slot, retraction or overlap can change a draw. Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3" (SC 2011); the tests hold the published vectors.
"""

import numpy as np
import numpy.typing as npt

UInt64 = npt.NDArray[np.uint64]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW32 = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_NUM_ROUNDS = 10


def philox4x32(counter: tuple[UInt64, UInt64, UInt64, UInt64], key: tuple[UInt64, UInt64]) -> tuple[UInt64, UInt64, UInt64, UInt64]:
    """Ten rounds over arrays of 32-bit words held in uint64 (whose products of two words are exact)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (product1 >> _32) ^ c1 ^ k0, product1 & _LOW32, (product0 >> _32) ^ c3 ^ k1, product0 & _LOW32
        k0, k1 = (k0 + _WEYL[0]) & _LOW32, (k1 + _WEYL[1]) & _LOW32
    return c0, c1, c2, c3


def uniforms(seeds: UInt64, choice_indices: UInt64, output_indices: UInt64) -> npt.NDArray[np.float64]:
    """[n] float64 in [0, 1), multiples of 2**-53. The key is the seed; the counter is (output index low, high, choice index low, high)."""
    counter = (output_indices & _LOW32, output_indices >> _32, choice_indices & _LOW32, choice_indices >> _32)
    word0, word1, _, _ = philox4x32(counter, (seeds & _LOW32, seeds >> _32))
    bits = (word0 << _32) | word1
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
