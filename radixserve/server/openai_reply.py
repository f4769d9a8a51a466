"""The bodies of the OpenAI routes: text_completion and chat.completion, whole and in chunks."""

import time
from abc import ABC, abstractmethod
from typing import Any

from radixserve.server.call import Call
from radixserve.server.chat_call import ChatCall
from radixserve.server.completion_call import CompletionCall
from radixserve.server.generation import ChoiceDelta, Generation
from radixserve.server.json_arrays import EncodedArray
from radixserve.server.logprobs import OutputLists, chat_logprobs, num_shown, prompt_lists
from radixserve.tokenizer import Detokenizer, Tokenizer


class OpenAIReply(ABC):
    """What both have in common: the head, the usage and where it goes."""

    object_name: str
    chunk_object_name: str

    def __init__(self, call: Call, generation: Generation, reply_id: str, model: str, *, with_cache_details: bool) -> None:
        self._call = call
        self._generation = generation
        self._head = {"id": reply_id, "object": self.object_name, "created": int(time.time()), "model": model}
        self._with_cache_details = with_cache_details

    def whole(self, choices: list[ChoiceDelta]) -> dict[str, Any]:
        body = {**self._head, "choices": [self._choice(choice) for choice in choices], "usage": self._generation.usage()}
        return {**body, **self._extension()}

    def chunks(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        bodies = [{**self._head, "object": self.chunk_object_name, "choices": [choice]} for choice in self._chunk_choices(delta)]
        if self._call.continuous_usage or self._call.include_usage:
            usage = self._generation.usage() if self._call.continuous_usage else None  # null until the last chunk, as OpenAI has it
            bodies = [{**body, "usage": usage} for body in bodies]
        if delta.finish_reason is not None:
            bodies[-1] |= self._extension()
        return bodies

    def last_chunks(self) -> list[dict[str, Any]]:
        if not self._call.include_usage:
            return []
        return [{**self._head, "object": self.chunk_object_name, "choices": [], "usage": self._generation.usage()}]

    def _extension(self) -> dict[str, Any]:
        """SGLang's: where the cached tokens lay. There is one tier."""
        if not self._with_cache_details:
            return {}
        num_cached = self._generation.usage()["prompt_tokens_details"]["cached_tokens"]
        return {"sglext": {"cached_tokens_details": {"device": num_cached, "host": 0}}}

    @abstractmethod
    def num_shown_tokens(self, delta: ChoiceDelta) -> int: ...

    @abstractmethod
    def _choice(self, choice: ChoiceDelta) -> dict[str, Any]: ...

    @abstractmethod
    def _chunk_choices(self, delta: ChoiceDelta) -> list[dict[str, Any]]: ...


class CompletionReply(OpenAIReply):
    object_name = chunk_object_name = "text_completion"

    def __init__(self, asked: CompletionCall, generation: Generation, tokenizer: Tokenizer, reply_id: str, model: str) -> None:
        super().__init__(asked.call, generation, reply_id, model, with_cache_details=asked.return_cached_tokens_details)
        self._asked = asked
        self._tokenizer = tokenizer
        # made when first shown; those of a prompt serve all its choices
        self._echo_texts: dict[int, str] = {}
        self._prompt_lists: dict[int, dict[str, EncodedArray]] = {}
        self._output_lists: dict[int, OutputLists] = {}

    def num_shown_tokens(self, delta: ChoiceDelta) -> int:
        num_prompt = len(self._generation.prompt_ids(delta.choice_index)) if delta.is_first and self._asked.echo else 0
        return num_prompt + num_shown(delta.prompt_logprobs) + num_shown(delta.logprobs)

    def _choice(self, choice: ChoiceDelta) -> dict[str, Any]:
        index = choice.choice_index
        is_echo = choice.is_first and self._asked.echo
        text = self._echo_text(self._call.prompt_index(index)) + choice.text if is_echo else choice.text
        body = {"index": index, "text": text, "logprobs": self._shown_logprobs(choice), "finish_reason": choice.finish_reason}
        if self._asked.return_token_ids:
            body["prompt_token_ids"] = list(self._generation.prompt_ids(index)) if choice.is_first else None
            body["token_ids"] = list(choice.token_ids)
        return body

    def _chunk_choices(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        return [self._choice(delta)]

    def _echo_text(self, prompt_index: int) -> str:
        """The prompt as it was sent; of token ids what they say. Half a character at its end is shown with the rest of it."""
        if not self._asked.echo:
            return ""
        prompt = self._call.prompts[prompt_index]
        if isinstance(prompt.content, str):
            return prompt.content
        if prompt_index not in self._echo_texts:
            text = Detokenizer(self._tokenizer, (), (), prompt.skip_special_tokens).push(prompt.content).text
            self._echo_texts[prompt_index] = text
        return self._echo_texts[prompt_index]

    def _shown_logprobs(self, choice: ChoiceDelta) -> dict[str, Any] | None:
        index = choice.choice_index
        prompt_index = self._call.prompt_index(index)
        prompt = self._call.prompts[prompt_index]
        if prompt.sampling.logprobs is None:
            return None
        prompt_ids, echo_text = self._generation.prompt_ids(index), self._echo_text(prompt_index)
        if index not in self._output_lists:
            self._output_lists[index] = OutputLists(self._tokenizer, prompt_ids, len(echo_text), prompt.skip_special_tokens)
        outputs = self._output_lists[index].of(choice.logprobs)
        if not (choice.is_first and self._asked.echo):
            return {name: array.whole() for name, array in outputs.items()}
        if prompt_index not in self._prompt_lists:
            self._prompt_lists[prompt_index] = prompt_lists(self._tokenizer, prompt_ids, echo_text, choice.prompt_logprobs)
        return {name: array.whole(outputs[name]) for name, array in self._prompt_lists[prompt_index].items()}


class ChatReply(OpenAIReply):
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, asked: ChatCall, generation: Generation, tokenizer: Tokenizer, reply_id: str, model: str) -> None:
        super().__init__(asked.call, generation, reply_id, model, with_cache_details=asked.return_cached_tokens_details)
        self._asked = asked
        self._tokenizer = tokenizer
        self._has_logprobs = asked.call.prompts[0].sampling.logprobs is not None

    def whole(self, choices: list[ChoiceDelta]) -> dict[str, Any]:
        return {**super().whole(choices), **self._prompt_token_ids()}

    def num_shown_tokens(self, delta: ChoiceDelta) -> int:
        return num_shown(delta.logprobs)

    def chunks(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        bodies = super().chunks(delta)
        if delta.is_first:
            bodies[0] |= self._prompt_token_ids()
        return bodies

    def _prompt_token_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._generation.prompt_ids(0))} if self._asked.return_token_ids else {}

    def _choice(self, choice: ChoiceDelta) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"index": choice.choice_index, "message": message, **self._rest(choice)}

    def _chunk_choices(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """The role comes first, in a chunk of its own."""
        role = {"role": "assistant", "content": ""}
        head = [{"index": delta.choice_index, "delta": role, "logprobs": None, "finish_reason": None}] if delta.is_first else []
        content = {"content": delta.text} if delta.text else {}
        return [*head, {"index": delta.choice_index, "delta": content, **self._rest(delta)}]

    def _rest(self, choice: ChoiceDelta) -> dict[str, Any]:
        logprobs = chat_logprobs(self._tokenizer, choice.logprobs) if self._has_logprobs else None
        token_ids = {"token_ids": list(choice.token_ids)} if self._asked.return_token_ids else {}
        return {"logprobs": logprobs, "finish_reason": choice.finish_reason, **token_ids}
