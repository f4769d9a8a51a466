"""A workload's prompt as the messages of a chat: who said which part of it. Pure."""

from collections.abc import Callable, Mapping, Sequence

from bench.workloads import AnswerOf
from bench.workloads.workload import Part

Message = dict[str, str]


def chat_messages(parts: Sequence[Part], parts_of: Mapping[str, Sequence[Part]], text_of: Callable[[Part], str]) -> list[Message]:
    """Messages of user and assistant in turn, beginning and ending with the user; joined they are the prompt's text.

    parts_of: the parts of every request by its id. An answer is the assistant's where it stands as in a conversation: right behind the very
    prompt that it answers, with something said after it. An answer that a program quotes elsewhere is part of what the user says.
    """
    messages: list[Message] = []
    for index, part in enumerate(parts):
        is_conversation = isinstance(part, AnswerOf) and tuple(parts_of[part.request_id]) == tuple(parts[:index])
        is_answered = index + 1 < len(parts) and not isinstance(parts[index + 1], AnswerOf)
        role = "assistant" if is_conversation and is_answered else "user"
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += text_of(part)
        else:
            messages.append({"role": role, "content": text_of(part)})
    return messages
