"""The last sections of a report: whether it can be trusted, and how it was made."""

import shlex
from collections.abc import Sequence

from bench.experiment import figures as f
from bench.experiment.page import Block, Bullets, Code, Heading, Table, Text
from bench.experiment.results import Results
from bench.experiment.wording import NOT_TOLD, count, ms
from bench.report import LATE_S


def checks(results: Results) -> list[Block]:
    told = [agree for run in results.runs if (agree := f.counts_agree(run)) is not None]
    failed = [record for run in results.runs for record in run.failed]
    late = [record.late_s for run in results.runs if run.rate is not None for record in run.records if record.was_sent]
    items = [
        f"Cached tokens added up by the client equal what the server's counter gained in **{sum(told)} of {len(told)}** runs that tell "
        "both.",
        f"Failed requests: {count(len(failed))} of {count(sum(len(run.records) for run in results.runs))}"
        + (f" (the first: {failed[0].error})." if failed else "."),
    ]
    if late:
        lag = f.quantiles(late)
        assert lag is not None
        told_late = f"The generator sent open-loop requests {ms(lag.p50)} ms (p50) to {ms(max(late))} ms (most) after their time"
        items.append(
            f"{told_late}: **it was a bottleneck, so arrivals were not quite those asked for.**" if lag.p99 > LATE_S else f"{told_late}."
        )
    return [Heading("Can it be trusted?"), Bullets(tuple(items))]


def method(results: Results) -> list[Block]:
    plan = results.plan
    about = {server.label: f"; {server.about}" if server.about else "" for server in plan.servers}
    servers = tuple(
        (s.label, s.version or NOT_TOLD, f"skipped: {s.skipped}" if s.skipped else f"`{s.command}`{about.get(s.label, '')}")
        for s in results.servers
    )
    loads = tuple(
        (load.label, load.workload, _load_words(load.options, load.concurrency, load.rates, load.arrivals), load.about)
        for load in plan.loads
    )
    return [
        Heading("How it was made"),
        Code(results.command),
        Table(("what", "value"), tuple(results.environment.items()), num_word_columns=2),
        Table(("server", "version", "command"), servers, num_word_columns=3),
        Table(
            ("load", "workload", "options", "about"),
            loads,
            f"Seed {plan.seed}; it took {results.took_s / 60:.1f} minutes.",
            num_word_columns=4,
        ),
        Text(
            "All servers stay up; they run in turn, the order reversed from repeat to repeat, so a drift of the machine meets all of "
            "them. Each repeat has prompts of its own, the same for every server. `results.json` holds every request; `--report` makes "
            "this page again."
        ),
    ]


def _load_words(options: dict[str, object], concurrency: int | None, rates: tuple[float, ...], arrivals: str) -> str:
    mode = f"{concurrency} at a time" if concurrency else f"{arrivals} arrivals at {', '.join(f'{rate:g}' for rate in rates)}/s"
    return ", ".join([mode, *(f"{name} {value}" for name, value in options.items())])


def command_line(arguments: Sequence[str]) -> str:
    return shlex.join(["python", "-m", "bench.experiment", *arguments])
