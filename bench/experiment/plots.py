"""The pictures of a report that are bars. Each function draws one PNG into `folder` and returns its name; None if there is nothing to "
"show."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.experiment import figures as f
from bench.experiment.canvas import colours, grouped_bars, legend_above, pyplot, save, servers_in_order
from bench.experiment.results import Results, Run
from bench.experiment.style import BOOKKEEPING, DECODE, FAINT, IDLE, INK, PREFILL

ROW_IN = 0.36  # inches of height per bar
Drawn = str | None
Panel = tuple[str, Callable[[Run], float | None], float, Callable[[float], str]]  # title, figure of a run, factor, how it is written


def _height(num_rows: int, num_series: int) -> float:
    return 0.9 + num_rows * (0.16 + ROW_IN * max(1.0, num_series * 0.6))


def _closed(results: Results) -> list[str]:
    """Those of which something was measured."""
    return [load.label for load in results.closed_loads if any(run.load == load.label for run in results.runs)]


def _others(results: Results) -> list[str]:
    return [label for label in servers_in_order(results) if label != results.plan.baseline]


def _bar(
    results: Results, figure_of: Callable[[Run], float | None], scale: float = 1.0
) -> Callable[[str, str], tuple[float, float, float] | None]:
    def value(load: str, server: str) -> tuple[float, float, float] | None:
        spread = f.over_repeats([figure_of(run) for run in results.runs_of(load, server)])
        return None if spread is None else (spread.median * scale, spread.low * scale, spread.high * scale)

    return value


def overview(results: Results, folder: Path) -> Drawn:
    """What one looks at first: how many times faster, how much was re-used, where the time went."""
    loads = [load for load in _closed(results) if results.runs_of(load, results.plan.baseline)]
    if not loads:
        return None
    plt = pyplot()
    height = max(2.2, _height(len(loads), len(results.labels)))
    figure, (ratio, hits, time) = plt.subplots(1, 3, figsize=(11.2, height), sharey=True, width_ratios=(1, 1, 1.15))
    _draw_ratios(ratio, results, loads)
    _draw_hits(hits, results, loads)
    _draw_time(time, results, loads)
    save(figure, folder / "overview.png")
    return "overview.png"


def _draw_ratios(axes: Any, results: Results, loads: list[str]) -> None:
    colour, others = colours(results), _others(results)
    step = 0.6 / max(1, len(others))
    for at, load in enumerate(loads):
        for index, server in enumerate(others):
            place, pairs = at - 0.3 + (index + 0.5) * step, f.pairs(results, load, server)
            spread = f.over_repeats([pair.time_ratio for pair in pairs])
            if spread is None:
                continue
            named = axes.get_legend_handles_labels()[1]
            axes.barh(place, spread.median, step * 0.8, color=colour[server], alpha=0.85, label=None if server in named else server)
            axes.plot(spread.values, [place] * len(spread.values), "o", color=INK, markersize=3.2)
            bound = f.over_repeats([pair.bound for pair in pairs])
            if bound is not None:
                axes.plot([bound.median] * 2, [place - step * 0.48, place + step * 0.48], color=BOOKKEEPING, linewidth=2)
            edge = max(spread.high, bound.median if bound else 0.0)
            axes.annotate(
                f"{spread.median:.2f}x", (edge, place), (5, 0), textcoords="offset points", va="center", fontsize=9, weight="bold"
            )
    axes.axvline(1.0, color=FAINT, linewidth=1, linestyle=":")
    axes.set_title(f"Times faster than {results.plan.baseline}")
    has_bound = any(pair.bound is not None for load in loads for server in others for pair in f.pairs(results, load, server))
    axes.set_xlabel("dots: pairs; red: bound 1 / (1 - h f)" if has_bound else "dots: pairs")
    handles, names = axes.get_legend_handles_labels()
    if len(names) > 1:
        axes.figure.legend(handles, names, loc="outside lower left", ncols=len(names), columnspacing=0.9, handlelength=1)
    axes.set_yticks(range(len(loads)), loads)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.2)
    axes.set_xlim(left=0)


def _draw_hits(axes: Any, results: Results, loads: list[str]) -> None:
    colour, others = colours(results), _others(results)
    step = 0.6 / max(1, len(others))
    for at, load in enumerate(loads):
        for index, server in enumerate(others):
            place, runs = at - 0.3 + (index + 0.5) * step, results.runs_of(load, server)
            spread = f.over_repeats([rates.token_rate if (rates := f.hit_rates(run.records)) else None for run in runs])
            ideal = f.over_repeats([run.ideal_hit_rate for run in runs])
            if ideal is not None:
                axes.barh(place, ideal.median * 100, step * 0.8, color="none", edgecolor=INK, linewidth=1)
            if spread is None:
                axes.text(2, place, "not told", va="center", color=FAINT, fontsize=8)
                continue
            axes.barh(place, spread.median * 100, step * 0.8, color=colour[server], alpha=0.85)
            edge = max(spread.median, ideal.median if ideal else 0.0) * 100
            axes.annotate(f"{spread.median:.1%}", (edge, place), (5, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_title("Prompt tokens re-used, %")
    axes.set_xlabel("filled: measured; outline: ideal")
    axes.set_xlim(0, 128)
    axes.set_xticks(range(0, 101, 25))
    axes.grid(axis="y", visible=False)


def _draw_time(axes: Any, results: Results, loads: list[str]) -> None:
    servers = servers_in_order(results)
    step = 0.8 / max(1, len(servers))
    for at, load in enumerate(loads):
        whole_s = _mean_wall_s(results.runs_of(load, results.plan.baseline))
        for index, server in enumerate(servers):
            place, runs = at - 0.4 + (index + 0.5) * step, results.runs_of(load, server)
            if not whole_s or not runs:
                continue
            _draw_split(axes, place, step * 0.84, runs, whole_s)
            axes.text(0.8, place, server, va="center", fontsize=7.5, color="white")
    for colour, name in ((PREFILL, "prefill"), (DECODE, "decode"), (BOOKKEEPING, "tree, scheduler"), (IDLE, "no step")):
        axes.barh([0], [0], color=colour, label=name)
    axes.set_title(f"Where the time went, % of {results.plan.baseline}")
    handles, names = axes.get_legend_handles_labels()
    axes.figure.legend(handles, names, loc="outside lower right", ncols=4, columnspacing=0.9, handlelength=1)
    axes.set_xlim(left=0)
    axes.grid(axis="y", visible=False)


def _mean_wall_s(runs: Sequence[Run]) -> float:
    """Means, as in the splits, so that parts and whole belong together; 0 without runs."""
    return sum(run.wall_s for run in runs) / len(runs) if runs else 0.0


def _draw_split(axes: Any, place: float, height: float, runs: list[Run], whole_s: float) -> None:
    split = f.mean_split(runs)
    if split is None:
        axes.barh(place, _mean_wall_s(runs) / whole_s * 100, height, color=FAINT)
        return
    left = 0.0
    for name, colour in (("prefill", PREFILL), ("decode", DECODE), ("bookkeeping", BOOKKEEPING), ("idle", IDLE)):
        part = getattr(split, name) / whole_s * 100
        axes.barh(place, part, height, left=left, color=colour)
        left += part


def _bars(results: Results, folder: Path, file: str, panels: Sequence[Panel]) -> Drawn:
    """Panels side by side over the closed loads; a panel that no run has figures for is left out."""
    loads, servers = _closed(results), servers_in_order(results)
    told = [panel for panel in panels if any(panel[1](run) is not None for run in results.runs if run.rate is None)]
    if not loads or not told:
        return None
    plt = pyplot()
    size = (min(11.2, 3.4 + 3.9 * len(told)), 0.4 + _height(len(loads), len(servers)))
    figure, axes = plt.subplots(1, len(told), figsize=size, sharey=True, squeeze=False)
    for one, (title, figure_of, scale, show) in zip(axes[0], told):
        grouped_bars(one, loads, servers, _bar(results, figure_of, scale), colours(results), show)
        one.set_title(title)
        if one is not axes[0][0]:
            one.invert_yaxis()  # shared: undo the second turn
    axes[0][0].set_ylim(len(loads) - 0.5, -0.5)
    legend_above(figure, axes[0][0])
    save(figure, folder / file)
    return file


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def prefilled(results: Results, folder: Path) -> Drawn:
    return _bars(results, folder, "prefilled.png", [("Prompt tokens computed in a run", f.prefilled_tokens, 1.0, _whole)])


def ttft(results: Results, folder: Path) -> Drawn:
    panels = [(f"TTFT {name}, ms", f.ttft_quantile(name), 1e3, _whole) for name in ("p50", "p95", "p99")]
    return _bars(results, folder, "ttft.png", panels)


def token_latency(results: Results, folder: Path) -> Drawn:
    panels = [(f"Inter-token latency {name}, ms", f.gap_quantile(name), 1e3, _short) for name in ("p50", "p95", "p99")]
    return _bars(results, folder, "itl.png", panels)


def throughput(results: Results, folder: Path) -> Drawn:
    panels: list[Panel] = [
        ("Output tokens per second", f.output_rate, 1.0, _short),
        ("Requests per second", f.request_rate, 1.0, lambda value: f"{value:.2f}"),
        ("Mean time in the queue, ms", f.queue_mean_s, 1e3, _whole),
    ]
    return _bars(results, folder, "throughput.png", panels)


def pressure(results: Results, folder: Path) -> Drawn:
    """A panel for each that happened."""
    panels: list[Panel] = [("Tokens evicted", f.evicted, 1.0, _whole), ("Requests put back to wait", f.retracted, 1.0, _whole)]
    closed = [run for run in results.runs if run.rate is None]
    return _bars(results, folder, "pressure.png", [panel for panel in panels if any(panel[1](run) for run in closed)])
