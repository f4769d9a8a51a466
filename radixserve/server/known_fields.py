"""Fields of the OpenAI, SGLang and vLLM protocols that are known and not served: refused by name, unless their value changes nothing.

A route reads what it serves; the list is for the rest, so that a name in it may well be served elsewhere, or be what another route calls
a field of this one: every name that a generating route reads is in it or in HARMLESS. Real tools send many of them with neutral values, so
those are accepted. A field that no protocol knows is ignored and named in a header.
"""

from collections.abc import Container
from typing import Any

from radixserve.errors import UnsupportedFieldError
from radixserve.server.fields import Fields, show

# They describe the caller or steer what this server does not have; the answer is the same without them.
HARMLESS = frozenset(
    {
        "user",
        "model",  # not read by /generate, where gateways name the one that they chose
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "verbosity",
        "rid",
        "request_id",
        "session_id",
    }
)

# Field -> the values (beside null) that change nothing.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (False,),
    "add_special_tokens": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "audio_data": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "bootstrap_host": (),
    "bootstrap_room": (),
    "cache_control": ({},),
    "cache_salt": ("",),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "detokenize": (True,),
    "documents": ([],),
    "ebnf": ("",),
    "echo": (False,),
    "extra_key": ("",),
    "frequency_penalty": (0,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "guided_json": (),
    "guided_regex": ("",),
    "ignore_eos": (False,),
    "image_data": ([],),
    "include_stop_str_in_output": (False,),
    "input_embeds": ([],),
    "input_ids": (),
    "json_schema": ("", {}),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "logprob_start_len": (-1,),
    "logprobs": (False,),
    "lora_path": ("", []),
    "max_completion_tokens": (),
    "max_new_tokens": (),
    "max_tokens": (),
    "messages": (),
    "min_new_tokens": (0,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "no_stop_trim": (False,),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt": (),
    "prompt_cache_breakpoint": ({},),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "prompt_embeds": ([],),
    "prompt_logprobs": (False,),
    "reasoning_effort": (),
    "regex": ("",),
    "repetition_penalty": (1,),
    "response_format": ({}, {"type": "text"}),
    "return_cached_tokens_details": (False,),
    "return_hidden_states": (False,),
    "return_logprob": (False,),
    "return_routed_experts": (False,),
    "return_text_in_logprobs": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "sampling_params": ({},),
    "sampling_seed": (),
    "seed": (),
    "session_params": ({},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop": ([],),
    "stop_regex": ("", []),
    "stop_token_ids": ([],),
    "stream": (False,),
    "stream_options": ({},),
    "structural_tag": ("", {}),
    "structured_outputs": ({},),
    "suffix": ("",),
    "temperature": (1,),
    "text": (),
    "token_ids_logprob": ([],),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "top_k": (0, -1),
    "top_logprobs": (0,),
    "top_logprobs_num": (0,),
    "top_p": (1,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "video_data": ([],),
    "web_search_options": (),
}

# Wishes for the cache, which clients also hang on messages and parts of them.
CACHE_HINTS = frozenset({"cache_control", "prompt_cache_breakpoint", "prompt_cache_options"})

# Known names that say what the prompt is, so that /tokenize would answer something else without them; and wishes for the cache.
PROMPT_FIELDS = CACHE_HINTS | {
    "audio_data",
    "chat_template",
    "documents",
    "functions",
    "image_data",
    "input_embeds",
    "input_ids",
    "prompt_embeds",
    "reasoning_effort",
    "text",
    "tools",
    "truncate_prompt_tokens",
    "video_data",
}


def _is_same(value: Any, neutral: Any) -> bool:
    """Equal, and not a number where a boolean is meant: logprobs 0 is no false."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def refuse_unsupported(fields: Fields) -> None:
    """Of a whole body: raises UnsupportedFieldError for the first known field that asks for what we do not do."""
    refuse_known(fields)
    for name in HARMLESS:
        fields.raw(name)


def refuse_known(fields: Fields, names: Container[str] = NEUTRAL_VALUES) -> None:
    """The same of an object inside a body, where no name is harmless; `names` of NEUTRAL_VALUES alone."""
    for name in fields.unread_names():
        if name not in names:
            continue
        value = fields.raw(name)
        if value is not None and not any(_is_same(value, neutral) for neutral in NEUTRAL_VALUES[name]):
            accepted = " or ".join(["null", *(show(neutral) for neutral in NEUTRAL_VALUES[name])])
            path = fields.path_of(name)
            raise UnsupportedFieldError(f"{path} is not supported by this server (accepted: {accepted}), got {show(value)}", param=path)
