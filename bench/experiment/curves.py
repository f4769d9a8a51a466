"""The pictures of a report that are curves, or compare groups: distributions, the pool over time, goodput over rate, the floor of TTFT."""

from pathlib import Path
from typing import Any

from bench.experiment import figures as f
from bench.experiment.canvas import colours, legend_above, plain, pyplot, save, servers_in_order
from bench.experiment.lesson import GroupHits
from bench.experiment.results import Results, Run
from bench.experiment.style import BASELINE, FAINT, INK, PREFILL

Drawn = str | None
COLUMNS = 3


def _grid(num_panels: int, height_in: float, **options: Any) -> tuple[Any, list[Any]]:
    plt = pyplot()
    columns = min(COLUMNS, num_panels)
    rows = -(-num_panels // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(max(4.6, 3.73 * columns), height_in * rows + 0.35), squeeze=False, **options)
    flat = [one for row in axes for one in row]
    for one in flat[num_panels:]:
        one.set_visible(False)
    return figure, flat[:num_panels]


def ttft_distribution(results: Results, folder: Path) -> Drawn:
    """Share of requests whose first token came within a time; all repeats together."""
    loads = [load.label for load in results.closed_loads if any(f.ttfts(run) for run in results.runs if run.load == load.label)]
    if not loads:
        return None
    figure, panels = _grid(len(loads), 2.3, sharey=True)
    from matplotlib.ticker import LogLocator, NullLocator

    colour = colours(results)
    for axes, load in zip(panels, loads):
        for server in reversed(servers_in_order(results)):
            times = sorted(ttft * 1e3 for run in results.runs_of(load, server) for ttft in f.ttfts(run))
            if times:
                shares = [(index + 1) / len(times) * 100 for index in range(len(times))]
                axes.step([times[0], *times], [0.0, *shares], where="post", color=colour[server], linewidth=1.8, label=server)
        axes.set_title(load)
        axes.set_xscale("log")
        axes.set_ylim(0, 101)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(plain)
    for axes in panels[-COLUMNS:]:
        axes.set_xlabel("time to first token, ms")
    for axes in panels[::COLUMNS]:
        axes.set_ylabel("% of requests")
    legend_above(figure, panels[0])
    save(figure, folder / "ttft_distribution.png")
    return "ttft_distribution.png"


def pool_over_time(results: Results, folder: Path) -> Drawn:
    """What the pool held in the first repeat of each load; the baseline's use as a line."""
    others = [label for label in results.labels if label != results.plan.baseline]
    shown = [
        runs[0]
        for server in others
        for load in results.plan.loads
        for rate in (load.rates[-1:] or (None,))
        if (runs := results.runs_of(load.label, server, rate)) and len(f.pool_samples(runs[0])) > 1
    ]
    if not shown:
        return None
    figure, panels = _grid(len(shown), 2.3)
    for axes, run in zip(panels, shown):
        _draw_pool(axes, run, next(iter(results.runs_of(run.load, results.plan.baseline, run.rate)), None))
        title = run.load if run.rate is None else f"{run.load}, {run.rate:g}/s"
        axes.set_title(title if len(others) == 1 else f"{title} ({run.server})")
    for axes in panels[-COLUMNS:]:
        axes.set_xlabel("s since the start of the run")
    for axes in panels[::COLUMNS]:
        axes.set_ylabel("% of the pool")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels))
    save(figure, folder / "pool.png")
    return "pool.png"


def _draw_pool(axes: Any, run: Run, baseline: Run | None) -> None:
    samples = f.pool_samples(run)
    times = [at_s for at_s, _, _ in samples]
    used, cached = ([sample[index] * 100 for sample in samples] for index in (1, 2))
    axes.stackplot(times, used, cached, colors=(PREFILL, "#bcd6ea"), labels=(f"{run.server}: running requests", f"{run.server}: cached"))
    theirs = f.pool_samples(baseline) if baseline else []
    if len(theirs) > 1:
        axes.plot(
            [one[0] for one in theirs], [one[1] * 100 for one in theirs], color=INK, linewidth=1.1, label="baseline: running requests"
        )
    axes.set_ylim(0, 104)
    axes.set_xlim(left=0)


