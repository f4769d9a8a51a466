"""Checks that go on whatever happens: each in its own try, one JSON line per result, a table last, an exit code by correctness."""

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    is_right: bool | None  # None: a timing
    figures: dict[str, Any]
    at_s: float


@dataclass(slots=True)
class Report:
    """budget_s: no check begins after it."""

    budget_s: float
    results: list[Result] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)

    def say(self, name: str, is_right: bool | None = None, **figures: Any) -> None:
        result = Result(name, is_right, figures, time.monotonic() - self.start)
        self.results.append(result)
        verdict = {} if is_right is None else {"ok": is_right}
        print(json.dumps({"t": round(result.at_s, 1), "check": name, **verdict, **_rounded(figures)}), flush=True)

    def attempt(self, name: str, check: Callable[["Report"], None], *, decides: bool) -> None:
        """Run it unless the time is up. decides: an exception in it counts as a wrong result."""
        if time.monotonic() - self.start > self.budget_s:
            self.skipped.append(name)
            print(json.dumps({"check": name, "skipped": f"{self.budget_s:.0f} s are over"}), flush=True)
            return
        try:
            check(self)
        except Exception as error:  # the next check may do well
            traceback.print_exc()
            lines = str(error).strip().splitlines()
            self.say(name, False if decides else None, error=f"{type(error).__name__}: {lines[0][:200] if lines else ''}")

    @property
    def num_right(self) -> int:
        return sum(result.is_right is True for result in self.results)

    @property
    def num_wrong(self) -> int:
        return sum(result.is_right is False for result in self.results)

    def table(self) -> str:
        lines = []
        for result in self.results:
            verdict = {True: "ok", False: "WRONG", None: ""}[result.is_right]
            figures = ", ".join(f"{key} {value}" for key, value in _rounded(result.figures).items())
            lines.append(f"{result.at_s:6.1f} s  {result.name:34} {verdict:6} {figures}")
        lines += [f"          {name:34} skipped" for name in self.skipped]
        return "\n".join([*lines, f"{self.num_right} right, {self.num_wrong} wrong, {len(self.skipped)} skipped"])


def _rounded(figures: dict[str, Any]) -> dict[str, Any]:
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in figures.items()}
