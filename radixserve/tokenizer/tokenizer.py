"""Tokenizer: text to ids and back, over the `tokenizers` package; and what each single id contributes to a text, in bytes."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from radixserve.errors import InvalidRequestError, ModelError, UnsupportedModelError
from radixserve.tokenizer.chat_template import ChatTemplate

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
SPACE_MARK = "▁"  # a space, in vocabularies that come from SentencePiece


class Tokenizer:
    """Immutable after loading and safe to share between threads."""

    def __init__(
        self,
        backend: RustTokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """The tokens are the names in tokenizer_config.json; tokenizer.json alone does not say which they are."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._scheme = _byte_scheme(backend)
        self._special_ids = frozenset(token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special)
        self._bytes_by_id: dict[int, bytes] = {}
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        self.max_token_chars: int = max(map(len, vocabulary), default=0)  # a text of n characters has at least n / max_token_chars tokens
        self.bos_token, self.eos_token, self.pad_token = bos_token, eos_token, pad_token
        self.chat_template = chat_template  # None: the model has none
        self.bos_token_id: int | None = None if bos_token is None else backend.token_to_id(bos_token)
        eos_token_id = None if eos_token is None else backend.token_to_id(eos_token)
        self.eos_token_ids: tuple[int, ...] = () if eos_token_id is None else (eos_token_id,)

    @classmethod
    def from_directory(cls, model_dir: Path) -> "Tokenizer":
        """Read tokenizer.json; without one, let transformers convert what there is (tokenizer.model, vocab.json).

        Raises ModelError when there is no tokenizer, UnsupportedModelError for one whose decoder we do not know.
        """
        path = model_dir / "tokenizer.json"
        config = _read_config(model_dir / "tokenizer_config.json")
        if path.exists():
            try:
                backend = RustTokenizer.from_file(str(path))
            except Exception as error:  # the package raises plain Exception
                raise ModelError(f"{path}: cannot be read: {error}") from error
        else:
            backend = _converted_by_transformers(model_dir)
        names = {key: text for key in _SPECIAL_TOKENS if (text := _token_text(config, key)) is not None}
        source = _chat_template_source(model_dir, config)
        return cls(
            backend,
            bos_token=names.get("bos_token"),
            eos_token=names.get("eos_token"),
            pad_token=names.get("pad_token"),
            chat_template=None if source is None else ChatTemplate(source, names),
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. With add_special_tokens the tokenizer's own rule holds (Llama puts BOS first, Qwen and SmolLM2 put nothing).

        BOS is never added twice: a text that already begins with BOS, as the output of a chat template does, gets no other.
        Raises InvalidRequestError for text that is not valid Unicode.
        """
        try:
            # the batch call, unlike the plain one, lets other Python threads run meanwhile: a long text must not stop the server
            ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequestError("prompt: expected valid Unicode text, got a lone surrogate") from error
        if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id:
            return ids[1:]
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence; incomplete UTF-8 becomes U+FFFD."""
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    @property
    def strips_first_space(self) -> bool:
        """Whether a text's first token loses the space that SentencePiece puts before every first word."""
        return self._scheme.strips_first_space

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """What this id adds to a text, before any stripping of the first space; b"" for an id that is not in the vocabulary."""
        known = self._bytes_by_id.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id)
            known = self._bytes_by_id[token_id] = b"" if token is None else self._scheme.to_bytes(token)
        return known


class _ByteLevelScheme:
    """GPT-2's: one printable character stands for one byte. A token with any other character stands for itself."""

    strips_first_space = False

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        rest = [byte for byte in range(256) if byte not in printable]
        self._byte_by_char = {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(rest)}

    def to_bytes(self, token: str) -> bytes:
        try:
            return bytes([self._byte_by_char[char] for char in token])
        except KeyError:
            return token.encode()


class _SentencePieceScheme:
    """A mark stands for a space, <0xE2> for a byte, anything else for itself."""

    def __init__(self, strips_first_space: bool, has_byte_tokens: bool) -> None:
        self.strips_first_space = strips_first_space
        self._has_byte_tokens = has_byte_tokens

    def to_bytes(self, token: str) -> bytes:
        if self._has_byte_tokens and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.replace(SPACE_MARK, " ").encode()


def _byte_scheme(backend: RustTokenizer) -> _ByteLevelScheme | _SentencePieceScheme:
    """Read off the decoder of tokenizer.json, so that a token's bytes are what the package's own decode makes of it."""
    decoder: dict[str, Any] = json.loads(backend.to_str())["decoder"] or {"type": "none"}
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return _ByteLevelScheme()
    marks = [part for part in parts if part["type"] == "Metaspace" or (part["type"] == "Replace" and part["content"] == " ")]
    known = {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}
    if len(marks) != 1 or not known.issuperset(kinds):
        raise UnsupportedModelError(f"tokenizer.json: expected a decoder of kind ByteLevel or SentencePiece, got {' + '.join(kinds)}")
    strips = any(
        (part["type"] == "Strip" and part.get("start") == 1) or (part["type"] == "Metaspace" and part.get("prepend_scheme") != "never")
        for part in parts
    )
    return _SentencePieceScheme(strips, "ByteFallback" in kinds)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(config).__name__}")
    return config


def _token_text(config: dict[str, Any], key: str) -> str | None:
    """A special token is written as its text, or as an AddedToken with the text in `content`."""
    token = config.get(key)
    return token.get("content") if isinstance(token, dict) else token


def _chat_template_source(model_dir: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, or chat_template in tokenizer_config.json: a text, or a list of named ones of which "default" counts."""
    path = model_dir / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from error
    source = config.get("chat_template")
    if isinstance(source, list):
        source = next((item.get("template") for item in source if isinstance(item, dict) and item.get("name") == "default"), None)
    if source is not None and not isinstance(source, str):
        raise ModelError(f"{model_dir}: chat_template: expected a text, got {type(source).__name__}")
    return source


def _converted_by_transformers(model_dir: Path) -> RustTokenizer:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    except Exception as error:  # whatever the many tokenizer classes raise, the user needs one sentence
        raise ModelError(f"no tokenizer.json in {model_dir}, and transformers cannot make one: {error}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, RustTokenizer):
        raise UnsupportedModelError(f"tokenizer: {type(tokenizer).__name__} in {model_dir} cannot be converted to a tokenizer.json")
    return backend
