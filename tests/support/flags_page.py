"""docs/flags.md, made from the config classes: `python -m tests.support.flags_page > docs/flags.md`."""

import dataclasses
import typing

from radixserve.cli import ENGINE_PARTS
from radixserve.config import ServerConfig, flag_of

HEAD = """# Flags

All flags of `radixserve serve`; `radixserve generate` takes all but those of the last table. From Python they are keywords of `LLM` and
fields of the config classes, with underscores. Made from `radixserve/config.py` by
`.venv/bin/python -m tests.support.flags_page > docs/flags.md`; a test holds the two together.
"""


def page() -> str:
    return HEAD + "".join(_table(config) for config in (*ENGINE_PARTS, ServerConfig))


def _table(config: type) -> str:
    lines = ["", f"## {config.__name__}: {(config.__doc__ or '').strip()}", "| flag | default | what it does |", "|---|---|---|"]
    for spec in dataclasses.fields(config):
        if "help" in spec.metadata:
            text = spec.metadata["help"].replace("|", "\\|")
            lines.append(f"| `{flag_of(spec.name)}{_value(config, spec)}` | {_default(spec.default)} | {text}{_choices(spec)} |")
    return "\n".join(lines) + "\n"


def _value(config: type, spec: "dataclasses.Field[typing.Any]") -> str:
    hint = typing.get_type_hints(config)[spec.name]
    if hint is bool:
        return ""
    kinds = typing.get_args(hint) or (hint,)
    return " N" if int in kinds else " X" if float in kinds else " TEXT" if not spec.metadata["choices"] else " NAME"


def _default(default: object) -> str:
    return "" if default is None or default is False or default == () else f"`{default}`"


def _choices(spec: "dataclasses.Field[typing.Any]") -> str:
    names = spec.metadata["choices"]
    return f" ({', '.join(f'`{name}`' for name in names)})" if names else ""


if __name__ == "__main__":
    print(page(), end="")
