"""Results in, a folder out: plots, report.md, report.html."""

from pathlib import Path

from bench.experiment import curves, plots, sections, speed, trust
from bench.experiment.findings import subject
from bench.experiment.lesson import perturbed_groups
from bench.experiment.page import Block, to_html, to_markdown
from bench.experiment.results import Results


def draw(results: Results, folder: Path) -> sections.Pictures:
    """All plots that these results have something for. Raises PlotsUnavailableError."""
    server = subject(results)
    return {
        "overview": plots.overview(results, folder),
        "prefilled": plots.prefilled(results, folder),
        "ttft": plots.ttft(results, folder),
        "token_latency": plots.token_latency(results, folder),
        "throughput": plots.throughput(results, folder),
        "pressure": plots.pressure(results, folder),
        "ttft_distribution": curves.ttft_distribution(results, folder),
        "pool_over_time": curves.pool_over_time(results, folder),
        "goodput": curves.goodput(results, folder),
        "ttft_floor": curves.ttft_floor(results, folder),
        "perturbed": curves.perturbed(perturbed_groups(results, server) if server else [], folder),
    }


def blocks_of(results: Results, pictures: sections.Pictures) -> list[Block]:
    return [
        *sections.first_screen(results, pictures),
        *sections.attribution(results, pictures),
        *sections.reuse(results, pictures),
        *sections.lesson(results, pictures),
        *speed.latency(results, pictures),
        *speed.throughput(results, pictures),
        *speed.goodput(results, pictures),
        *speed.pool(results, pictures),
        *trust.checks(results),
        *trust.method(results),
    ]


def write_report(results: Results, folder: Path) -> None:
    """report.md, report.html and the PNGs into `folder`. Raises PlotsUnavailableError."""
    blocks = blocks_of(results, draw(results, folder))
    (folder / "report.md").write_text(to_markdown(blocks), encoding="utf-8")
    (folder / "report.html").write_text(to_html(blocks, results.plan.title, folder), encoding="utf-8")
