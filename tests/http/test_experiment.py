"""Whole experiments: `python -m bench.experiment` as a user starts it, with a tiny model, and with servers that misbehave."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench.experiment import figures as f
from bench.experiment.results import read_results
from tests.support.tiny_models import make_tiny_model
from tests.support.word_tokenizer import write_word_tokenizer

ROOT = Path(__file__).resolve().parents[2]

# every kind of load at sizes of a tiny model: closed and open, single prompts, conversations, programs
PLAN = """
title = "Every kind of load"
model_dir = {model_dir}
repeats = 2
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

[[loads]]
workload = "random"
options = {{ num_prompts = 6, input_len = 40, output_len = 3 }}
concurrency = 3

[[loads]]
workload = "perturbed"
options = {{ changes = "timestamp,newline", prompts_per_group = 3, document_len = 100, question_len = 5, output_len = 2 }}
concurrency = 1
repeats = 1

[[loads]]
workload = "multi-turn-short"
options = {{ num_chats = 3, num_turns = 3, min_first_len = 30, max_first_len = 40, min_turn_len = 10, max_turn_len = 20 }}
concurrency = 3
repeats = 1

[[loads]]
workload = "tree-of-thought"
options = {{ num_questions = 1, num_levels = 3, question_len = 20, step_len = 4, output_len = 6 }}
concurrency = 4
repeats = 1

[[loads]]
label = "open"
workload = "shared-prefix"
options = {{ num_groups = 2, prompts_per_group = 4, system_prompt_len = 60, question_len = 6, output_len = 4 }}
rates = [50, 100]
repeats = 1
"""


def experiment(*arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.experiment", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "words"
    make_tiny_model(directory, "llama", tie=True, vocab_size=4000)
    return write_word_tokenizer(directory)


def plan_file(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_plan_becomes_a_folder_and_the_counts_agree(model_dir: Path, tmp_path: Path) -> None:
    plan = plan_file(tmp_path / "plan.toml", PLAN.format(model_dir=f'"{model_dir}"'))
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
    assert len(results.runs) == 2 * (2 + 2 + 1 + 1 + 1 + 2)
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
    assert [(pair.n, pair.p, pair.cached_tokens) for pair in results.ttft] == [(200, 150, 150.0)]


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
def test_what_cannot_run_is_said_and_nothing_is_left(text: str, message: str, model_dir: Path, tmp_path: Path) -> None:
    head, _, rest = text.partition("\n")
    plan = plan_file(tmp_path / "plan.toml", f'{head}\nmodel_dir = "{model_dir}"\n{rest}' if "repeat =" not in text else text)
    done = experiment(plan, "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
    assert not [process for process in psutil.process_iter(["cmdline"]) if "echo I never listen" in " ".join(process.info["cmdline"] or ())]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_experiment_stops_its_servers(number: signal.Signals, model_dir: Path, tmp_path: Path) -> None:
    """Also what a server has started itself."""
    mark = f"{tmp_path}/pid"
    text = (
        f'title = "x"\nmodel_dir = "{model_dir}"\nloads = [{{workload = "random", concurrency = 1}}]\n[[servers]]\nlabel = "peer"\n'
        f'command = ["sh", "-c", "sleep 1000 & echo $! > {mark}; wait"]\n'
    )
    command = [sys.executable, "-m", "bench.experiment", plan_file(tmp_path / "plan.toml", text), "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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
