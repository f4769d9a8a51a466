"""Tokenizer: ids, special tokens, BOS, and the bytes of single tokens against the package's own decode."""

import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models

from radixserve.errors import InvalidRequestError, ModelError, UnsupportedModelError
from radixserve.tokenizer import Tokenizer
from radixserve.tokenizer.from_gguf import SPLITS, write_tokenizer
from tests.support import small_tokenizers as small
from tests.support.examples import examples

BYTE_LEVEL = Tokenizer(small.byte_level(), bos_token="<s>", eos_token="</s>")
SENTENCEPIECE = Tokenizer(small.sentencepiece(), bos_token="<s>", eos_token="</s>")
TEXT = "the quick 日本語 😀 naïve\n\n  café"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE])
def test_round_trip_and_special_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.is_special(2)
    assert not tokenizer.is_special(40)
    assert tokenizer.decode([*tokenizer.encode("abc"), 2]) == "abc"
    assert tokenizer.decode([*tokenizer.encode("abc"), 2], skip_special_tokens=False).endswith("abc</s>")
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) != b""


def test_bos_is_added_once() -> None:
    plain = SENTENCEPIECE.encode("abc", add_special_tokens=False)
    assert SENTENCEPIECE.encode("abc") == [1, *plain]
    assert SENTENCEPIECE.encode("<s>abc") == [1, *SENTENCEPIECE.encode("<s>abc", add_special_tokens=False)[1:]]
    assert SENTENCEPIECE.encode("<s>abc").count(1) == 1
    assert SENTENCEPIECE.encode("<s><s>abc").count(1) == 2  # what the caller wrote stays
    assert SENTENCEPIECE.encode("") == [1]
    assert 1 not in BYTE_LEVEL.encode("abc")


def test_a_lone_surrogate_is_a_bad_request() -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        BYTE_LEVEL.encode("a\ud800b")


def test_truncation_in_the_file_is_not_obeyed() -> None:
    backend = small.byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert Tokenizer(backend).encode(TEXT) == BYTE_LEVEL.encode(TEXT)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_joined_token_bytes_are_the_text(text: str) -> None:
    assert b"".join(map(BYTE_LEVEL.token_bytes, BYTE_LEVEL.encode(text))).decode() == text
    ids = SENTENCEPIECE.encode(text.replace("▁", ""), add_special_tokens=False)
    assert b"".join(map(SENTENCEPIECE.token_bytes, ids)).decode().removeprefix(" ") == text.replace("▁", "")


@settings(max_examples=examples(150))
@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1)))
def test_joined_token_bytes_are_what_the_package_decodes(ids: list[int]) -> None:
    """For any ids, broken UTF-8 included: same text, same number of replacement marks."""
    assert b"".join(map(BYTE_LEVEL.token_bytes, ids)).decode(errors="replace") == BYTE_LEVEL.decode(ids, skip_special_tokens=False)


def test_from_directory_reads_both_files(tmp_path: Path) -> None:
    small.byte_level().save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.encode(TEXT) == BYTE_LEVEL.encode(TEXT)


def test_a_broken_file_and_an_unknown_decoder_are_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer.from_directory(tmp_path)
    backend = RustTokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModelError, match="got WordPiece"):
        Tokenizer(backend)


@pytest.mark.parametrize("pre", SPLITS)
def test_every_gguf_pre_tokenizer_keeps_the_text(tmp_path: Path, pre: str) -> None:
    model = json.loads(small.byte_level().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, *[1] * (len(tokens) - 3)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
    }
    assert write_tokenizer(metadata, tmp_path) == [2]
    tokenizer = Tokenizer.from_directory(tmp_path)
    ids = tokenizer.encode("it's 2024,  <s>" + TEXT)
    assert tokenizer.decode(ids, skip_special_tokens=False).removeprefix("<s>") == "it's 2024,  <s>" + TEXT
    assert (ids[0] == 1) == (pre == "llama-bpe")  # Llama 3 begins with BOS
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"


def test_numbers_are_cut_as_each_pre_tokenizer_says(tmp_path: Path) -> None:
    """With "12", "123" and "1234" as tokens: SmolLM2 and Qwen2 take digits one by one, Llama 3 in threes, GPT-2 as they come."""
    digits = {"smollm": ["1", "2", "3", "4"], "qwen2": ["1", "2", "3", "4"], "llama-bpe": ["123", "4"], "gpt-2": ["1234"]}
    alphabet = [*"123456789", "12", "123", "1234"]
    for pre, expected in digits.items():
        metadata = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": alphabet,
            "tokenizer.ggml.token_type": [1] * len(alphabet),
            "tokenizer.ggml.merges": ["1 2", "12 3", "123 4"],
        }
        write_tokenizer(metadata, tmp_path)
        tokenizer = Tokenizer.from_directory(tmp_path)
        assert [alphabet[token_id] for token_id in tokenizer.encode("1234")] == expected


def test_encoding_lets_other_threads_run() -> None:
    """A long text must not stop the event loop, whose thread is another one."""
    num_ticks = 0
    is_done = threading.Event()

    def tick() -> None:
        nonlocal num_ticks
        while not is_done.wait(0.001):
            num_ticks += 1

    ticker = threading.Thread(target=tick)
    ticker.start()
    while num_ticks < 3:
        time.sleep(0.001)
    before = num_ticks
    ids = BYTE_LEVEL.encode("hello world " * 100_000)
    during = num_ticks - before
    is_done.set()
    ticker.join()
    assert len(ids) > 100_000
    assert during >= 5, "it would be 0 or 1 if encoding held the interpreter's lock"
