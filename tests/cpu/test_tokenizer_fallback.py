"""A directory without tokenizer.json: transformers converts what there is."""

import json
from pathlib import Path

import pytest

from radixserve.errors import ModelError
from radixserve.tokenizer import Tokenizer
from tests.support import small_tokenizers as small


def test_vocab_and_merges_are_converted(tmp_path: Path) -> None:
    backend = small.byte_level()
    model = json.loads(backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *(" ".join(merge) for merge in model["merges"])]))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_directory(tmp_path)
    text = "the quick 日本語 😀"
    assert tokenizer.encode(text) == backend.encode(text).ids
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.is_special(2)


def test_a_directory_without_any_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=f"no tokenizer.json in {tmp_path}"):
        Tokenizer.from_directory(tmp_path)
