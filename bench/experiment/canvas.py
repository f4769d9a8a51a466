"""Matplotlib as the reports use it: no window, one look, small files. Only here and in plots.py is it imported; serving never needs it."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.experiment.results import Results
from bench.experiment.style import BASELINE, FAINT, GRID, INK, OTHERS


class PlotsUnavailableError(Exception):
    """matplotlib is not installed."""


def pyplot() -> Any:
    """Raises PlotsUnavailableError with what to install."""
    try:
        import matplotlib
    except ImportError:
        raise PlotsUnavailableError("plots need matplotlib: pip install 'radixserve[bench]', or `make install`") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {
            "font.family": "sans-serif",
            "font.size": 9.5,
            "axes.titlesize": 10.5,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": FAINT,
            "ytick.left": False,
            "axes.labelcolor": INK,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": GRID,
            "text.color": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "legend.frameon": False,
            "legend.fontsize": 9,
            "figure.constrained_layout.use": True,
        }
    )
    return pyplot


def save(figure: Any, path: Path) -> None:
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110)
    pyplot().close(figure)
    # few colours, and no version of matplotlib inside: a third of the size, and equal figures make equal files
    Image.open(drawn).convert("RGB").quantize(96, dither=Image.Dither.NONE).save(path, optimize=True)


def colours(results: Results) -> dict[str, str]:
    """By server label: grey for the baseline, so that it reads as the ground that the others stand on."""
    others = [label for label in results.labels if label != results.plan.baseline]
    return {results.plan.baseline: BASELINE, **{label: OTHERS[index % len(OTHERS)] for index, label in enumerate(others)}}


def servers_in_order(results: Results) -> list[str]:
    """The baseline last."""
    return sorted(results.labels, key=lambda label: label == results.plan.baseline)


def grouped_bars(
    axes: Any,
    rows: Sequence[str],
    series: Sequence[str],
    value: Callable[[str, str], tuple[float, float, float] | None],
    colour: dict[str, str],
    show: Callable[[float], str],
) -> None:
    """Horizontal bars: for each row one bar per series. `value` gives median, least, greatest; None is drawn as nothing, and said."""
    height = 0.8 / max(1, len(series))
    for index, name in enumerate(series):
        for at, row in enumerate(rows):
            place, found = at - 0.4 + (index + 0.5) * height, value(row, name)
            if found is None:
                axes.text(0, place, " not told", va="center", color=FAINT, fontsize=8)
                continue
            median, low, high = found
            axes.barh(place, median, height * 0.86, color=colour[name], label=name if at == 0 else None)
            if high > 1.02 * low:
                axes.plot([low, high], [place, place], color=INK, linewidth=1.1, solid_capstyle="butt")
            axes.annotate(show(median), (max(median, high), place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.2)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(plain)
    axes.locator_params(axis="x", nbins=5)


def plain(value: float, _: object = None) -> str:
    """A tick: 12,000 and 0.5."""
    return f"{value:,.0f}" if value >= 1 or value == 0 else f"{value:g}"


def legend_above(figure: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=max(1, len(labels)))
