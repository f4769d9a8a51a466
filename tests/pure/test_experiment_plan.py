"""Plans of bench.experiment: what is read, and that every mistake is told by its place."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from bench.experiment.check import check_plan
from bench.experiment.peers import NotInstalledError, resolve_command, resolve_env
from bench.experiment.plan import Limits, Plan, ServerPlan, load_plan, parse_plan
from bench.experiment.results import read_results, write_results
from bench.experiment.runner import own_arguments
from bench.experiment.tables import PlanError
from bench.words import Words
from bench.workloads import make_workload
from radixserve.cli import make_parser
from tests.support.recorded_experiment import PLAN, recorded_results
from tests.support.word_tokenizer import word_tokenizer, write_word_tokenizer

PLANS = sorted((Path(__file__).resolve().parents[2] / "bench" / "plans").glob("*.toml"))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Words:
    return word_tokenizer(tmp_path_factory.mktemp("words"))


def changed(**values: Any) -> dict[str, Any]:
    """PLAN with other values; a name may be a path, e.g. servers__0__flags. ... takes a key away."""
    plan = copy.deepcopy(PLAN)
    for name, value in values.items():
        *way, last = (int(part) if part.isdigit() else part for part in name.split("__"))
        table: Any = plan
        for part in way:
            table = table[part]
        if value is ...:
            del table[last]
        else:
            table[last] = value
    return plan


def test_a_plan_is_read_with_its_defaults() -> None:
    plan = parse_plan(changed(limits=..., ttft=..., headline=..., baseline=...))
    assert (plan.title, plan.baseline, plan.headline, plan.seed) == ("A recorded experiment", "off", "shared", 1)
    assert plan.servers[1] == ServerPlan("off", flags=("--disable-radix-cache",))
    assert [(load.label, load.concurrency, load.rates, load.repeats) for load in plan.loads] == [
        ("shared", 2, (), 2),
        ("random", 2, (), 2),
        ("changed", 2, (), 2),
        ("rising", None, (1.0, 2.0), 1),
    ]
    assert (plan.limits, plan.ttft) == (Limits(), None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"titel": "x"}, "titel: unknown key; did you mean title?"),
        ({"title": ...}, "title: expected a text, got nothing"),
        ({"repeats": "3"}, "repeats: expected a whole number, got '3'"),
        ({"repeats": True}, "repeats: expected a whole number, got True"),
        ({"repeats": 0}, "repeats: expected at least 1, got 0"),
        ({"flags": "--x"}, "flags: expected a list, got '--x'"),
        ({"flags": [1]}, "flags: expected a list with a text in each place, got 1"),
        ({"servers": []}, r"servers: expected at least one \[\[servers\]\], got none"),
        ({"servers__0__flag": []}, r"servers\[0\].flag: unknown key; did you mean flags?"),
        ({"servers__0__health": "health"}, r"servers\[0\].health: expected a path that begins with /, got 'health'"),
        ({"servers__0__path": "/v1/chat/completions"}, r"servers\[0\].path: expected a completions route .* got '/v1/chat/completions'"),
        ({"servers__0__command": ["x"], "servers__0__flags": ["--y"]}, r"servers\[0\].flags: expected no flags beside a command"),
        ({"servers__0__env": {"A": 1}}, r"servers\[0\].env.A: expected a text, got 1"),
        ({"servers__1__label": "on", "baseline": "on"}, "servers: expected labels that differ, got 'on' twice"),
        ({"servers__0__label": "../on"}, r"servers\[0\].label: expected letters, digits"),
        ({"loads__0__concurrency": ...}, r"loads\[0\]: expected either concurrency \(closed loop\) or rates \(open loop\), got 'neither'"),
        ({"loads__0__rates": [1.0]}, r"loads\[0\]: expected either concurrency .* got 'both'"),
        ({"loads__3__rates": [1, 0]}, r"loads\[3\].rates: expected above 0, got 0"),
        ({"loads__3__rates": [float("nan")]}, r"loads\[3\].rates: expected above 0, got nan"),
        ({"loads__3__arrivals": "normal"}, r"loads\[3\].arrivals: expected one of poisson, constant, got 'normal'"),
        ({"loads__0__arrivals": "constant"}, r"loads\[0\].arrivals: expected none in a closed loop, .* got 'constant'"),
        ({"servers__0__flush": ""}, "ttft.server: expected a server that can flush, .* got 'on' with none"),
        ({"loads__1__label": "shared"}, "loads: expected labels that differ, got 'shared' twice"),
        ({"limits": {"share": 1.5}}, "limits.share: expected above 0 and at most 1, got 1.5"),
        ({"baseline": "of"}, r"baseline: expected the label of a server \(on, off\), got 'of'"),
        ({"headline": "share"}, r"headline: expected the label of a load \(shared, random, changed, rising\), got 'share'"),
        ({"ttft": {"server": "x", "pairs": [[2, 1]]}}, r"ttft.server: expected the label of a server \(on, off\), got 'x'"),
        ({"ttft": {"server": "on", "pairs": [[1, 2]]}}, r"ttft.pairs: expected pairs \[n, p\] with 0 < p < n, got \[1, 2\]"),
        ({"ttft": {"server": "on", "pairs": [[2.5, 1]]}}, r"ttft.pairs: expected pairs of whole numbers, got \[2.5, 1\]"),
    ],
)
def test_a_mistake_is_told_by_its_place(values: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse_plan(changed(**values))


def test_a_file_that_is_no_plan_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    with pytest.raises(PlanError, match=r"plan.toml: cannot be read: No such file"):
        load_plan(path)
    path.write_text("title = x\n")
    with pytest.raises(PlanError, match=r"plan.toml: not TOML: .*line 1"):
        load_plan(path)
    path.write_bytes(b'title = "\xff"')
    with pytest.raises(PlanError, match=r"plan.toml: expected UTF-8"):
        load_plan(path)


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_the_plans_that_are_here_can_be_made(path: Path, words: Words) -> None:
    plan = load_plan(path)
    for load in plan.loads:
        assert make_workload(load.workload, words, 1, **load.options).requests
    for server in plan.servers:
        if not server.is_peer:
            make_parser().parse_args(own_arguments(server, plan))  # flags that there are


def test_a_dry_run_says_what_would_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("PEER_X", raising=False)
    model_dir = write_word_tokenizer(tmp_path / "model")
    peer = {"label": "peer", "command": ["sh", "-m", "{model_dir}", "{port}"], "env": {"A": "${PEER_X:-}"}}
    document = {
        "title": "x",
        "model_dir": str(model_dir),
        "flags": ["--max-total-tokens", "4000"],
        "servers": [{"label": "int8", "flags": ["--quantization", "int8"]}, peer, {"label": "gone", "env": {"A": "${PEER_X}"}}],
        "baseline": "int8",
        "loads": [{"workload": "random", "options": {"num_prompts": 3, "input_len": 500}, "rates": [1, 2], "repeats": 2}],
    }
    assert check_plan(parse_plan(document)) == [
        f"int8: radixserve serve --model-path {model_dir} --max-total-tokens 4000 --quantization int8",
        f"peer: sh -m {model_dir} '{{port}}'",
        "gone: skipped, the environment variable PEER_X is not set",
        "random: 3 requests, 1,500 prompt tokens, 4 runs on each server",
    ]
    with pytest.raises(PlanError, match="baseline: gone is not installed"):
        check_plan(parse_plan({**document, "baseline": "gone"}))
    with pytest.raises(PlanError, match=r"servers \(int8\): flags that radixserve serve does not take"):
        check_plan(parse_plan({**document, "flags": ["--max-total-token", "4000"]}))
    assert "unknown argument --max-total-token; did you mean --max-total-tokens?" in capsys.readouterr().err
    with pytest.raises(PlanError, match=r"loads\[0\] \(random\): workload random: expected an option"):
        check_plan(parse_plan({**document, "loads": [{"workload": "random", "options": {"length": 1}, "concurrency": 1}]}))


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Times to 0.1 ms, everything else exactly."""
    path = tmp_path / "results.json"
    written = recorded_results()
    write_results(written, path)
    read, text = read_results(path), path.read_text()
    assert dataclasses.replace(read, runs=()) == dataclasses.replace(written, runs=())
    for one, two in zip(read.runs, written.runs, strict=True):
        assert [record.token_times_s for record in one.records] == [pytest.approx(record.token_times_s, abs=6e-5) for record in two.records]
        assert [(record.id, record.cached_tokens, record.error) for record in one.records] == [
            (record.id, record.cached_tokens, record.error) for record in two.records
        ]
        assert (one.counters, one.samples, one.ideal_by_group) == (pytest.approx(two.counters), two.samples, two.ideal_by_group)
    write_results(read, path)
    assert path.read_text() == text
    # an ideal of 0.738461... is shown as 73.8 %, as the equal hit rate is; rounded here it would be 73.9 %
    precise = dataclasses.replace(written.runs[0], ideal_hit_rate=4608 / 6240, ideal_by_group={"g": 1 / 3})
    write_results(dataclasses.replace(written, runs=(precise,)), path)
    assert (read_results(path).runs[0].ideal_hit_rate, read_results(path).runs[0].ideal_by_group) == (4608 / 6240, {"g": 1 / 3})


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_plan_survives_results_json(path: Path, tmp_path: Path) -> None:
    plan: Plan = load_plan(path)
    write_results(dataclasses.replace(recorded_results(), plan=plan), tmp_path / "results.json")
    assert read_results(tmp_path / "results.json").plan == plan


