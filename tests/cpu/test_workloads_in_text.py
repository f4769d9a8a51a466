"""The workloads of bench/ at their full sizes through the default model's tokenizer: as many tokens as asked for, as ids and as text."""

import pytest

from bench.words import Words, find_model_dir
from bench.workloads import WORKLOADS, make_workload


@pytest.fixture(scope="module")
def words() -> Words:
    return Words(find_model_dir(None))


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name not in ("trace", "sharegpt")])
def test_text_has_the_same_tokens(name: str, words: Words) -> None:
    workload = make_workload(name, words, 1)
    answers = {request.id: [words.ids[0]] * request.output_len for request in workload.requests}
    for request, prompt_len in zip(workload.requests[:12], workload.prompt_lens):
        prompt = request.prompt(answers)
        assert len(prompt) == prompt_len
        assert words.encode(words.text(prompt)) == prompt


def test_a_change_in_front_costs_the_hits_and_at_the_end_it_does_not(words: Words) -> None:
    rates = make_workload("perturbed", words, 1).ideal_by_group
    assert max(rate for group, rate in rates.items() if group.endswith("/front")) < 0.03
    assert min(rate for group, rate in rates.items() if group.endswith("/end")) > 0.6
