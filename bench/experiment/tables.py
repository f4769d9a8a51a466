"""Typed values out of TOML tables: a wrong type, a value out of range, a key that nobody asked for are errors that name their place."""

import difflib
import re
from collections.abc import Sequence
from typing import Any, NoReturn, overload


class PlanError(ValueError):
    """The plan cannot be run as it is written; the message says where, what was expected and what was found."""


_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", list: "a list", dict: "a table"}


class Table:
    """One table of a plan and its place in it ("" is the top)."""

    def __init__(self, place: str, values: dict[str, Any]) -> None:
        self._place = place
        self._values = values
        self._asked: list[str] = []

    def fail(self, name: str, expected: str, got: object) -> NoReturn:
        raise PlanError(f"{self._at(name)}: expected {expected}, got {got!r}")

    def finish(self) -> None:
        """To be called when all known keys were asked for. Raises PlanError for any other."""
        for name in self._values:
            if name not in self._asked:
                near = difflib.get_close_matches(name, self._asked, 1)
                hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(self._asked))}"
                raise PlanError(f"{self._at(name)}: unknown key{hint}")

    @overload
    def integer(self, name: str, default: int, *, at_least: int) -> int: ...
    @overload
    def integer(self, name: str, default: None, *, at_least: int) -> int | None: ...
    def integer(self, name: str, default: int | None, *, at_least: int) -> int | None:
        value = self._take(name, int, default)
        if value is not None and value < at_least:
            self.fail(name, f"at least {at_least}", value)
        return None if value is None else int(value)

    def number(self, name: str, default: float, *, above: float, at_most: float = float("inf")) -> float:
        return self._in_range(name, self._take(name, float, default), above, at_most)

    def numbers(self, name: str, *, above: float) -> tuple[float, ...]:
        return tuple(self._in_range(name, value, above, float("inf")) for value in self._items(name, float))

    def text(self, name: str, default: str | None = None, *, one_of: Sequence[str] = ()) -> str:
        """Without a default the key must be there."""
        value = str(self._take(name, str, default, is_needed=default is None))
        if one_of and value not in one_of:
            self.fail(name, f"one of {', '.join(one_of)}", value)
        return value

    def label(self, name: str, default: str | None = None) -> str:
        """A text that can be part of a file's name."""
        value = self.text(name, default)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 ._+-]*", value):
            self.fail(name, "letters, digits, blanks and . _ + -, beginning with a letter or digit", value)
        return value

    def path(self, name: str, default: str, *, may_be_empty: bool = False) -> str:
        value = self.text(name, default)
        if not value.startswith("/") and not (may_be_empty and value == ""):
            self.fail(name, "a path that begins with /", value)
        return value

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._take(name, bool, default))

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(self._items(name, str))

    def texts_by_name(self, name: str) -> dict[str, str]:
        values = self.anything(name)
        for key, value in values.items():
            if not isinstance(value, str):
                self.fail(f"{name}.{key}", "a text", value)
        return values

    def pairs(self, name: str) -> tuple[tuple[int, int], ...]:
        pairs = self._items(name, list)
        for pair in pairs:
            if len(pair) != 2 or not all(_is_a(value, int) for value in pair):
                self.fail(name, "pairs of whole numbers", pair)
        if not pairs:
            self.fail(name, "at least one pair", pairs)
        return tuple((first, second) for first, second in pairs)

    def anything(self, name: str) -> dict[str, Any]:
        """A table whose keys belong to somebody else."""
        return dict(self._take(name, dict, {}))

    def table(self, name: str) -> "Table | None":
        values = self._take(name, dict, None)
        return None if values is None else Table(self._at(name), values)

    def tables(self, name: str) -> list["Table"]:
        return [Table(f"{self._at(name)}[{index}]", values) for index, values in enumerate(self._items(name, dict))]

    def _items(self, name: str, kind: type) -> list[Any]:
        values = self._take(name, list, [])
        for value in values:
            if not _is_a(value, kind):
                self.fail(name, f"a list with {_NAMES[kind]} in each place", value)
        return list(values)

    def _in_range(self, name: str, value: float, above: float, at_most: float) -> float:
        if not above < value <= at_most:  # refuses nan too
            self.fail(name, f"above {above:g}" + (f" and at most {at_most:g}" if at_most < float("inf") else ""), value)
        return float(value)

    def _take(self, name: str, kind: type, default: Any, *, is_needed: bool = False) -> Any:
        self._asked.append(name)
        if name not in self._values:
            if is_needed:
                raise PlanError(f"{self._at(name)}: expected {_NAMES[kind]}, got nothing")
            return default
        value = self._values[name]
        if not _is_a(value, kind):
            self.fail(name, _NAMES[kind], value)
        return value

    def _at(self, name: str) -> str:
        return ".".join(part for part in (self._place, name) if part) or "plan"


def _is_a(value: object, kind: type) -> bool:
    # true is an int to Python, and 3 a fine number
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)
