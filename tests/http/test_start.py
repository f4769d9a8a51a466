"""What a start settles once for both processes: the model's directory and name, and how much is printed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixserve.config import EngineConfig, ServerConfig
from radixserve.models.location import ModelLocation
from radixserve.server import serve
from tests.support.byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
from tests.support.waiting import ready_address

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("given_name", "served_name"), [(None, "org/model"), ("mine", "mine")])
def test_a_model_is_looked_up_once(model_dir: Path, monkeypatch: pytest.MonkeyPatch, given_name: str | None, served_name: str) -> None:
    looked_up: list[str | None] = []
    started: list[tuple[EngineConfig, ServerConfig]] = []

    def resolve(model_path: str | None) -> ModelLocation:
        looked_up.append(model_path)
        return ModelLocation(model_dir, "org/model")

    class Recorder:
        def __init__(self, engine_config: EngineConfig, server_config: ServerConfig, make_link: Any) -> None:
            started.append((engine_config, server_config))

        async def run(self, *args: Any) -> int:
            return 0

    monkeypatch.setattr(serve, "resolve_model", resolve)
    monkeypatch.setattr(serve, "_Serving", Recorder)
    assert serve.run_server(EngineConfig("org/model"), ServerConfig(port=0, served_model_name=given_name)) == 0
    ((engine_config, server_config),) = started
    assert looked_up == ["org/model"]
    assert engine_config.model_path == str(model_dir)
    assert server_config.served_model_name == served_name


def test_log_level_holds_in_both_processes(tmp_path: Path) -> None:
    """The real server and engine processes, on a random model; both levels run side by side to save time."""
    model = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    write_byte_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(model))
    options = ["--model-path", str(tmp_path), "--load-format", "dummy", "--max-total-tokens", "256", "--port", "0", "--device", "cpu"]
    servers = {}
    for level in ("info", "error"):
        command = [sys.executable, "-m", "radixserve", "serve", *options, "--log-level", level]
        with open(tmp_path / level, "w") as log:
            servers[level] = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        for level, process in servers.items():
            assert process.stdout is not None
            if level == "info":
                url = ready_address(process, tmp_path / level)
            else:
                line = process.stdout.readline()
                assert line.startswith("radixserve is ready on "), "the address, and nothing else"
                url = line.split()[-1]
            assert httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=30).status_code == 200
            process.terminate()
            assert process.wait(20) == 0
    finally:
        for process in servers.values():
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    assert "Prefill batch" in (tmp_path / "info").read_text()
    assert (tmp_path / "error").read_text() == ""
