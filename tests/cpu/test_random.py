"""Philox4x32-10 against the vectors published with it (Random123 kat_vectors), and the uniforms made of it."""

import numpy as np
import pytest

from radixserve.runner.random import philox4x32, uniforms

VECTORS = [
    ("00000000 00000000 00000000 00000000 00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def test_published_vectors() -> None:
    columns = [np.array(column, dtype=np.uint64) for column in zip(*(words(vector) for vector, _ in VECTORS))]
    result = philox4x32(tuple(columns[:4]), tuple(columns[4:]))
    assert [[int(word[i]) for word in result] for i in range(3)] == [words(expected) for _, expected in VECTORS]


def u(seeds: object, choices: object, outputs: object) -> np.ndarray:
    return uniforms(*(np.asarray(values, dtype=np.uint64) for values in np.broadcast_arrays(seeds, choices, outputs)))


def test_pinned_values() -> None:
    """A change here changes every seeded answer: it is a break of the product, not of the test."""
    assert u([0], [0], [0])[0] == ((0x6627E8D5 << 32 | 0xE169C58D) >> 11) / 2**53
    seed, choice, output = 0x299F31D0A4093822, 0x0370734413198A2E, 0x85A308D3243F6A88  # the third vector, low words first
    assert u([seed], [choice], [output])[0] == ((0xD16CFE09 << 32 | 0x94FDCCEB) >> 11) / 2**53


def test_each_argument_matters_and_company_does_not() -> None:
    together = u([1, 2, 1, 1, 1 + 2**32], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0])
    assert len(set(together.tolist())) == 5
    assert u([1], [1], [0])[0] == together[2]


@pytest.mark.parametrize("varied", [0, 1, 2])
def test_uniform_over_the_unit_interval(varied: int) -> None:
    n, bins = 20000, 50
    arguments: list[object] = [12345, 0, 0]
    arguments[varied] = np.arange(n, dtype=np.uint64)
    values = u(*arguments)
    assert values.min() >= 0
    assert values.max() < 1
    counts = np.bincount((values * bins).astype(int), minlength=bins)
    assert ((counts - n / bins) ** 2 / (n / bins)).sum() < 85.4  # chi-square, 49 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03
