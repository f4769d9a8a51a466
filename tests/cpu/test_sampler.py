"""Sampler against a slow reference in float64, against expected frequencies, and at the edges of its settings."""

import logging

import numpy as np
import pytest
import torch

from radixserve.core import SamplingParams
from radixserve.native import KernelBuildError, load_library, loaded_library
from radixserve.runner import sampler
from radixserve.runner.random import uniforms
from radixserve.runner.sampler import SamplingRows, sample

INF = float("inf")


@pytest.fixture(autouse=True, params=["native", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to draw: the native call, and torch's operations."""
    if request.param == "torch":
        monkeypatch.setattr(sampler, "loaded_library", lambda: None)
        return
    try:
        load_library()
    except KernelBuildError as error:
        pytest.skip(str(error))
    assert loaded_library() is not None


def make_rows(settings: list[SamplingParams], uniform: np.ndarray | list[float]) -> SamplingRows:
    return SamplingRows(
        greedy=np.array([s.is_greedy for s in settings]),
        temperature=np.array([s.temperature for s in settings], dtype=np.float64),
        top_k=np.array([s.top_k for s in settings], dtype=np.int64),
        top_p=np.array([s.top_p for s in settings], dtype=np.float64),
        min_p=np.array([s.min_p for s in settings], dtype=np.float64),
        uniform=np.asarray(uniform, dtype=np.float64),
    )


def kept_probabilities(logits: list[float], s: SamplingParams) -> np.ndarray:
    """The filtered distribution, renormalised, one token at a time."""
    x = np.array(logits, dtype=np.float64) / s.temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    kept = order[: s.top_k] if s.top_k >= 1 else order
    mass_of_kept = sum(p[i] for i in kept)
    nucleus: list[int] = []
    mass = 0.0
    for i in kept:
        if not nucleus or mass < s.top_p * mass_of_kept:
            nucleus.append(i)
            mass += p[i]
    nucleus = [i for i in nucleus if p[i] >= s.min_p * p[order[0]]]
    result = np.zeros(len(p))
    result[nucleus] = p[nucleus]
    return result / result.sum()


def reference(logits: list[float], s: SamplingParams, uniform: float) -> int:
    if s.is_greedy:
        return max(range(len(logits)), key=lambda i: (logits[i], -i))
    p = kept_probabilities(logits, s)
    running = 0.0
    for i, share in enumerate(p):
        running += share
        if running > uniform and share > 0:
            return i
    return int(np.flatnonzero(p)[-1])


def random_settings(rng: np.random.Generator) -> SamplingParams:
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.3, 0.8, 1.0, 2.5])),
        top_k=int(rng.choice([0, -1, 1, 2, 7, 40, 600, 5000])),
        top_p=float(rng.choice([1.0, 0.999, 0.9, 0.5, 0.01])),
        min_p=float(rng.choice([0.0, 0.0, 0.05, 0.5, 1.0])),
    )


@pytest.mark.parametrize("vocab_size", [3, 50, 700, 3000])
@pytest.mark.parametrize("spread", [0.05, 3.0])
def test_equals_the_reference(vocab_size: int, spread: float) -> None:
    """Beyond 512 ids, flat rows need the full sort and peaked ones do not."""
    rng = np.random.default_rng(vocab_size)
    settings = [random_settings(rng) for _ in range(60)]
    logits = torch.from_numpy((rng.standard_normal((60, vocab_size)) * spread).astype(np.float32))
    uniform = rng.random(60)
    got = sample(logits, make_rows(settings, uniform)).tolist()
    assert got == [reference(row, s, u) for row, s, u in zip(logits.tolist(), settings, uniform)]


def test_both_ways_draw_the_same_from_a_large_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(11)
    settings = [random_settings(rng) for _ in range(40)]
    logits = torch.from_numpy((rng.standard_normal((40, 49152)) * rng.choice([0.5, 2.0, 5.0], size=(40, 1))).astype(np.float32))
    rows = make_rows(settings, rng.random(40))
    padded = torch.nn.functional.pad(logits, (0, 64), value=99.0)[:, :49152]  # as the runner cuts off a head's padding
    got = sample(padded, rows)
    monkeypatch.setattr(sampler, "loaded_library", lambda: None)
    assert got.tolist() == sample(logits, rows).tolist()


@pytest.mark.parametrize("vocab_size", [20, 2000])
def test_ties_are_cut_by_the_lowest_id(vocab_size: int) -> None:
    logits = torch.zeros(4, vocab_size)
    logits[:, 5] = 1.0
    settings = [
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_p=1e-9),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, top_k=1),
    ]
    drawn = [set() for _ in settings]
    for uniform in np.linspace(0, 1, 40, endpoint=False):
        for tokens, token in zip(drawn, sample(logits, make_rows(settings, [uniform] * 4)).tolist()):
            tokens.add(token)
    assert drawn == [{0, 1, 5}, {5}, {5}, {5}]
    assert sample(torch.zeros(1, vocab_size), make_rows([settings[2]], [0.5])).tolist() == [0]


