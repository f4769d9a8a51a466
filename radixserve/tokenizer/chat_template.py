"""ChatTemplate: messages into the text that a model was trained to see, by the template that comes with its tokenizer.

Templates are Jinja written for Hugging Face's apply_chat_template: the environment below gives the same text, in a sandbox, since a
template comes with a model and is no code of ours.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from radixserve.errors import InvalidRequestError, ModelError, shown

# The trailing space shows whether the template strips the final message.
_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
RESERVED_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


class ChatTemplate:
    """One template, compiled. Immutable and safe to share between threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """special_tokens: what a template may name (bos_token, eos_token, ...). Raises ModelError for a template that is no Jinja."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template is not valid Jinja: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text; encode it without special tokens, which it holds already.

        continue_final_message leaves the last message open, for the model to go on with; its content has to be text.
        variables are further names for the template. Raises InvalidRequestError where the template refuses its input.
        """
        shown_messages = [dict(message) for message in messages]
        final_text = ""
        if continue_final_message:
            final_text = shown_messages[-1]["content"]
            shown_messages[-1]["content"] = final_text + _END_MARK
        names = {**self._special_tokens, **(variables or {})}
        try:
            text = self._template.render(
                messages=shown_messages, tools=None, documents=None, add_generation_prompt=add_generation_prompt, **names
            )
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"messages: the model's chat template refuses them: {shown(error.message)}", param="messages"
            ) from error
        except Exception as error:  # a template computes with whatever the caller sent
            kind = type(error).__name__
            raise InvalidRequestError(f"messages: the model's chat template fails with them ({kind})", param="messages") from error
        return _cut_at_mark(text, final_text) if continue_final_message else text


def _cut_at_mark(text: str, final_text: str) -> str:
    at = text.rfind(_END_MARK.strip())
    if at < 0 or final_text.strip() not in text:
        message = "continue_final_message: the model's chat template does not show the final message as it is"
        raise InvalidRequestError(message, param="continue_final_message")
    return text[:at] if text.startswith(_END_MARK, at) else text[:at].rstrip()


class _GenerationBlock(Extension):
    """{% generation %} ... {% endgeneration %} marks what an assistant said, for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PublicNamespace(Namespace):
    """Jinja's namespace() without names that begin with an underscore."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        given = dict(*args, **attributes)
        for name in given:
            _check_public(name)
        super().__init__(given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError("a name in a namespace must not begin with an underscore")


def _environment() -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(pattern: str) -> str:
        return datetime.now().strftime(pattern)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now, namespace=_PublicNamespace)
    return environment
