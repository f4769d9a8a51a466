"""python -m bench.serving from its command line to its files, against a small server."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.load import ClosedLoop, Target, run
from bench.serving import _main
from bench.words import Words
from bench.workloads import WORKLOADS, make_workload
from tests.support.bench_servers import RadixServer, WholeWords, serving
from tests.support.word_tokenizer import write_word_tokenizer

OPTIONS = ["num_groups=2", "prompts_per_group=3", "system_prompt_len=20", "question_len=4", "output_len=3"]
SMALL = [argument for option in OPTIONS for argument in ("--option", option)]


@pytest.fixture
def command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    model_dir = write_word_tokenizer(tmp_path / "model")

    async def start(url: str, *arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["serving", "--url", url, "--model-dir", str(model_dir), *arguments])
        return await _main()

    return start


async def test_a_sweep_of_rates(command_line: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records, out = tmp_path / "records.jsonl", tmp_path / "out.jsonl"
    arguments = ["--workload", "shared-prefix", *SMALL, "--rate", "100,200", "--repeats", "2", "--flush"]
    server = RadixServer()
    async with serving(server.handle) as url:
        assert await command_line(url, *arguments, "--records", str(records), "--out", str(out), "--label", "fake") == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "== fake  load shared-prefix, 100 per second, poisson: 6 requests, 2 run(s)" in printed.out
    assert "== fake  load shared-prefix, 200 per second, poisson: 6 requests, 2 run(s)" in printed.out
    assert "cached prompt tokens 80 of 144; token hit rate 55.6 % (ideal 55.6 %)" in printed.out
    assert "generator: sent late by p50/p99/max" in printed.out
    assert server.num_flushes == 4
    assert [json.loads(line)["seed"] for line in out.read_text().splitlines()] == [1, 2, 3, 4]
    assert len(records.read_text().splitlines()) == 4 * 6
    # two warm-up runs of 8 first; no rate has the prompts of another
    assert len(server.prompts) == 16 + 24
    assert len(set(map(tuple, server.prompts))) == 16 + 24


async def test_rates_are_told_apart_without_a_flush(command_line: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A server that keeps everything re-uses nothing of the rate before; the same command once more is told as what it is."""
    arguments = ["--workload", "random", "--option", "num_prompts=4", "--option", "input_len=60", "--rate", "200,400", "--repeats", "2"]
    async with serving(RadixServer().handle) as url:
        assert await command_line(url, *arguments) == 0
        assert "ABOVE IT" not in capsys.readouterr().out
        assert await command_line(url, *arguments) == 0
    assert capsys.readouterr().out.count("token hit rate 98.3 % (ideal 0.0 %: ABOVE IT, so the server knew these prompts from before") == 2


async def test_a_chat_is_counted_by_the_server_and_has_no_ideal(
    command_line: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its template's tokens are in every figure."""
    records, out = tmp_path / "records.jsonl", tmp_path / "out.jsonl"
    arguments = ["--workload", "shared-prefix", *SMALL, "--endpoint", "chat", "--concurrency", "1", "--repeats", "1", "--flush"]
    async with serving(RadixServer(encode=Words(tmp_path / "model").encode).handle) as url:
        assert await command_line(url, *arguments, "--records", str(records), "--out", str(out)) == 0
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    # 24 tokens of its own, and three of the template
    assert [(line["prompt_tokens"], line["prompt_len"], line["output_tokens"]) for line in lines] == [(27, None, 3)] * 6
    summary = json.loads(out.read_text())
    assert (summary["in_tok"], summary["served_in_tok"], summary["ideal_hit_rate"]) == (6 * 27, 6 * 27, None)
    assert summary["cached_tok"] == sum(line["cached_tokens"] for line in lines)
    printed = capsys.readouterr().out
    assert f"cached prompt tokens {summary['cached_tok']} of 162; " in printed
    assert "(no ideal: a chat template's tokens are among them)" in printed


async def test_a_server_that_refuses(command_line: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def handler(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 8\r\n\r\ntoo long")

    async with serving(handler) as url:
        assert await command_line(url, "--load", "B") == 1
        assert "warm-up failed: RequestFailedError: HTTP 400" in capsys.readouterr().err
        out = tmp_path / "out.jsonl"
        assert await command_line(url, "--load", "E", "--no-warm-up", "--repeats", "1", "--out", str(out)) == 1
    assert "load E, 1 at a time, seed 1: FAILED: 1 of 1: RequestFailedError: HTTP 400: too long" in capsys.readouterr().out
    assert json.loads(out.read_text())["error"].endswith("too long")


REFUSED = [
    (["--load", "A,G"], "expected A, B"),
    (["--rate", "0"], "expected requests per second, comma-separated, got '0'"),
    (["--rate", "2", "--concurrency", "4"], "expected a closed loop, got --rate"),
    (["--rate", "2", "--arrivals", "recorded"], "expected none with recorded arrivals"),
    (["--workload", "B", "--arrivals", "recorded", "--no-warm-up"], "expected recorded arrival times"),
    (["--workload", "B", "--option", "turns=2"], "expected an option of num_prompts"),
    (["--workload", "B", "--option", "input_len=2", "--option", "input_len=3"], "--option: expected each once, got input_len twice"),
    (["--option", "turns"], "expected name=value, got 'turns'"),
    (["--extra", "[1]"], "argument --extra: expected a JSON object, got '[1]'"),
    (["--extra", "{"], "argument --extra: expected a JSON object, got '{'"),
    (["--concurrency", "0"], "--concurrency: expected at least 1, got 0"),
    (["--path", "/v1/chat/completions"], "--path: expected a route of --endpoint completions, got /v1/chat/completions"),
    (["--endpoint", "chat", "--path", "/v1/completions"], "--path: expected a route of --endpoint chat, got /v1/completions"),
    (["--endpoint", "chat", "--send", "ids"], "--send: expected text with --endpoint chat"),
    (["--url", "https://127.0.0.1"], "expected http://HOST:PORT"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
async def test_a_wrong_flag_is_told(arguments: list[str], message: str, command_line: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        await command_line("http://127.0.0.1:9", *arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


async def test_the_list(command_line: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert await command_line("http://127.0.0.1:9", "--list") == 0
    printed = capsys.readouterr().out
    assert all(f"\n{name}: " in f"\n{printed}" for name in WORKLOADS)
    assert 'group_distribution="uniform"  how conversations fall to groups (uniform, zipf)' in printed


async def test_a_bar_is_for_terminals_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    load = make_workload("random", WholeWords(), 1, num_prompts=5, input_len=3, output_len=1)
    async with serving(RadixServer().handle) as url:
        await run(load, Target(url), ClosedLoop(2), show_progress=True)
        assert capsys.readouterr().err == ""
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        await run(load, Target(url), ClosedLoop(2), show_progress=True)
    assert "random:" in capsys.readouterr().err
