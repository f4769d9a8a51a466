"""Text to token ids and back; chat templates; incremental detokenizing with stop strings."""

from radixserve.tokenizer.chat_template import ChatTemplate
from radixserve.tokenizer.detokenizer import DetokenizedText, Detokenizer
from radixserve.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "DetokenizedText", "Detokenizer", "Tokenizer"]
