"""Dependencies go down only: every import of radixserve/ is held against the table in docs/architecture.md.

Imports inside functions, under TYPE_CHECKING and by importlib with a literal name count as well. Nothing is imported: the source is read.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent / "radixserve"

# What each unit (a package or module right under radixserve/) may import beside itself. "" is radixserve/__init__.py.
BASE = {"core", "config", "errors", "metrics", "huge_pages", "processors", "tokenizer"}
LEFT = {"scheduler", "tree"}
RIGHT = {"runner", "models", "attention", "kv", "native"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "huge_pages": set(),
    "processors": set(),
    "core": {"errors"},
    "metrics": {"errors", "core"},
    "config": {"errors", "core"},
    "tokenizer": {"errors", "core", "config", "metrics"},
    "tree": BASE,
    "scheduler": BASE | {"tree"},
    "kv": BASE,
    "native": {"errors", "processors"},
    "attention": BASE | {"kv", "native"},
    "models": BASE | {"kv", "native", "attention"},
    "runner": BASE | {"kv", "native", "attention", "models"},
    "engine": BASE | LEFT | RIGHT,
    "server": BASE | LEFT | RIGHT | {"engine"},
    "foreign_flags": set(),
    "cli": {"foreign_flags"} | BASE | LEFT | RIGHT | {"engine", "server"},
    "__main__": {"cli"},
    "": BASE | {"engine"},
}

TORCH = {"torch", "triton", "flashinfer"}
HTTP = {"fastapi", "starlette", "uvicorn", "httpx"}
EVENT_LOOP = {"asyncio", "uvloop"}
SERVER_SIDE_OF_THE_WIRE = {f"radixserve.engine.{name}" for name in ("client", "link", "open_streams", "questions", "streams")}


class Import(NamedTuple):
    line: int
    name: str  # absolute, dotted


def imports_of(source: str, module: str, is_package: bool) -> Iterator[Import]:
    """Every module name that `source` imports. `from a import b` gives a.b, since b may be a module."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            parent = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            stem = ".".join([*parent, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(node.lineno, f"{stem}.{alias.name}")
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__"):
                yield Import(node.lineno, node.args[0].value)


