"""Loads of plain shape: nothing shared, groups with a common beginning, conversations. Loads A to F are some of these with sizes."""

from dataclasses import dataclass
from itertools import accumulate

from bench.workloads.draw import Draw
from bench.workloads.options import option
from bench.workloads.workload import AnswerOf, Ids, Part, WorkloadRequest


@dataclass(frozen=True, slots=True)
class Random:
    """No two prompts begin with the same token."""

    num_prompts: int = option(32, "requests")
    input_len: int = option(512, "tokens of a prompt")
    output_len: int = option(32, "tokens of an answer")
    range_ratio: float = option(1.0, "lengths are uniform from this share of the length to all of it", at_least=0.0, at_most=1.0)
    concurrency: int = option(8, "requests at a time, where the command says nothing")

    @property
    def about(self) -> str:
        return f"Nothing shared: {self.num_prompts} prompts of {self.input_len} tokens, {self.output_len} out."

    def requests(self, draw: Draw) -> list[WorkloadRequest]:
        taken: set[int] = set()
        return [
            WorkloadRequest(
                f"r{index}",
                (draw.ids(draw.length(self.input_len, self.range_ratio), taken),),
                draw.length(self.output_len, self.range_ratio),
                "random",
            )
            for index in range(self.num_prompts)
        ]


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Groups of prompts with a common beginning; names and meaning as in SGLang's generated-shared-prefix."""

    num_groups: int = option(8, "groups, each with a beginning of its own")
    prompts_per_group: int = option(8, "conversations of a group, in the mean if the distribution is not uniform")
    system_prompt_len: int = option(1024, "shared tokens of a group", at_least=0)
    question_len: int = option(64, "own tokens of a turn")
    output_len: int = option(32, "tokens of an answer")
    range_ratio: float = option(1.0, "lengths are uniform from this share of the length to all of it", at_least=0.0, at_most=1.0)
    num_turns: int = option(1, "user turns of a conversation; each sends all before it")
    ordered: bool = option(False, "keep the groups together, in place of a random order")
    group_distribution: str = option("uniform", "how conversations fall to groups", choices=("uniform", "zipf"))
    zipf_alpha: float = option(1.0, "P(group of rank r) is proportional to 1 / r^alpha", at_least=0.0)
    send_routing_key: bool = option(False, "name the group in a header for routers, X-SMG-Routing-Key")
    concurrency: int = option(8, "requests at a time, where the command says nothing")

    @property
    def about(self) -> str:
        turns = f", {self.num_turns} turns" if self.num_turns > 1 else ""
        return (
            f"{self.num_groups} groups with {self.system_prompt_len} shared tokens each, {self.num_groups * self.prompts_per_group} "
            f"prompts with {self.question_len} of their own{turns}, {self.output_len} out, groups {self.group_distribution}."
        )

    def requests(self, draw: Draw) -> list[WorkloadRequest]:
        beginnings = [ids[: draw.length(len(ids), self.range_ratio)] for ids in draw.strangers(self.num_groups, self.system_prompt_len)]
        taken: list[set[int]] = [set() for _ in beginnings]
        conversations = []
        for index, group in enumerate(self._groups(draw)):
            name = f"g{group}"
            first = [*beginnings[group], *draw.ids(draw.length(self.question_len, self.range_ratio), taken[group])]
            turns = [first, *(draw.ids(draw.length(self.question_len, self.range_ratio)) for _ in range(self.num_turns - 1))]
            outputs = [draw.length(self.output_len, self.range_ratio) for _ in turns]
            conversations.append(conversation(f"{name}.{index}", turns, outputs, name, name if self.send_routing_key else None))
        if not self.ordered:
            draw.rng.shuffle(conversations)
        return [request for one in conversations for request in one]

    def _groups(self, draw: Draw) -> list[int]:
        """The group of each conversation, in order of groups."""
        total = self.num_groups * self.prompts_per_group
        if self.group_distribution == "uniform":
            return [index // self.prompts_per_group for index in range(total)]
        # draws of their own, so that the prompts are those of the uniform load as far as they can be
        weights = list(accumulate(1 / rank**self.zipf_alpha for rank in range(1, self.num_groups + 1)))
        rng = Draw(draw.words, f"{draw.key}/zipf").rng
        return sorted(rng.choices(range(self.num_groups), cum_weights=weights, k=total))


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Conversations; each turn sends all before it, answers included."""

    num_chats: int = option(20, "conversations")
    num_turns: int = option(4, "turns of each")
    min_first_len: int = option(256, "tokens of a first turn, at least")
    max_first_len: int = option(512, "and at most")
    min_turn_len: int = option(256, "tokens of a later turn, at least")
    max_turn_len: int = option(512, "and at most")
    min_output_len: int = option(4, "tokens of an answer, at least")
    max_output_len: int = option(8, "and at most")
    concurrency: int = option(8, "requests at a time, where the command says nothing")

    @property
    def about(self) -> str:
        return (
            f"{self.num_chats} conversations of {self.num_turns} turns, {self.min_first_len} to {self.max_first_len} tokens first, "
            f"{self.min_turn_len} to {self.max_turn_len} more each turn, {self.min_output_len} to {self.max_output_len} out."
        )

    def requests(self, draw: Draw) -> list[WorkloadRequest]:
        taken: set[int] = set()
        requests = []
        for index in range(self.num_chats):
            first = draw.ids(draw.between(self.min_first_len, self.max_first_len), taken)
            turns = [first, *(draw.ids(draw.between(self.min_turn_len, self.max_turn_len)) for _ in range(self.num_turns - 1))]
            outputs = [draw.between(self.min_output_len, self.max_output_len) for _ in turns]
            requests += conversation(f"chat{index}", turns, outputs, "chats")
        return requests


def conversation(
    name: str, turns: list[Ids], output_lens: list[int], group: str, routing_key: str | None = None, arrival_s: float | None = None
) -> list[WorkloadRequest]:
    """The requests of one conversation: turn t sends all turns and answers before it, and turns[t]."""
    history: tuple[Part, ...] = ()
    requests = []
    for turn, (ids, output_len) in enumerate(zip(turns, output_lens)):
        request_id = f"{name}.t{turn}" if len(turns) > 1 else name
        parts = (*history, ids)
        arrives_s = arrival_s if turn == 0 else None
        requests.append(WorkloadRequest(request_id, parts, output_len, group, arrives_s, turn, routing_key=routing_key))
        history = (*parts, AnswerOf(request_id))
    return requests


LOADS: dict[str, Random | SharedPrefix | MultiTurn] = {
    "A": SharedPrefix(),
    "B": Random(output_len=64),
    "C": Random(16, 64, 256, concurrency=16),
    "D": MultiTurn(8, 5, 512, 512, 64, 64, 64, 64),
    "E": Random(1, 512, 128, concurrency=1),
    "F": SharedPrefix(num_groups=1, prompts_per_group=16, system_prompt_len=7000, question_len=32),
}
WARM_UP = Random(8, 300, 16)
