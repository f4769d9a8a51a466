"""A real tokenizer.json in which every byte is one token: tests choose ids by choosing text, and can split characters anywhere."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

SPECIAL_TOKENS = ("<eos>", "<crash>", "<slow>", "<refuse>")
EOS_ID, CRASH_ID, SLOW_ID, REFUSE_ID = range(256, 260)
VOCAB_SIZE = 260


def write_byte_tokenizer(directory: Path) -> None:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    vocab = {chr(byte) if byte in printable else chr(next(others)): byte for byte in range(256)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    (directory / "config.json").write_text(json.dumps({"model_type": "echo"}))
