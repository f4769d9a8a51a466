"""Small tokenizers of the two kinds that exist among our models: byte-level BPE, and SentencePiece with byte fallback."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = (
    "The quick brown fox jumps over the lazy dog, again and again and again.",
    "naïve café 日本語の文章 한국어 문장 Ελληνικά русский текст",
    "emoji 😀😃 👩‍👩‍👧 and flags 🇩🇪",
    "abcdefghijklmnopqrstuvwxyz DEFGHIJ \nUser: stop",
)
SPECIAL = ("<unk>", "<s>", "</s>")


def byte_level() -> Tokenizer:
    """Multi-byte characters are mostly cut into several tokens: only a few merges were learned."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """As Llama 2's tokenizer.json: a mark for spaces, one before the first word; characters outside the vocabulary fall back to bytes."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyzDEFGHIJU:é語"]
    merges = [("a", "b"), ("▁", "a"), ("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁")]
    pieces += ["".join(merge) for merge in merges]
    vocab = {piece: rank for rank, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer
