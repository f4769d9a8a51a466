"""Options of a workload: fields of a dataclass, each with a default, a sentence and a check; read from the command line or a plan."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def option(default: Any, about: str, *, at_least: float | None = None, at_most: float | None = None, choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field. Whole numbers must be at least 1 unless `at_least` says otherwise."""
    if type(default) is int and at_least is None:
        at_least = 1
    return dataclasses.field(default=default, metadata={"about": about, "at_least": at_least, "at_most": at_most, "choices": choices})


def with_options(name: str, preset: T, given: Mapping[str, object]) -> T:
    """`preset`, an instance of a dataclass of options, with the given ones in place of its own.

    Raises ValueError, with expected and got, for an option that there is not, of another type, or out of range.
    """
    specs = {spec.name: spec for spec in dataclasses.fields(preset)}  # type: ignore[arg-type]
    values = {}
    for key, value in given.items():
        if key not in specs:
            raise ValueError(f"workload {name}: expected an option of {', '.join(specs) or 'none'}, got {key!r}")
        values[key] = _checked(f"workload {name}: {key}", getattr(preset, key), value, specs[key].metadata)
    return dataclasses.replace(preset, **values)  # type: ignore[type-var]


def _checked(where: str, default: object, value: object, metadata: Mapping[str, Any]) -> object:
    if isinstance(default, float) and type(value) is int:
        value = float(value)
    if type(value) is not type(default):
        raise ValueError(f"{where}: expected {type(default).__name__}, got {value!r}")
    low, high, choices = metadata["at_least"], metadata["at_most"], metadata["choices"]
    if low is not None and value < low:
        raise ValueError(f"{where}: expected at least {low}, got {value!r}")
    if high is not None and value > high:
        raise ValueError(f"{where}: expected at most {high}, got {value!r}")
    if choices and value not in choices:
        raise ValueError(f"{where}: expected one of {', '.join(choices)}, got {value!r}")
    return value


def parse_option(text: str) -> tuple[str, object]:
    """name=value of the command line; a value that is no JSON is a string. Raises ValueError."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ValueError(f"expected name=value, got {text!r}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def describe_options(preset: object) -> Iterator[str]:
    """One line per option: name=default and what it means."""
    for spec in dataclasses.fields(preset):  # type: ignore[arg-type]
        choices = f" ({', '.join(spec.metadata['choices'])})" if spec.metadata["choices"] else ""
        yield f"{spec.name}={json.dumps(getattr(preset, spec.name))}  {spec.metadata['about']}{choices}"
