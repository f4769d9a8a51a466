"""What an experiment recorded, as plain data, and its file results.json, from which the report can be made again at any time.

Times of a run are seconds since its start.
"""

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.experiment.plan import LoadPlan, Plan, parse_plan
from bench.metrics import Figures
from bench.records import RequestRecord

FORMAT = 1
_RECORD_FIELDS = [spec.name for spec in dataclasses.fields(RequestRecord) if spec.name != "text"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of the server's gauges and of counters that matter over time, in the middle of a run."""

    at_s: float
    figures: Figures


@dataclass(frozen=True, slots=True)
class Run:
    """One load, once, on one server. Runs with equal (load, rate, repeat) sent the same prompts."""

    load: str
    server: str
    rate: float | None  # requests per second; None in a closed loop
    repeat: int
    seed: int
    wall_s: float
    ideal_hit_rate: float
    ideal_by_group: dict[str, float]  # only where the load has groups that are worth telling apart
    records: tuple[RequestRecord, ...]
    counters: Figures = field(default_factory=dict)  # growth in the run; empty without /metrics
    samples: tuple[Sample, ...] = ()

    @property
    def served(self) -> list[RequestRecord]:
        return [record for record in self.records if record.error is None]

    @property
    def failed(self) -> list[RequestRecord]:
        return [record for record in self.records if record.error is not None]


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server of the plan, and how it really ran."""

    label: str
    command: str
    version: str = ""
    skipped: str = ""  # why, if it did not run


@dataclass(frozen=True, slots=True)
class TtftResult:
    """Medians of one request at a time: a cold prompt of n tokens, and one that shares its first p. Seconds."""

    n: int
    p: int
    repeats: int
    cold_s: float
    hit_s: float
    cached_tokens: float
    floor: float  # F(n, p) / F(n, 0)
    # in the steps that computed the prompt, and within the server; None where it does not tell
    cold_step_s: float | None = None
    hit_step_s: float | None = None
    hit_server_s: float | None = None

    @property
    def ratio(self) -> float:
        return self.hit_s / self.cold_s

    @property
    def steps_over_floor(self) -> float | None:
        """What the ratio over the floor is of the engine's steps alone."""
        if self.hit_step_s is None or not self.cold_step_s:
            return None
        return self.hit_step_s / self.cold_step_s / self.floor


@dataclass(frozen=True, slots=True)
class Results:
    plan: Plan
    command: str  # as the experiment was started
    started_at: str
    took_s: float
    environment: dict[str, str]  # what, value: hardware and versions
    servers: tuple[ServerInfo, ...]
    runs: tuple[Run, ...]
    ttft: tuple[TtftResult, ...] = ()

    def runs_of(self, load: str, server: str, rate: float | None = None) -> list[Run]:
        """In order of repeat."""
        found = [run for run in self.runs if (run.load, run.server, run.rate) == (load, server, rate)]
        return sorted(found, key=lambda run: run.repeat)

    @property
    def labels(self) -> list[str]:
        """Servers that ran."""
        return [server.label for server in self.servers if not server.skipped]

    @property
    def num_planned_runs(self) -> int:
        """Of the servers that are there."""
        return len(self.labels) * sum(max(1, len(load.rates)) * load.repeats for load in self.plan.loads)

    @property
    def is_partial(self) -> bool:
        """Whether the experiment ended before all was measured."""
        ttft = self.plan.ttft
        num_pairs = len(ttft.pairs) if ttft is not None and ttft.server in self.labels else 0
        return len(self.runs) < self.num_planned_runs or len(self.ttft) < num_pairs

    @property
    def closed_loads(self) -> list[LoadPlan]:
        return [load for load in self.plan.loads if not load.rates]

    @property
    def open_loads(self) -> list[LoadPlan]:
        return [load for load in self.plan.loads if load.rates]


class ResultsFile:
    """results.json, written anew after every run, so that what was measured outlives whatever comes after it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._runs: list[str] = []  # as lines of the file, in the order of results.runs: each is made once

    @property
    def has_runs(self) -> bool:
        return bool(self._runs)

    def write(self, results: Results) -> None:
        """`results` must hold the runs of the call before, and maybe more. Times to 0.1 ms, a run to a line: a person can read it."""
        if not self._runs:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            for name in ("report.md", "report.html"):
                # of an experiment before, whose results go now
                (self._path.parent / name).unlink(missing_ok=True)
        self._runs += [_line(run) for run in results.runs[len(self._runs) :]]
        plain = _rounded(dataclasses.asdict(dataclasses.replace(results, runs=())))
        plain["plan"] = _without_defaults(plain["plan"])
        head = {"format": FORMAT, "record_fields": _RECORD_FIELDS}
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in {**head, **plain}.items() if name != "runs"]
        text = "{\n" + ",\n".join(lines) + ',\n"runs": [\n' + ",\n".join(self._runs) + "\n]\n}\n"
        whole = self._path.with_suffix(".json.part")
        whole.write_text(text, encoding="utf-8")
        os.replace(whole, self._path)  # never half a file


def _line(run: Run) -> str:
    # rates in full: rounded twice, an equal hit rate and ideal are shown as different
    plain = {**_rounded(dataclasses.asdict(run)), "ideal_hit_rate": run.ideal_hit_rate, "ideal_by_group": run.ideal_by_group}
    plain["records"] = [[record[name] for name in _RECORD_FIELDS] for record in plain["records"]]
    return json.dumps(plain, separators=(",", ":"))


def write_results(results: Results, path: Path) -> None:
    ResultsFile(path).write(results)


def read_results(path: Path) -> Results:
    """Raises ValueError for a file that is none of write_results, or of another format."""
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON: {error}") from None
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        raise ValueError(f"{path}: expected results of format {FORMAT}, got {plain.get('format') if isinstance(plain, dict) else plain!r}")
    try:
        return _results(plain)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected what an experiment writes; missing or wrong: {error}") from None


def _results(plain: dict[str, Any]) -> Results:
    return Results(
        parse_plan(plain["plan"]),
        plain["command"],
        plain["started_at"],
        plain["took_s"],
        plain["environment"],
        tuple(ServerInfo(**server) for server in plain["servers"]),
        tuple(_run(run, plain["record_fields"]) for run in plain["runs"]),
        tuple(TtftResult(**pair) for pair in plain["ttft"]),
    )


def _run(plain: dict[str, Any], names: list[str]) -> Run:
    records = [dict(zip(names, record)) for record in plain["records"]]
    plain["records"] = tuple(RequestRecord(**{**record, "token_times_s": tuple(record["token_times_s"])}) for record in records)
    plain["samples"] = tuple(Sample(**sample) for sample in plain["samples"])
    return Run(**plain)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


def _without_defaults(plan: dict[str, Any]) -> dict[str, Any]:
    """As it would stand in TOML, where what is not given is left out."""
    kept = {name: value for name, value in plan.items() if value is not None}
    for name in ("servers", "loads"):
        kept[name] = [{key: value for key, value in entry.items() if value not in (None, [], {})} for entry in kept[name]]
    return kept
