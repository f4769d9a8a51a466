"""How figures are written in a report: one form for each kind, n/a for what nobody told."""

from bench.experiment.figures import Spread

NOT_TOLD = "n/a"


def percent(share: float | None, digits: int = 1) -> str:
    return NOT_TOLD if share is None else f"{share * 100:.{digits}f} %"


def ms(seconds: float | None) -> str:
    if seconds is None:
        return NOT_TOLD
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def seconds(value: float | None) -> str:
    return NOT_TOLD if value is None else f"{value:.2f} s"


def count(value: float | None) -> str:
    return NOT_TOLD if value is None else f"{value:,.0f}"


def times(value: float | None) -> str:
    return NOT_TOLD if value is None else f"{value:.2f}x"


def spread_of(spread: Spread | None, *, digits: int = 2, unit: str = "") -> str:
    """Median, and in brackets least to greatest: 3.41x (3.35 to 3.52)."""
    if spread is None:
        return NOT_TOLD
    median, low, high = (f"{value:,.{digits}f}" for value in (spread.median, spread.low, spread.high))
    return f"{median}{unit}" if low == high else f"{median}{unit} ({low} to {high})"


def scaled(spread: Spread | None, factor: float) -> Spread | None:
    if spread is None:
        return None
    return Spread(spread.median * factor, spread.low * factor, spread.high * factor, tuple(value * factor for value in spread.values))


def listed(words: list[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
