"""openai 2.x, litellm and langchain-openai: the clients that are in the field beside openai 3.x, which the test suite itself runs."""

from pathlib import Path

from tests.compat.tool import Context, Tool

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "use_sdks.py"


async def run(context: Context) -> str:
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
    output = await context.call([context.python, str(SCRIPT), context.url, context.model_name], env)
    return output.strip().splitlines()[-1]


TOOL = Tool(
    name="sdks",
    packages=("openai<3", "litellm", "langchain-openai"),
    shown=("openai", "litellm", "langchain-openai"),
    command="tests/compat/scripts/use_sdks.py URL MODEL",
    run=run,
)
