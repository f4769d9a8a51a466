"""radixserve serve | generate | version. Flags are made from the config dataclasses: each default is typed once, in config.py."""

import argparse
import dataclasses
import difflib
import os
import sys
import types
import typing
from collections.abc import Sequence
from typing import Any, NoReturn

from radixserve import foreign_flags
from radixserve.config import CacheConfig, EngineConfig, SchedulerConfig, ServerConfig, flag_of
from radixserve.errors import RadixServeError

ENGINE_PARTS = (EngineConfig, CacheConfig, SchedulerConfig)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. An error of the user's is one sentence on standard error and code 2."""
    try:
        args = make_parser().parse_args(arguments)
        return int(args.run(args))
    except RadixServeError as error:
        print(f"radixserve: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    """One line for a mistake, with the flag that was probably meant; no abbreviations, since a later flag would change their meaning."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs |= {"allow_abbrev": False, "formatter_class": _Help}
        super().__init__(*args, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = super().parse_known_args(args, namespace)
        for word in unknown:
            self.error(f"unknown argument {word}" + self._hint(word.partition("=")[0]))
        return known, unknown

    def _hint(self, flag: str) -> str:
        if sentence := foreign_flags.about(flag):
            return f"; {sentence}"
        known = [name for action in self._actions for name in action.option_strings if _switches_off(name) == _switches_off(flag)]
        close = difflib.get_close_matches(flag, known, n=1, cutoff=0.9)  # less sends people to a flag of another meaning
        return f"; did you mean {close[0]}?" if close else ""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n(see {self.prog} --help)\n")


def _switches_off(flag: str) -> bool:
    return flag.startswith(("--disable-", "--no-"))


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=120)


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser("radixserve", description="Serve a language model with a radix tree over a paged KV pool.")
    parser.add_argument("--version", action="version", version=f"radixserve {_installed_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve over HTTP, OpenAI-compatible")
    for part in (*ENGINE_PARTS, ServerConfig):
        add_flags(serve, part)
    serve.set_defaults(run=_serve)
    generate = commands.add_parser("generate", help="answer one prompt here and now, without a server")
    generate.add_argument("prompt")
    generate.add_argument("--max-tokens", type=int, default=64, help="at most so many tokens (default: 64)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default: 0)")
    generate.add_argument("--seed", type=int, default=None, help="makes sampling repeatable")
    for part in ENGINE_PARTS:
        add_flags(generate, part)
    generate.set_defaults(run=_generate)
    version = commands.add_parser("version", help="print the version")
    version.set_defaults(run=_version)
    return parser


def add_flags(parser: argparse.ArgumentParser, config: type[Any]) -> None:
    """One flag for each field of a config class."""
    group = parser.add_argument_group((config.__doc__ or "").strip().rstrip("."))
    hints = typing.get_type_hints(config)
    for spec in dataclasses.fields(config):
        if "help" not in spec.metadata:
            continue
        names = [flag_of(spec.name)] + (["--model"] if spec.name == "model_path" else [])
        text = spec.metadata["help"].replace("%", "%%")
        if spec.default is not None and spec.default is not False and spec.default != () and "default" not in text:
            text += f" (default: {spec.default})"
        if hints[spec.name] is bool:
            group.add_argument(*names, action="store_true", default=argparse.SUPPRESS, help=text)
        elif typing.get_origin(hints[spec.name]) is tuple:
            group.add_argument(*names, action=_Extend, default=argparse.SUPPRESS, help=text)
        else:
            choices = spec.metadata["choices"] or None
            kind = _base_type(hints[spec.name])
            metavar = None if choices else {int: "N", float: "X"}.get(kind, "TEXT")
            group.add_argument(*names, type=kind, default=argparse.SUPPRESS, choices=choices, metavar=metavar, help=text)


class _Extend(argparse.Action):
    """A flag that may be repeated, each time with one value or several separated by commas."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        more = tuple(part.strip() for part in values.split(",") if part.strip())
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), *more))


def _base_type(hint: Any) -> Any:
    """int for `int` and for `int | None`."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next(option for option in options if option is not type(None))


def config_from(args: argparse.Namespace, config: type[Any], **parts: Any) -> Any:
    """The config that the given flags describe; flags that were not given take the class's defaults."""
    given = {spec.name: getattr(args, spec.name) for spec in dataclasses.fields(config) if hasattr(args, spec.name)}
    return config(**given, **parts)


def engine_config_from(args: argparse.Namespace) -> EngineConfig:
    config: EngineConfig = config_from(
        args, EngineConfig, cache=config_from(args, CacheConfig), scheduler=config_from(args, SchedulerConfig)
    )
    return config


def _serve(args: argparse.Namespace) -> int:
    from radixserve.server.access import with_keys_of
    from radixserve.server.serve import run_server

    return run_server(engine_config_from(args), with_keys_of(os.environ, config_from(args, ServerConfig)))


def _generate(args: argparse.Namespace) -> int:
    config = engine_config_from(args)
    from radixserve.core import SamplingParams
    from radixserve.engine.llm import LLM

    sampling = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed).validate()
    llm = LLM.from_config(config)
    try:
        for piece in llm.stream(args.prompt, sampling):
            print(piece, end="", flush=True)
        print()
    finally:
        llm.close()
    return 0


def _version(args: argparse.Namespace) -> int:
    print(_installed_version())
    return 0


def _installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("radixserve")
    except PackageNotFoundError:  # run from a checkout
        return "(not installed)"
