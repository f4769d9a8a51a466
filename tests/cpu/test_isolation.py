"""A position never depends on a later token, not even on one whose numbers are none: what it leaves in the tree is served to others."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.engine_runs import make_request, run, tiny_engine
from tests.support.tiny_models import make_tiny_model

BAD_TOKEN = 200
GREEDY = {"max_tokens": 4, "temperature": 0.0, "logprobs": 1, "ignore_eos": True}


@pytest.fixture(scope="module")
def broken_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], Path]:
    """make(number): one row of the embedding is that number."""

    def make(number: float) -> Path:
        directory = make_tiny_model(tmp_path_factory.mktemp("broken"), "qwen3", False, head_dim=64)
        weights = load_file(directory / "model.safetensors")
        weights["model.embed_tokens.weight"][BAD_TOKEN] = number
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    return make


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
@pytest.mark.parametrize("options", [{}, {"attention_backend": "torch", "linear_backend": "torch"}], ids=["native", "torch"])
def test_what_precedes_a_token_that_is_no_number_is_right_and_may_be_shared(
    broken_model: Callable[[float], Path], number: float, options: dict[str, object]
) -> None:
    engine = tiny_engine(broken_model(number), max_total_tokens=600, **options)
    draw = random.Random(1)
    prompt = [draw.randrange(100) for _ in range(40)]
    scored = {**GREEDY, "prompt_logprobs": 0, "prompt_logprobs_start": 0}
    clean = run(engine, [make_request("clean", prompt, **scored)])["clean"]
    # at the end of a prompt, in its middle, twice, and with another in the batch
    for broken in ([*prompt, BAD_TOKEN], [*prompt, BAD_TOKEN, *prompt[:5]], [*prompt, BAD_TOKEN, 3, BAD_TOKEN, 4]):
        engine.flush_cache()
        answers = run(engine, [make_request("broken", broken, **scored), make_request("beside", [*prompt[:30], 7, 8], **GREEDY)])
        got = answers["broken"].prompt_logprobs[: len(prompt) - 1]
        assert [one.logprob for one in got] == pytest.approx([one.logprob for one in clean.prompt_logprobs], abs=1e-4)
        again = run(engine, [make_request("again", prompt, **GREEDY)])["again"]
        assert again.final is not None and again.final.num_cached_tokens == len(prompt) - 1
        assert again.token_ids == clean.token_ids
        assert [one.logprob for one in again.logprobs] == pytest.approx([one.logprob for one in clean.logprobs], abs=1e-4)
