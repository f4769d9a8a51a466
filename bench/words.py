"""Token ids and text, for prompts made of whole words: ids -> text -> ids is the identity, so a server sees the same tokens either way."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class Vocabulary(Protocol):
    """What the workloads need of a tokenizer."""

    @property
    def ids(self) -> Sequence[int]:
        """Tokens that are whole words."""
        ...

    def text(self, ids: list[int]) -> str: ...

    def encode(self, text: str) -> list[int]: ...


class Words:
    """The lower-case whole words of a byte-level BPE vocabulary that survive decode and encode on their own.

    Raises FileNotFoundError without a tokenizer.json, ValueError if the vocabulary has no such words.
    """

    def __init__(self, model_dir: Path) -> None:
        from tokenizers import Tokenizer

        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"expected a tokenizer.json in {model_dir}")
        self._tokenizer = Tokenizer.from_file(str(path))
        vocabulary = self._tokenizer.get_vocab()
        # U+0120 is how byte-level BPE writes the blank before a word
        candidates = sorted(token_id for token, token_id in vocabulary.items() if re.fullmatch("\u0120[a-z]{3,10}", token))
        self.ids = [token_id for token_id in candidates if self.encode(self.text([token_id])) == [token_id]]
        if not self.ids:
            raise ValueError(f"{path}: expected a byte-level BPE vocabulary with whole words, found none")

    def text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def find_model_dir(model_dir: Path | None) -> Path:
    """The directory given, or that of radixserve's default model (fetched once if need be)."""
    if model_dir is not None:
        return model_dir
    from radixserve.models import resolve_model

    return Path(resolve_model(None).path)
