"""What an experiment is: servers, loads, limits, read from a TOML file. A mistake in the file is told by its place, with expected and got.

Knows nothing of processes or workloads; the options of a load are checked where the load is made.
"""

import dataclasses
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.experiment.tables import PlanError, Table
from bench.protocol import CHAT_ROUTE

ARRIVALS = ("poisson", "constant")


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """One server. Without `command` it is this project's, with the plan's flags and then its own.

    In `command`, {port} and {model_dir} are filled in, and ${NAME} or ${NAME:-otherwise} from the environment; in `env` too, but for the
    port. Where a program or a variable is not there the server is skipped by name. `flush` is the path to POST between two runs, "" where
    there is none (prompts differ by seed anyway).
    """

    label: str
    flags: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    health: str = "/health"
    flush: str = "/flush_cache"
    model: str = "default"
    path: str = "/v1/completions"
    send_text: bool = False
    extra: dict[str, Any] = field(default_factory=dict)  # merged into each request
    drop: tuple[str, ...] = ()  # fields that its requests must not have
    start_timeout_s: float = 600.0
    about: str = ""

    @property
    def is_peer(self) -> bool:
        return bool(self.command)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One load: a workload with its options, as a closed loop (`concurrency`) or as an open one (`rates`, requests per second)."""

    label: str
    workload: str
    options: dict[str, Any] = field(default_factory=dict)
    concurrency: int | None = None
    rates: tuple[float, ...] = ()
    arrivals: str = "poisson"
    repeats: int = 3
    about: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must meet to count as good: both times; `share` of the requests for a rate to count as sustained."""

    ttft_ms: float = 1000.0
    tpot_ms: float = 100.0
    share: float = 0.9


@dataclass(frozen=True, slots=True)
class TtftPlan:
    """One request at a time on `server`: prompts of n tokens, cold, and then with the first p re-used."""

    server: str
    pairs: tuple[tuple[int, int], ...]
    repeats: int = 5


@dataclass(frozen=True, slots=True)
class Plan:
    title: str
    servers: tuple[ServerPlan, ...]
    loads: tuple[LoadPlan, ...]
    baseline: str  # label of the server that the others are compared with
    headline: str  # label of the load whose figures stand first; chosen beforehand, so that nobody picks the best
    about: str = ""
    seed: int = 1
    flags: tuple[str, ...] = ()  # of every server of this project
    model_dir: str = ""  # a Hugging Face directory; "" is the default model
    sample_interval_s: float = 0.5  # between two readings of /metrics in a run
    limits: Limits = Limits()
    ttft: TtftPlan | None = None

    def server(self, label: str) -> ServerPlan:
        return next(server for server in self.servers if server.label == label)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def load_plan(path: Path) -> Plan:
    """Raises PlanError, with the place in the file, for anything that is not understood."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: expected UTF-8: {error}") from None
    try:
        return parse_plan(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{path}: not TOML: {error}") from None
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


def parse_plan(document: dict[str, Any]) -> Plan:
    """From what TOML or results.json hold. Raises PlanError."""
    table = Table("", document)
    repeats = table.integer("repeats", 3, at_least=1)
    servers = tuple(_server(entry) for entry in table.tables("servers"))
    loads = tuple(_load(entry, repeats) for entry in table.tables("loads"))
    plan = Plan(
        title=table.text("title"),
        about=table.text("about", ""),
        servers=servers,
        loads=loads,
        baseline=table.text("baseline", servers[-1].label if servers else ""),
        headline=table.text("headline", loads[0].label if loads else ""),
        seed=table.integer("seed", 1, at_least=0),
        flags=table.texts("flags"),
        model_dir=table.text("model_dir", ""),
        sample_interval_s=table.number("sample_interval_s", 0.5, above=0),
        limits=_limits(table.table("limits")),
        ttft=_ttft(table.table("ttft")),
    )
    table.finish()
    _check(plan)
    return plan


def _server(table: Table) -> ServerPlan:
    server = ServerPlan(
        label=table.label("label"),
        flags=table.texts("flags"),
        command=table.texts("command"),
        env=table.texts_by_name("env"),
        health=table.path("health", "/health"),
        flush=table.path("flush", "/flush_cache", may_be_empty=True),
        model=table.text("model", "default"),
        path=table.path("path", "/v1/completions"),
        send_text=table.flag("send_text", False),
        extra=table.anything("extra"),
        drop=table.texts("drop"),
        start_timeout_s=table.number("start_timeout_s", 600.0, above=0),
        about=table.text("about", ""),
    )
    if server.command and server.flags:
        table.fail("flags", "no flags beside a command: write them into it", list(server.flags))
    if server.path.endswith(CHAT_ROUTE):
        table.fail("path", "a completions route (of a chat no ideal is known; bench.serving has chats)", server.path)
    table.finish()
    return server


def _load(table: Table, repeats: int) -> LoadPlan:
    workload = table.text("workload")
    load = LoadPlan(
        label=table.label("label", workload),
        workload=workload,
        options=table.anything("options"),
        concurrency=table.integer("concurrency", None, at_least=1),
        rates=table.numbers("rates", above=0),
        arrivals=table.text("arrivals", "poisson", one_of=ARRIVALS),
        repeats=table.integer("repeats", repeats, at_least=1),
        about=table.text("about", ""),
    )
    if (load.concurrency is None) == (not load.rates):
        table.fail("", "either concurrency (closed loop) or rates (open loop)", "both" if load.rates else "neither")
    if load.concurrency is not None and load.arrivals != "poisson":
        table.fail("arrivals", "none in a closed loop, which has no arrival times", load.arrivals)
    table.finish()
    return load


def _limits(table: Table | None) -> Limits:
    if table is None:
        return Limits()
    limits = Limits(
        table.number("ttft_ms", 1000.0, above=0), table.number("tpot_ms", 100.0, above=0), table.number("share", 0.9, above=0, at_most=1)
    )
    table.finish()
    return limits


def _ttft(table: Table | None) -> TtftPlan | None:
    if table is None:
        return None
    pairs = table.pairs("pairs")
    for n, p in pairs:
        if not 0 < p < n:
            table.fail("pairs", "pairs [n, p] with 0 < p < n", [n, p])
    plan = TtftPlan(table.text("server"), pairs, table.integer("repeats", 5, at_least=1))
    table.finish()
    return plan


def _check(plan: Plan) -> None:
    """What no table can know alone."""
    for what, labels in (("servers", [server.label for server in plan.servers]), ("loads", [load.label for load in plan.loads])):
        if not labels:
            raise PlanError(f"{what}: expected at least one [[{what}]], got none")
        if twice := next((label for label in labels if labels.count(label) > 1), None):
            raise PlanError(f"{what}: expected labels that differ, got {twice!r} twice")
    if plan.headline not in (loads := [load.label for load in plan.loads]):
        raise PlanError(f"headline: expected the label of a load ({', '.join(loads)}), got {plan.headline!r}")
    known = [server.label for server in plan.servers]
    named = {"baseline": plan.baseline, **({"ttft.server": plan.ttft.server} if plan.ttft else {})}
    for place, label in named.items():
        if label not in known:
            raise PlanError(f"{place}: expected the label of a server ({', '.join(known)}), got {label!r}")
    if plan.ttft and not plan.server(plan.ttft.server).flush:
        raise PlanError(f"ttft.server: expected a server that can flush, so that a prompt can be cold, got {plan.ttft.server!r} with none")
