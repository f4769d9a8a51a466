"""Whole experiments: `python -m bench.experiment` as a user starts it, with a tiny model, and with servers that misbehave."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from bench.experiment import figures as f
from bench.experiment.__main__ import _main
from bench.experiment.results import read_results

ROOT = Path(__file__).resolve().parents[2]

# every kind of load at sizes of a tiny model: closed and open, single prompts, conversations, programs
PLAN = """
title = "Every kind of load"
model_dir = {model_dir}
repeats = 1
flags = ["--dtype", "float32", "--max-total-tokens", "3000", "--check-account-every-step"]
baseline = "off"
sample_interval_s = 0.1
ttft = {{ server = "on", pairs = [[200, 150]], repeats = 1 }}
servers = [
  {{ label = "on" }},
  {{ label = "off", flags = ["--disable-radix-cache"] }},
  {{ label = "gone", command = ["${{NO_SUCH_PEER}}/x"] }},
]

[[loads]]
workload = "shared-prefix"
options = {{ num_groups = 2, prompts_per_group = 4, system_prompt_len = 60, question_len = 6, output_len = 4 }}
concurrency = 4
repeats = 2

[[loads]]
workload = "random"
options = {{ num_prompts = 6, input_len = 40, output_len = 3 }}
concurrency = 3

[[loads]]
workload = "perturbed"
options = {{ changes = "timestamp,newline", prompts_per_group = 3, document_len = 100, question_len = 5, output_len = 2 }}
concurrency = 1

[[loads]]
workload = "multi-turn-short"
options = {{ num_chats = 3, num_turns = 3, min_first_len = 30, max_first_len = 40, min_turn_len = 10, max_turn_len = 20 }}
concurrency = 3

[[loads]]
workload = "tree-of-thought"
options = {{ num_questions = 1, num_levels = 3, question_len = 20, step_len = 4, output_len = 6 }}
concurrency = 4

[[loads]]
label = "open"
workload = "shared-prefix"
options = {{ num_groups = 2, prompts_per_group = 4, system_prompt_len = 60, question_len = 6, output_len = 4 }}
rates = [50, 100]
"""


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Experiment = Callable[..., Done]


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Experiment:
    """`python -m bench.experiment ARGUMENTS` in this process, which has everything imported; its servers are processes as ever."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def start(*arguments: str) -> Done:
        code = _main(arguments)
        return Done(code, *capsys.readouterr())

    return start


