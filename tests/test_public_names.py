"""The public names of radixserve: each can be imported, nothing else is offered, and `import radixserve` alone loads no torch."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import radixserve

ROOT = Path(__file__).resolve().parent.parent


def test_every_name_imports() -> None:
    assert len(set(radixserve.__all__)) == len(radixserve.__all__)
    for name in radixserve.__all__:
        assert getattr(radixserve, name).__name__ == name
        assert getattr(radixserve, name).__doc__
    given: dict[str, object] = {}
    exec("from radixserve import *", given)
    assert given.keys() - {"__builtins__"} == set(radixserve.__all__)


def test_nothing_else_is_exported() -> None:
    """Of ours: that typing's names can be reached through the module is Python's way."""
    reachable = {
        name
        for name, value in vars(radixserve).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and getattr(value, "__module__", "").startswith("radixserve")
    }
    assert reachable | set(radixserve._LAZY) == set(radixserve.__all__)


def test_import_alone_is_light() -> None:
    script = "import sys, radixserve; print([name for name in ('torch', 'transformers', 'fastapi', 'tokenizers') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "[]"
