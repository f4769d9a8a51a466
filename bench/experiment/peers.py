"""The commands of servers that are not this project's: what is filled in, and whether they are there at all."""

import os
import re
import shutil

from bench.experiment.plan import ServerPlan


class NotInstalledError(Exception):
    """The peer cannot run on this machine; the message says what is missing."""


def resolve_command(server: ServerPlan, model_dir: str) -> list[str]:
    """The command with {model_dir}, ${NAME} and ${NAME:-otherwise} filled in; {port} stays for whoever starts it.

    Raises NotInstalledError.
    """
    command = [_fill(part, model_dir) for part in server.command]
    if shutil.which(command[0]) is None:
        raise NotInstalledError(f"{command[0]} is not on the PATH")
    return command


def resolve_env(server: ServerPlan, model_dir: str) -> dict[str, str]:
    """The environment that the plan adds, filled in as the command is."""
    return {name: _fill(value, model_dir) for name, value in server.env.items()}


def _fill(part: str, model_dir: str) -> str:
    def variable(match: re.Match[str]) -> str:
        name = match[1]
        value = os.environ.get(name) or match[2]
        if value is None:
            raise NotInstalledError(f"the environment variable {name} is not set")
        return value

    return re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", variable, part).replace("{model_dir}", model_dir)