def plan_file(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_plan_becomes_a_folder_and_the_counts_agree(experiment: Experiment, words_model_dir: Path, tmp_path: Path) -> None:
    plan = plan_file(tmp_path / "plan.toml", PLAN.format(model_dir=f'"{words_model_dir}"'))
    dry = experiment(plan, "--check")
    assert (dry.returncode, dry.stdout.splitlines()[2]) == (0, "gone: skipped, the environment variable NO_SUCH_PEER is not set")
    assert not (tmp_path / "out").exists()
    done = experiment(plan, "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "gone: skipped, the environment variable NO_SUCH_PEER is not set" in done.stdout
    results = read_results(tmp_path / "out" / "results.json")
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {
        "results.json",
        "report.md",
        "report.html",
        "overview.png",
        "goodput.png",
    }
    assert not results.is_partial
    assert len(results.runs) == 2 * (2 + 1 + 1 + 1 + 1 + 2)
    for run in results.runs:
        assert f.counts_agree(run) is True, (run.load, run.server, run.repeat)
        rates = f.hit_rates(run.records)
        assert rates is not None
        assert f.prefilled_tokens(run) == rates.prompt_tokens - rates.cached_tokens
        assert f.time_split(run) is not None
        if run.server == "off":
            assert rates.cached_tokens == 0
    for load in ("random", "perturbed"):
        [(pair, *_)] = [f.pairs(results, load, "on")]
        rates = f.hit_rates(pair.other.records)
        assert rates is not None
        assert rates.token_rate == pytest.approx(pair.other.ideal_hit_rate, abs=1e-4)
        assert [record.prompt_tokens for record in pair.other.records] == [record.prompt_tokens for record in pair.baseline.records]
    [pair] = results.ttft
    assert (pair.n, pair.p, pair.cached_tokens) == (200, 150, 150.0)
    assert pair.cold_step_s is not None and pair.hit_step_s is not None and pair.hit_server_s is not None
    assert 0 < pair.hit_step_s < pair.hit_server_s < pair.hit_s
    assert 0 < pair.cold_step_s < pair.cold_s


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('title = "x"\nrepeat = 1\n', "plan.toml: repeat: unknown key; did you mean repeats?"),
        (
            'title = "x"\nservers = [{label = "on"}]\nloads = [{workload = "random", concurrency = 1, options = {num_prompt = 1}}]\n',
            r"loads[0] (random): workload random: expected an option of num_prompts",
        ),
        (
            'title = "x"\nservers = [{label = "on", flags = ["--no-such-flag"]}]\nloads = [{workload = "random", concurrency = 1}]\n',
            "--no-such-flag",
        ),
        (
            'title = "x"\nloads = [{workload = "random", concurrency = 1}]\n[[servers]]\nlabel = "peer"\nstart_timeout_s = 1.5\n'
            'command = ["sh", "-c", "echo I never listen; sleep 1000"]\n',
            "peer: not healthy within 1.5 s; the end of its log:\nI never listen",
        ),
    ],
    ids=["unknown key", "unknown option", "server that ends", "server that is never ready"],
)
def test_what_cannot_run_is_said_and_nothing_is_left(
    text: str, message: str, experiment: Experiment, words_model_dir: Path, tmp_path: Path
) -> None:
    head, _, rest = text.partition("\n")
    plan = plan_file(tmp_path / "plan.toml", f'{head}\nmodel_dir = "{words_model_dir}"\n{rest}' if "repeat =" not in text else text)
    done = experiment(plan, "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
    assert not [process for process in psutil.process_iter(["cmdline"]) if "echo I never listen" in " ".join(process.info["cmdline"] or ())]


def test_what_was_measured_before_a_server_died_is_kept(experiment: Experiment, words_model_dir: Path, tmp_path: Path) -> None:
    """16 answers for the warm-up, 3 for the first repeat, 1 for the second; none for the third, which ends the experiment."""
    text = (
        f'title = "x"\nmodel_dir = "{words_model_dir}"\nrepeats = 3\n'
        'loads = [{workload = "random", concurrency = 1, options = {num_prompts = 3, input_len = 4, output_len = 2}}]\n[[servers]]\n'
        f'label = "peer"\nflush = ""\ncommand = ["{sys.executable}", "-m", "tests.support.dying_server", "{{port}}", "20"]\n'
    )
    done = experiment(plan_file(tmp_path / "plan.toml", text), "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    assert "random, peer, repeat 2: " in done.stdout and "2 requests failed" in done.stdout
    assert "peer, load random, repeat 3: every request failed, the first with: ConnectionRefusedError" in done.stderr
    assert "its process ended with 3; the end of its log:\nout of memory, say" in done.stderr
    assert f"what was measured until then: {sys.executable} -m bench.experiment --report {tmp_path / 'out'}" in done.stderr
    results = read_results(tmp_path / "out" / "results.json")
    assert [(run.repeat, len(run.served), len(run.failed)) for run in results.runs] == [(0, 3, 0), (1, 1, 2)]
    assert not (tmp_path / "out" / "report.html").exists()
    again = experiment("--report", str(tmp_path / "out"))
    assert again.returncode == 0, again.stderr
    report = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "<strong>Partial results.</strong> 2 of 3 runs were measured before the experiment ended." in report
    assert "<strong>Requests failed:</strong> 2 of 6, in one run of peer on random 2 of 3." in report


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_experiment_stops_its_servers(number: signal.Signals, words_model_dir: Path, tmp_path: Path) -> None:
    """Also what a server has started itself."""
    mark = f"{tmp_path}/pid"
    text = (
        f'title = "x"\nmodel_dir = "{words_model_dir}"\nloads = [{{workload = "random", concurrency = 1}}]\n[[servers]]\nlabel = "peer"\n'
        f'command = ["sh", "-c", "sleep 1000 & echo $! > {mark}; wait"]\n'
    )
    command = [sys.executable, "-m", "bench.experiment", plan_file(tmp_path / "plan.toml", text), "--out", str(tmp_path / "out")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not (Path(mark).exists() and Path(mark).read_text().strip()):
        assert time.monotonic() < until
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    grandchild = int(Path(mark).read_text())
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "experiment stopped; its servers are stopped too" in stderr
    assert not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE
