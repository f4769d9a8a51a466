"""What the perturbed loads teach: the same change at the front of a prompt and at its end. Compared change by change."""

from dataclasses import dataclass

from bench.experiment import figures as f
from bench.experiment.results import Results, Run
from bench.experiment.wording import percent

FRONT, END = "front", "end"


@dataclass(frozen=True, slots=True)
class GroupHits:
    """Token hit rates of one kind of change; None where the plan does not have that side, or nobody told."""

    change: str
    front: float | None
    end: float | None
    shareable: float  # ideal hit rate with the change at the end


def perturbed_groups(results: Results, server: str) -> list[GroupHits]:
    """Over all repeats, from groups named CHANGE/front and CHANGE/end in whatever load."""
    rates: dict[tuple[str, str], list[float]] = {}
    ideals: dict[str, float] = {}
    for load in results.closed_loads:
        for run in results.runs_of(load.label, server):
            for change, where, rate, ideal in _sides(run):
                rates.setdefault((change, where), []).append(rate)
                if where == END:
                    ideals[change] = ideal
    changes = sorted({change for change, _ in rates})
    return [
        GroupHits(change, _median(rates.get((change, FRONT))), _median(rates.get((change, END))), ideals.get(change, 0.0))
        for change in changes
    ]


def _sides(run: Run) -> list[tuple[str, str, float, float]]:
    found = []
    for group, ideal in run.ideal_by_group.items():
        change, _, where = group.rpartition("/")
        rates = f.hit_rates([record for record in run.records if record.group == group])
        if change and where in (FRONT, END) and rates is not None:
            found.append((change, where, rates.token_rate, ideal))
    return found


def _median(values: list[float] | None) -> float | None:
    spread = f.over_repeats(values or [])
    return None if spread is None else spread.median


def lesson_in_words(groups: list[GroupHits]) -> str:
    """Said from these figures alone; what they do not show is not said."""
    both = [group for group in groups if group.front is not None and group.end is not None]
    if not both:
        return ""
    fronts = [group.front for group in both if group.front is not None]
    ends = [group.end for group in both if group.end is not None]
    near_zero, near_ideal = max(fronts) < 0.05, all(end >= 0.95 * group.shareable for end, group in zip(ends, both))
    figures = (
        f"Changed at the front, {_range(fronts)} of the prompt tokens were re-used; with the same change moved to the end {_range(ends)}, "
        f"where the ideal is {_range([group.shareable for group in both])}."
    )
    if near_zero and near_ideal:
        return (
            f"**What changes belongs at the end of a prompt.** {figures} A prefix tree re-uses a beginning: one different token at the "
            "front, and all that follows is new, however equal it looks to a reader. Time stamps and ids go last, tool schemas and JSON "
            "keys keep one order, and blanks and Unicode forms are normalised before the prompt is built."
        )
    if near_zero:
        return f"{figures} That the end stays below its ideal is no matter of the prompts: see what was evicted."
    worst = max(both, key=lambda group: group.front or 0.0)
    return f"{figures} The figures differ by the kind of change: `{worst.change}` keeps {percent(worst.front)} even at the front."


def _range(rates: list[float]) -> str:
    low, high = f"{min(rates) * 100:.1f}", f"{max(rates) * 100:.1f}"
    return f"{low} %" if low == high else f"{low} to {high} %"