def test_greedy_is_the_first_argmax_whatever_the_company() -> None:
    logits = torch.randn(8, 1000, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    expected = [row.index(max(row)) for row in logits.tolist()]
    greedy = SamplingParams(temperature=0.0)
    assert sample(logits, make_rows([greedy] * 8, [0.9] * 8)).tolist() == expected
    mixed = [greedy if i % 2 else SamplingParams(temperature=1.0, top_p=0.9) for i in range(8)]
    assert sample(logits, make_rows(mixed, [0.9] * 8)).tolist()[1::2] == expected[1::2]


def test_a_row_does_not_depend_on_its_company() -> None:
    rng = np.random.default_rng(5)
    n = 24
    logits = torch.from_numpy((rng.standard_normal((n, 2500)) * rng.choice([0.1, 1.0, 4.0], size=(n, 1))).astype(np.float32))
    settings = [random_settings(rng) for _ in range(n)]
    uniform = rng.random(n)
    together = sample(logits, make_rows(settings, uniform)).tolist()
    alone = [sample(logits[i : i + 1], make_rows(settings[i : i + 1], uniform[i : i + 1])).item() for i in range(n)]
    order = rng.permutation(n)[: n // 2]
    some = sample(logits[torch.from_numpy(order)], make_rows([settings[i] for i in order], uniform[order])).tolist()
    assert together == alone
    assert some == [alone[i] for i in order]


@pytest.mark.parametrize(
    "setting",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.2),
        SamplingParams(temperature=1.3, top_k=6, top_p=0.9, min_p=0.1),
    ],
)
@pytest.mark.parametrize("varied", ["output_index", "seed"])
def test_frequencies(setting: SamplingParams, varied: str) -> None:
    n = 20000
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1, -0.2, 1.9, 0.7])
    running, fixed = np.arange(n, dtype=np.uint64), np.full(n, 11, dtype=np.uint64)
    seeds, outputs = (running, fixed) if varied == "seed" else (fixed, running)
    drawn = sample(logits.expand(n, -1), make_rows([setting] * n, uniforms(seeds, np.zeros(n, np.uint64), outputs)))
    counts = np.bincount(drawn.numpy(), minlength=8)
    expected = kept_probabilities(logits.tolist(), setting) * n
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    assert chi_square < 26.1  # p < 0.0005 at 7 degrees of freedom, rarer still at fewer; seeds are fixed


def test_extreme_settings() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.999, -50.0]]).repeat(6, 1)
    settings = [
        SamplingParams(temperature=1e-6),
        SamplingParams(temperature=1e-300),
        SamplingParams(temperature=1.0, top_p=1e-12),
        SamplingParams(temperature=1.0, min_p=1.0),
        SamplingParams(temperature=1.0, top_k=2**31 - 1, top_p=1e-12),
        SamplingParams(temperature=100.0),
    ]
    almost_one = 1 - 2.0**-53
    assert sample(logits, make_rows(settings, [almost_one] * 6)).tolist() == [1, 1, 1, 1, 1, 3]
    assert sample(logits, make_rows(settings, [0.0] * 6)).tolist() == [1, 1, 1, 1, 1, 0]
    assert sample(logits * 1e37, make_rows(settings, [almost_one] * 6)).tolist() == [1] * 6


SAMPLED, NUCLEUS, GREEDY = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_p=0.9, top_k=3),
    SamplingParams(temperature=0.0),
)


@pytest.mark.parametrize("setting", [SAMPLED, NUCLEUS, GREEDY])
@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-53])
def test_masked_and_broken_logits(setting: SamplingParams, uniform: float) -> None:
    nan = float("nan")
    logits = torch.tensor([[-INF, -INF, 4.0, -INF], [nan, 1.0, nan, -INF], [0.0, INF, 5.0, nan], [-5.0, -INF, nan, -INF]])
    assert sample(logits, make_rows([setting] * 4, [uniform] * 4)).tolist() == [2, 1, 1, 0]


@pytest.mark.parametrize("setting", [SAMPLED, NUCLEUS, GREEDY])
def test_a_row_without_finite_logits_gives_token_0_and_a_warning(setting: SamplingParams, caplog: pytest.LogCaptureFixture) -> None:
    logits = torch.tensor([[-INF] * 4, [float("nan")] * 4, [-9.0, -9.0, 9.0, 9.0]])
    logits[2, 3] = -INF
    with caplog.at_level(logging.WARNING):
        assert sample(logits, make_rows([setting] * 3, [0.7] * 3)).tolist() == [0, 0, 2]
    assert "2 of 3 rows have no finite logit" in caplog.text


def test_a_wrong_number_of_rows_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"expected logits of 1 rows, got shape \(2, 4\)"):
        sample(torch.zeros(2, 4), make_rows([SAMPLED], [0.1]))
