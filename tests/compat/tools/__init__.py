"""One module per foreign tool: what it needs, how it is run, and what must hold afterwards."""

from tests.compat.tool import Tool
from tests.compat.tools import bench_serving, guidellm, kvlint, lm_eval, sdks, smg

TOOLS: tuple[Tool, ...] = (sdks.TOOL, kvlint.TOOL, lm_eval.TOOL, smg.TOOL, bench_serving.TOOL, guidellm.TOOL)