def unit_of(dotted: str, units: set[str]) -> str:
    """The unit that a name under radixserve belongs to; a public name (radixserve.LLM) belongs to __init__, which is ""."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in units else ""


def reason_against(module: str, imported: str, units: set[str]) -> str | None:
    """Why `module` may not import `imported`, or None."""
    unit, top = unit_of(module, units), imported.split(".")[0]
    if top == "radixserve":
        other = unit_of(imported, units)
        return None if other == unit or other in ALLOWED[unit] else f"{unit or '__init__'} may not depend on {other or 'the top package'}"
    if top in TORCH and unit not in RIGHT | {"engine"}:
        return f"{unit or '__init__'} has no torch"
    if top in HTTP and unit not in {"server", "cli"}:
        return "HTTP only in server/ and cli"
    is_event_loop = top in EVENT_LOOP or "asyncio" in imported.split(".")  # zmq.asyncio
    if is_event_loop and unit not in {"server", "cli"} and module not in SERVER_SIDE_OF_THE_WIRE:
        return "asyncio only in server/, cli and engine/client.py, link.py, open_streams.py, questions.py, streams.py"
    return None


def violations(root: Path) -> list[str]:
    """One line per forbidden import, or per unit that the table does not know, under `root` (a folder like radixserve/)."""
    files = sorted(root.rglob("*.py"))
    units = set(ALLOWED) | {path.relative_to(root).parts[0].removesuffix(".py") for path in files} - {"__init__"}
    found = [f"{unit}: not in the table of {Path(__file__).name}" for unit in sorted(units - set(ALLOWED))]
    for path in files:
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(["radixserve", *(parts[:-1] if is_package else parts)])
        if unit_of(module, units) not in ALLOWED:
            continue
        for line, name in imports_of(path.read_text(encoding="utf-8"), module, is_package):
            reason = reason_against(module, name, units)
            if reason:
                found.append(f"{path.relative_to(root)}:{line}: imports {name}: {reason}")
    return found


def test_imports_go_down_only() -> None:
    found = violations(ROOT)
    assert not found, "\n" + "\n".join(found)


def test_tree_is_not_empty() -> None:
    """The walk above would also be content with a folder that it cannot see."""
    assert (ROOT / "core.py").is_file()
    assert any(
        name == "radixserve.errors.InvalidRequestError" for _, name in imports_of((ROOT / "core.py").read_text(), "radixserve.core", False)
    )


PLANTED = [
    ("tree/node.py", "import torch", "tree has no torch"),
    ("scheduler/policy.py", "def f():\n    from torch import Tensor", "scheduler has no torch"),
    ("scheduler/policy.py", "from radixserve.runner import ModelRunner", "scheduler may not depend on runner"),
    ("scheduler/policy.py", "from radixserve import kv", "scheduler may not depend on kv"),
    ("tree/node.py", "from radixserve.scheduler.policy import order", "tree may not depend on scheduler"),
    ("tree/node.py", "from ..scheduler import policy", "tree may not depend on scheduler"),
    ("tree/deep/__init__.py", "from ...scheduler import policy", "tree may not depend on scheduler"),
    ("kv/pool.py", "from radixserve.attention.batch import ForwardBatch", "kv may not depend on attention"),
    ("attention/batch.py", "import radixserve.models.decoder", "attention may not depend on models"),
    ("models/decoder.py", "from radixserve.tree import RadixTree", "models may not depend on tree"),
    ("runner/runner.py", "from radixserve.scheduler import Scheduler", "runner may not depend on scheduler"),
    ("engine/engine.py", "from radixserve.server.app import create_app", "engine may not depend on server"),
    ("engine/engine.py", "import asyncio", "asyncio only in"),
    ("engine/process.py", "import zmq.asyncio", "asyncio only in"),
    ("engine/client.py", "import httpx", "HTTP only in"),
    ("server/app.py", "from radixserve.cli import main", "server may not depend on cli"),
    ("core.py", "from radixserve.config import EngineConfig", "core may not depend on config"),
    ("core.py", "def f():\n    import importlib\n    importlib.import_module('radixserve.engine')", "core may not depend on engine"),
    ("tokenizer/detokenizer.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", "tokenizer has no torch"),
    ("models/registry.py", "from radixserve import LLM", "models may not depend on the top package"),
    ("gateway/app.py", "import os", "gateway: not in the table"),
]


@pytest.mark.parametrize(("path", "source", "expected"), PLANTED)
def test_a_planted_violation_is_caught(tmp_path: Path, path: str, source: str, expected: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(source)
    found = violations(tmp_path)
    assert len(found) == 1
    assert expected in found[0]


PERMITTED = [
    ("models/decoder.py", "from radixserve.attention.batch import ForwardBatch\nimport torch"),
    (
        "runner/runner.py",
        "from radixserve.attention.batch import ForwardBatch\nfrom radixserve.models import Decoder\nfrom radixserve.kv import KVPool",
    ),
    ("engine/client.py", "import asyncio"),
    ("engine/engine.py", "from radixserve.scheduler import Scheduler\nfrom radixserve.runner import ModelRunner"),
    ("server/app.py", "import asyncio\nimport fastapi\nfrom . import openai\nfrom radixserve.engine.client import AsyncEngine"),
    ("cli.py", "import uvicorn\nfrom radixserve.server.app import create_app"),
    ("scheduler/scheduler.py", "from radixserve.tree.prefix_cache import PrefixCache\nfrom .policy import order"),
]


@pytest.mark.parametrize(("path", "source"), PERMITTED)
def test_what_the_table_permits_passes(tmp_path: Path, path: str, source: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(source)
    assert violations(tmp_path) == []
