"""From what a user names (nothing, a directory, a .gguf file, a hub name) to a directory with config, weights and tokenizer."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from radixserve.errors import ModelFetchError, shown
from radixserve.models.store import CONVERTER_VERSION, cache_root, make_once

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_PATTERNS = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "merges.txt"]


@dataclass(frozen=True, slots=True)
class ModelLocation:
    path: Path
    name: str  # to serve it under


def resolve_model(model_path: str | None) -> ModelLocation:
    """None is the default model, fetched and converted on first use; a .gguf file is converted once into the user's cache.

    Raises ModelFetchError where a network is needed and does not answer, ModelError for a path that holds no model.
    """
    if model_path is None:
        from radixserve.models.default_model import DEFAULT_MODEL_NAME, default_model_dir

        return ModelLocation(default_model_dir(), DEFAULT_MODEL_NAME)
    path = Path(model_path).expanduser()
    try:
        is_directory = path.is_dir()
    except OSError as error:  # a name that no file system takes
        raise ModelFetchError(f"{shown(model_path)}: {error.strerror}") from error
    if is_directory:
        if not (path / "config.json").is_file():
            raise ModelFetchError(f"{path}: no config.json there; a model directory has config.json, *.safetensors and tokenizer.json")
        path = path.absolute()  # not resolve(): a link's own name says more than where it leads
        return ModelLocation(path, path.name or path.resolve().name)
    if path.suffix.lower() == ".gguf":
        return _converted(path)
    if path.exists():
        raise ModelFetchError(f"{path}: expected a directory, a .gguf file or a hub name like org/name, got another kind of file")
    if HUB_NAME.fullmatch(model_path):
        return ModelLocation(_from_hub(model_path), model_path)
    raise ModelFetchError(f"no such directory or file: {model_path}; a model is a directory, a .gguf file or a hub name like org/name")


def _converted(path: Path) -> ModelLocation:
    if not path.is_file():
        raise ModelFetchError(f"--model-path: no such file: {path}")
    path = path.resolve()
    stat = path.stat()
    # the content's hash would cost a read of the whole file at every start
    stamp = f"converter {CONVERTER_VERSION}, {path}, {stat.st_size} bytes, modified {stat.st_mtime_ns}"
    key = hashlib.sha256(str(path).encode()).hexdigest()[:16]
    target = cache_root() / "models" / f"{path.stem.lower()}-{key}"

    def make(directory: Path) -> None:
        from radixserve.models.gguf_convert import convert_gguf  # brings torch; a start with a filled cache does without

        convert_gguf(path, directory)

    return ModelLocation(make_once(target, stamp, make), path.stem)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_PATTERNS))
    except Exception as error:  # the client's many kinds (HTTP, name, disk) all mean one thing to the user
        reason = str(error).strip().split("\n")[0]
        raise ModelFetchError(
            f"--model-path: {name} is no directory here and could not be fetched from the hub ({type(error).__name__}: {reason}); "
            "give --model-path a local directory or a .gguf file"
        ) from error
