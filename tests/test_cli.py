"""The command line as a user types it: generated flags, one-line errors, nothing guessed."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from radixserve import foreign_flags
from radixserve.cli import config_from, engine_config_from, make_parser
from radixserve.config import CacheConfig, EngineConfig, SchedulerConfig, ServerConfig, flag_of
from tests.support import flags_page


def parse(line: str):  # type: ignore[no-untyped-def]
    return make_parser().parse_args(line.split())


def test_no_flags_give_the_defaults_of_the_classes() -> None:
    args = parse("serve")
    assert engine_config_from(args) == EngineConfig()
    assert config_from(args, ServerConfig) == ServerConfig()


def test_flags_reach_their_config() -> None:
    args = parse("serve --page-size 16 --disable-radix-cache --schedule-policy fcfs --port 8000 --drain-timeout-s 1.5 --model x")
    config = engine_config_from(args)
    assert config.cache == CacheConfig(page_size=16, disable_radix_cache=True)
    assert config.scheduler == SchedulerConfig(schedule_policy="fcfs")
    assert config.model_path == "x"
    server = config_from(args, ServerConfig)
    assert (server.port, server.drain_timeout_s) == (8000, 1.5)


def test_a_later_flag_wins() -> None:
    assert config_from(parse("serve --host 0.0.0.0 --host 127.0.0.2"), ServerConfig).host == "127.0.0.2"


def test_every_field_is_a_flag_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("serve --help")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for config in (EngineConfig, CacheConfig, SchedulerConfig, ServerConfig):
        for spec in dataclasses.fields(config):
            if spec.name not in ("cache", "scheduler"):
                assert flag_of(spec.name) in text


def test_the_page_of_flags_is_current() -> None:
    """Else: python -m tests.support.flags_page > docs/flags.md"""
    assert (Path(__file__).parents[1] / "docs" / "flags.md").read_text(encoding="utf-8") == flags_page.page()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("serve --modle-path x", "radixserve serve: unknown argument --modle-path; did you mean --model-path?"),
        ("serve --disable-radix-cach", "unknown argument --disable-radix-cach; did you mean --disable-radix-cache?"),
        ("serve --max-run 3", "unknown argument --max-run\n"),
        ("serve --enable-radix-cache", "unknown argument --enable-radix-cache\n"),  # the nearest spelling is its opposite
        ("serve --tp 2", "unknown argument --tp; here it is --tp-size\n"),
        ("serve --max-model-len=4096", "unknown argument --max-model-len=4096; here it is --context-length\n"),
        ("serve --max-num-seqs 8", "; here it is --max-running-requests\n"),
        ("serve --no-enable-prefix-caching", "; here it is --disable-radix-cache\n"),
        ("serve --enable-prefix-caching", "; not needed: prefixes are always re-used, unless --disable-radix-cache is given\n"),
        ("serve --enable-metrics", "; not needed: /metrics is always served\n"),
        ("serve --trust-remote-code", "; not built here: code that comes with a model\n"),
        ("serve --dp_size 2", "; not built here: several replicas in one server\n"),
        ("generate hi --speculative-algorithm EAGLE", "; not built here: speculative decoding\n"),
        ("serve --port abc", "argument --port: invalid int value: 'abc'"),
        ("serve --schedule-policy best", "invalid choice: 'best'"),
        ("launch", "invalid choice: 'launch'"),
        ("", "required: COMMAND"),
    ],
)
def test_a_mistake_is_one_line(line: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(line)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert len(error.splitlines()) == 2, "the mistake, and where help is"


def test_what_is_said_of_foreign_flags_names_flags_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("serve --help")
    known = set(re.findall(r"--[a-z0-9-]+", capsys.readouterr().out))
    assert not foreign_flags.FOREIGN_FLAGS & known, "a flag that is served here is not foreign"
    for flag in foreign_flags.FOREIGN_FLAGS:
        sentence = foreign_flags.about(flag)
        assert sentence is not None
        assert set(re.findall(r"--[a-z0-9-]+", sentence)) <= known, flag
    assert foreign_flags.about("--page-size") is None


@pytest.mark.parametrize(
    ("flag", "difference"),
    [
        ("--cuda-graph-bs", "the largest size alone"),
        ("--watchdog-timeout", "the server is not ended"),
        ("--skip-tokenizer-init", "not built here"),
        ("--tokenizer-worker-num", "not built here"),
    ],
)
def test_a_foreign_flag_that_is_not_the_same_here_is_told_with_the_difference(flag: str, difference: str) -> None:
    assert difference in (foreign_flags.about(flag) or "")


def test_importing_the_package_loads_nothing_yet() -> None:
    """It comes before the command can take care of Ctrl-C."""
    script = "import sys, radixserve; print([name for name in sys.modules if name.startswith('radixserve.')])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"
