"""Text to token ids and back; incremental detokenizing with stop strings."""

from radixserve.tokenizer.detokenizer import DetokenizedText, Detokenizer
from radixserve.tokenizer.tokenizer import Tokenizer

__all__ = ["DetokenizedText", "Detokenizer", "Tokenizer"]