def goodput(results: Results, folder: Path) -> Drawn:
    """For each open load: the share of good requests, and good requests per second, against what was offered."""
    loads = results.open_loads
    if not loads:
        return None
    plt = pyplot()
    figure, axes = plt.subplots(len(loads), 2, figsize=(9.4, 2.7 * len(loads) + 0.35), squeeze=False)
    limits, colour = results.plan.limits, colours(results)
    for (share_axes, rate_axes), load in zip(axes, loads):
        for server in reversed(servers_in_order(results)):
            runs = {rate: results.runs_of(load.label, server, rate) for rate in sorted(load.rates)}
            _draw_curve(
                share_axes, {rate: [f.good_share(run, limits) * 100 for run in each] for rate, each in runs.items()}, colour[server], server
            )
            _draw_curve(rate_axes, {rate: [f.goodput(run, limits) for run in each] for rate, each in runs.items()}, colour[server], server)
        share_axes.axhline(limits.share * 100, color=FAINT, linestyle=":", linewidth=1.2)
        share_axes.set_ylim(-3, 104)
        share_axes.set_title(f"{load.label}: % of requests within both limits")
        rate_axes.plot([0, max(load.rates)], [0, max(load.rates)], color=FAINT, linestyle=":", linewidth=1.2)
        rate_axes.set_title(f"{load.label}: good requests per second")
        for one in (share_axes, rate_axes):
            one.set_xlim(left=0)
            one.set_xlabel("requests per second offered")
        rate_axes.set_ylim(bottom=0)
    legend_above(figure, axes[0][0])
    save(figure, folder / "goodput.png")
    return "goodput.png"


def _draw_curve(axes: Any, values: dict[float, list[float]], colour: str, name: str) -> None:
    spreads = [(rate, spread) for rate, each in values.items() if (spread := f.over_repeats(each)) is not None]
    rates = [rate for rate, _ in spreads]
    axes.plot(rates, [spread.median for _, spread in spreads], "o-", color=colour, label=name, markersize=4.5, linewidth=1.8)
    axes.fill_between(
        rates, [spread.low for _, spread in spreads], [spread.high for _, spread in spreads], color=colour, alpha=0.18, linewidth=0
    )


def ttft_floor(results: Results, folder: Path) -> Drawn:
    """Hit over cold, beside the floor that the arithmetic sets."""
    if not results.ttft:
        return None
    plt = pyplot()
    names = [f"{pair.p:,} of {pair.n:,}" for pair in results.ttft]
    figure, axes = plt.subplots(figsize=(6.4, 1.1 + 0.5 * len(names)))
    for at, pair in enumerate(results.ttft):
        axes.barh(at, pair.ratio * 100, 0.55, color=PREFILL, label="measured" if at == 0 else None)
        axes.plot(
            [pair.floor * 100] * 2, [at - 0.36, at + 0.36], color=INK, linewidth=2, label="floor F(n, p) / F(n, 0)" if at == 0 else None
        )
        note = f"{pair.ratio:.1%}, floor {pair.floor:.1%}"
        axes.annotate(note, (max(pair.ratio, pair.floor) * 100, at), (6, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_title("TTFT of a hit, % of the same prompt cold")
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.35)
    axes.set_xlim(left=0)
    axes.legend(loc="lower right")
    save(figure, folder / "ttft_floor.png")
    return "ttft_floor.png"


def perturbed(groups: list[GroupHits], folder: Path) -> Drawn:
    """Each kind of change as two bars: at the front, and at the end."""
    if not groups:
        return None
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.2, 1.0 + 0.62 * len(groups)))
    for at, group in enumerate(groups):
        for offset, rate, colour, where in (
            (-0.19, group.front, BASELINE, "changed at the front"),
            (0.19, group.end, PREFILL, "changed at the end"),
        ):
            if rate is not None:
                axes.barh(at + offset, rate * 100, 0.34, color=colour, label=where if at == 0 else None)
                axes.annotate(f"{rate:.1%}", (rate * 100, at + offset), (5, 0), textcoords="offset points", va="center", fontsize=8.5)
        axes.plot(
            [group.shareable * 100] * 2, [at - 0.42, at + 0.42], color=INK, linewidth=1.6, label="ideal for the end" if at == 0 else None
        )
    axes.set_yticks(range(len(groups)), [group.change for group in groups])
    axes.invert_yaxis()
    axes.set_xlim(0, 112)
    axes.grid(axis="y", visible=False)
    axes.set_title("Prompt tokens re-used, %")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    save(figure, folder / "perturbed.png")
    return "perturbed.png"
