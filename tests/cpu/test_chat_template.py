"""Chat templates: the same text as transformers' apply_chat_template, for the default model and for families of templates."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from radixserve.errors import InvalidRequestError, ModelError
from radixserve.models.location import resolve_model
from radixserve.tokenizer import ChatTemplate, Tokenizer

LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + strftime_now("%d %b %Y") + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception("unknown role " + message.role) }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN = """{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- set ns.last = loop.index0 %}
    {%- if loop.index0 > 20 %}{% break %}{% endif %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {{- '<|im_start|>' + message.role }}
        {%- for tool_call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
            {{- tool_call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}{% generation %}{{ message.content }}{% endgeneration %}{{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

CHAT = [
    {"role": "system", "content": " Be <brief> & kind. "},
    {"role": "user", "content": "Grüße 한국어 😀\n{{ not_a_template }}"},
    {"role": "assistant", "content": "  Yes."},
    {"role": "user", "content": "And?  "},
]
TOOL_CHAT = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "w", "arguments": {"city": "Zürich"}}}]},
    {"role": "tool", "content": "sunny", "tool_call_id": "1"},
]


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return resolve_model(None).path


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_dir, local_files_only=True)


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_directory(model_dir)


@pytest.mark.parametrize(
    "options", [{}, {"add_generation_prompt": False}, {"continue_final_message": True, "add_generation_prompt": False}]
)
@pytest.mark.parametrize("chat", [CHAT, CHAT[1:], CHAT[:3], CHAT[:2]])
def test_default_model_gives_the_text_and_ids_of_transformers(
    reference: Any, tokenizer: Tokenizer, chat: list[dict[str, Any]], options: dict[str, bool]
) -> None:
    assert tokenizer.chat_template is not None
    text = tokenizer.chat_template.render(chat, **options)
    assert text == reference.apply_chat_template(chat, tokenize=False, **({"add_generation_prompt": True} | options))
    ids = reference.apply_chat_template(chat, tokenize=True, return_dict=False, **({"add_generation_prompt": True} | options))
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.encode(text) == ids  # TOK-02: the same text sent to another endpoint


@pytest.mark.parametrize("source", [LLAMA3, QWEN], ids=["llama3", "qwen"])
@pytest.mark.parametrize("options", [{}, {"continue_final_message": True, "add_generation_prompt": False}])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("chat", [CHAT, TOOL_CHAT])
def test_template_families_give_the_text_of_transformers(
    reference: Any, source: str, options: dict[str, bool], variables: dict[str, Any], chat: list[dict[str, Any]]
) -> None:
    names = {"bos_token": reference.bos_token, "eos_token": reference.eos_token}
    text = ChatTemplate(source, names).render(chat, variables=variables, **options)
    expected = reference.apply_chat_template(
        chat, chat_template=source, tokenize=False, **({"add_generation_prompt": True} | options | variables)
    )
    assert text == expected


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{% set ns = namespace(_x=1) %}", "refuses"),
        ("{{ range(10**9) | list }}", "OverflowError"),
    ],
)
def test_a_template_that_fails_is_the_callers_error(source: str, what: str) -> None:
    with pytest.raises(InvalidRequestError, match=what) as refused:
        ChatTemplate(source, {}).render(CHAT)
    assert refused.value.param == "messages"


def test_a_final_message_that_the_template_hides_cannot_be_continued() -> None:
    template = ChatTemplate("{% for m in messages[:-1] %}{{ m.content }}{% endfor %}", {})
    with pytest.raises(InvalidRequestError, match="does not show the final message"):
        template.render(CHAT, continue_final_message=True)


def test_what_is_no_template_is_an_error_of_the_model(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not valid Jinja"):
        ChatTemplate("{% if %}", {})
    (tmp_path / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    assert Tokenizer.from_directory(tmp_path).chat_template is None
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "a{{ eos_token }}"}]
    config.write_text(json.dumps({"chat_template": named, "eos_token": {"content": "E"}}))
    template = Tokenizer.from_directory(tmp_path).chat_template
    assert template is not None
    assert template.render([{"role": "user", "content": ""}]) == "aE"
    (tmp_path / "chat_template.jinja").write_text("file")
    template = Tokenizer.from_directory(tmp_path).chat_template
    assert template is not None
    assert template.source == "file"
    (tmp_path / "chat_template.jinja").unlink()
    config.write_text('{"chat_template": 7}')
    with pytest.raises(ModelError, match="expected a text"):
        Tokenizer.from_directory(tmp_path)