def test_other_json_is_no_results(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    for content in ({"format": 99}, [1]):
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=r"expected results of format 1, got"):
            read_results(path)
    path.write_text('{"format": 1}')
    with pytest.raises(ValueError, match=r"results.json: expected what an experiment writes; missing or wrong: 'plan'"):
        read_results(path)
    write_results(recorded_results(), path)
    path.write_text(path.read_text()[:1000])
    with pytest.raises(ValueError, match=r"results.json: expected JSON: "):
        read_results(path)


def test_a_peer_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PEER_X", raising=False)
    with pytest.raises(NotInstalledError, match="the environment variable PEER_X is not set"):
        resolve_command(ServerPlan("x", command=("${PEER_X}/bin/x",)), "model")
    monkeypatch.setenv("PEER_X", "nowhere")
    with pytest.raises(NotInstalledError, match=r"nowhere/bin/x is not on the PATH"):
        resolve_command(ServerPlan("x", command=("${PEER_X}/bin/x",)), "model")
    command = resolve_command(ServerPlan("x", command=("sh", "{model_dir}/${PEER_X}", "--port", "{port}")), "model")
    peer = ServerPlan("x", env={"A": "${PEER_X:-other}", "B": "${PEER_Y:-other}", "C": "${PEER_Y:-}", "D": "{model_dir}"})
    assert resolve_env(peer, "model") == {"A": "nowhere", "B": "other", "C": "", "D": "model"}
    assert command == ["sh", "model/nowhere", "--port", "{port}"]
