"""A byte-level BPE of a few hundred whole words, trained in a moment: for prompts made of words, without a model."""

import itertools
from pathlib import Path

from bench.words import Words
from tests.support.tiny_models import SPECIAL_TOKENS


def write_word_tokenizer(directory: Path) -> Path:
    """Fill `directory` with a tokenizer.json whose words are of the form bab or dabe: some 400, each one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    syllables = ["".join(pair) for pair in itertools.product("bdfklm", "aeo")]
    words = ["".join(each) for each in itertools.product(syllables, syllables) for _ in range(3)]
    words += ["".join(each) for each in itertools.product(syllables[:4], repeat=3)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4000, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([f"x {word} {word}" for word in words], trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def word_tokenizer(directory: Path) -> Words:
    return Words(write_word_tokenizer(directory))
