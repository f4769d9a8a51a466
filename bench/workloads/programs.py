"""The workloads of the SGLang paper, re-created by structure: the shape is the paper's, tokens are random words, lengths are options.

What a program appends from a recording is random words; what it appends from its own answers is AnswerOf.
"""

from dataclasses import dataclass

from bench.workloads.draw import Draw
from bench.workloads.options import option
from bench.workloads.workload import AnswerOf, Part, WorkloadRequest


@dataclass(frozen=True, slots=True)
class FewShot:
    """As MMLU with five shots: a header per subject, questions below it, one token out."""

    num_subjects: int = option(8, "subjects, each with a header")
    questions_per_subject: int = option(16, "questions of a subject")
    header_len: int = option(600, "tokens of the worked examples of a subject")
    question_len: int = option(100, "tokens of a question")
    output_len: int = option(1, "tokens of an answer")
    ordered: bool = option(False, "keep the subjects together, in place of a random order")
    concurrency: int = option(8, "requests at a time, where the command says nothing")

    @property
    def about(self) -> str:
        return (
            f"Few-shot questions like MMLU's: {self.num_subjects} subjects with {self.header_len} tokens of examples each, "
            f"{self.questions_per_subject} questions of {self.question_len} tokens below, {self.output_len} out."
        )

    def requests(self, draw: Draw) -> list[WorkloadRequest]:
        headers = draw.strangers(self.num_subjects, self.header_len)
        questions = [draw.strangers(self.questions_per_subject, self.question_len) for _ in headers]
        requests = [
            WorkloadRequest(f"s{subject}.{index}", (header, question), self.output_len, f"subject{subject}")
            for subject, header in enumerate(headers)
            for index, question in enumerate(questions[subject])
        ]
        if not self.ordered:
            draw.rng.shuffle(requests)
        return requests


@dataclass(frozen=True, slots=True)
class HellaSwag:
    """One header; per question a few endings that are scored: two levels, and nothing to decode."""

    num_questions: int = option(16, "questions")
    num_endings: int = option(4, "endings of a question")
    header_len: int = option(1700, "tokens of the worked examples that all share")
    question_len: int = option(50, "tokens of a question")
    ending_len: int = option(20, "tokens of an ending")
    output_len: int = option(1, "tokens of an answer")
    concurrency: int = option(8, "requests at a time, where the command says nothing")

    @property
    def about(self) -> str:
        return (
            f"Scored endings like HellaSwag's: {self.header_len} tokens that all share, {self.num_questions} questions of "
            f"{self.question_len} tokens, {self.num_endings} endings of {self.ending_len} each, {self.output_len} out."
        )

    def requests(self, draw: Draw) -> list[WorkloadRequest]:
        header = draw.ids(self.header_len)
        return [
            WorkloadRequest(f"q{index}.e{number}", (header, question, ending), self.output_len, "endings")
            for index, question in enumerate(draw.strangers(self.num_questions, self.question_len))
            for number, ending in enumerate(draw.strangers(self.num_endings, self.ending_len))
        ]


@dataclass(frozen=True, slots=True)
class ReAct:
    """An agent: a template of worked examples, a question, rounds that each append thought, action and observation from a recording."""

    num_questions: int = option(8, "agents")
    num_rounds: int = option(6, "rounds of each")
    template_len: int = option(1500, "tokens of the template that all share")
    question_len: int = option(50, "tokens of a question")
    round_len: int = option(150, "tokens that a round appends")
    output_len: int = option(64, "tokens of an answer")
    concurrency: int = option(8, "requests at a time, where the command says nothing")

    @property
    def about(self) -> str:
        return (
            f"ReAct agents: a template of {self.template_len} tokens, {self.num_questions} questions of {self.question_len}, "
            f"{self.num_rounds} rounds that append {self.round_len} recorded tokens each, {self.output_len} out."
        )

    def requests(self, draw: Draw) -> list[WorkloadRequest]:
        template, requests = draw.ids(self.template_len), []
        for agent, question in enumerate(draw.strangers(self.num_questions, self.question_len)):
            parts: tuple[Part, ...] = (template, question)
            for turn in range(self.num_rounds):
                after = (f"q{agent}.r{turn - 1}",) if turn else ()
                requests.append(WorkloadRequest(f"q{agent}.r{turn}", parts, self.output_len, "agents", turn=turn, after=after))
                parts = (*parts, draw.ids(self.round_len))
        return requests


@dataclass(frozen=True, slots=True)
class GenerativeAgents:
    """Calls to five templates, one after the other: one puts the persona first, one has a short header, three begin with a long task."""

    num_calls: int = option(64, "calls")
    num_personas: int = option(12, "personas")
    persona_len: int = option(200, "tokens of a persona")
    line_len: int = option(20, "tokens of the short header")
    task_len: int = option(450, "tokens of a long task header")
    own_len: int = option(75, "tokens of a call's own")
    min_output_len: int = option(2, "tokens of an answer, at least")
    max_output_len: int = option(20, "and at most")
    concurrency: int = option(8, "requests at a time, where the command says nothing; each call waits for the one before it")

    @property
    def about(self) -> str:
        return (
            f"Generative agents: {self.num_calls} calls in a row to five templates with {self.num_personas} personas of "
            f"{self.persona_len} tokens, task headers of {self.task_len}, {self.min_output_len} to {self.max_output_len} out."
        )

    def requests(self, draw: Draw) -> list[WorkloadRequest]:
        taken: set[int] = set()
        personas = [draw.ids(self.persona_len, taken) for _ in range(self.num_personas)]
        line, tasks = draw.ids(self.line_len, taken), [draw.ids(self.task_len, taken) for _ in range(3)]
        requests: list[WorkloadRequest] = []
        for index in range(self.num_calls):
            persona, kind = draw.rng.choice(personas), draw.rng.randrange(5)
            beginning: tuple[Part, ...] = (persona,) if kind == 0 else (line,) if kind == 1 else (tasks[kind - 2], persona)
            output_len = draw.between(self.min_output_len, self.max_output_len)
            after = (requests[-1].id,) if requests else ()
            group = ("persona first", "short header", "long header")[min(kind, 2)]
            requests.append(WorkloadRequest(f"call{index}", (*beginning, draw.ids(self.own_len)), output_len, group, after=after))
        return requests


@dataclass(frozen=True, slots=True)
class TreeOfThought:
    """Each thought is gone on with by several: with two branches and four levels thirty answers a question."""

    num_questions: int = option(4, "questions")
    num_branches: int = option(2, "branches of a thought")
    num_levels: int = option(4, "levels: plan, solve, reflect, answer")
    question_len: int = option(100, "tokens of a question")
    step_len: int = option(32, "tokens that ask for one step; a branch's own")
    output_len: int = option(256, "tokens of a thought")
    concurrency: int = option(8, "requests at a time, where the command says nothing")

    @property
    def about(self) -> str:
        return (
            f"Trees of thought: {self.num_questions} questions of {self.question_len} tokens, {self.num_branches} branches on "
            f"{self.num_levels} levels, each {self.step_len} tokens in and {self.output_len} out below all above it."
        )

    def requests(self, draw: Draw) -> list[WorkloadRequest]:
        requests: list[WorkloadRequest] = []

        def grow(name: str, above: tuple[Part, ...], level: int) -> None:
            if level == self.num_levels:
                return
            for branch, step in enumerate(draw.strangers(self.num_branches, self.step_len)):
                request = WorkloadRequest(f"{name}.{branch}", (*above, step), self.output_len, f"level{level}", turn=level)
                requests.append(request)
                grow(request.id, (*request.parts, AnswerOf(request.id)), level + 1)

        for index, question in enumerate(draw.strangers(self.num_questions, self.question_len)):
            grow(f"q{index}", (question,), 0)
        return requests


@dataclass(frozen=True, slots=True)
class SkeletonOfThought:
    """Short points, one after the other in a growing prompt; each is then expanded on its own below a header that all share."""

    num_questions: int = option(8, "questions")
    num_points: int = option(5, "points of an answer")
    header_len: int = option(100, "tokens of the header above the points")
    question_len: int = option(50, "tokens of a question")
    point_len: int = option(8, "tokens that ask for a point")
    point_output_len: int = option(24, "tokens of a point")
    expand_header_len: int = option(400, "tokens of the examples above an expansion")
    expand_output_len: int = option(128, "tokens of an expansion")
    concurrency: int = option(8, "requests at a time, where the command says nothing")

    @property
    def about(self) -> str:
        return (
            f"Skeletons of thought: {self.num_questions} questions, {self.num_points} points of {self.point_output_len} tokens in a "
            f"growing prompt, then each point expanded to {self.expand_output_len} tokens below {self.expand_header_len} shared ones."
        )

    def requests(self, draw: Draw) -> list[WorkloadRequest]:
        taken: set[int] = set()
        header, expand_header = draw.ids(self.header_len, taken), draw.ids(self.expand_header_len, taken)
        requests = []
        for index, question in enumerate(draw.strangers(self.num_questions, self.question_len)):
            parts: tuple[Part, ...] = (header, question)
            expansions = []
            for point in range(self.num_points):
                name = f"q{index}.p{point}"
                parts = (*parts, draw.ids(self.point_len))
                requests.append(WorkloadRequest(name, parts, self.point_output_len, "points", turn=point))
                parts = (*parts, AnswerOf(name))
                below = (expand_header, question, AnswerOf(name))
                expansions.append(WorkloadRequest(f"{name}.long", below, self.expand_output_len, "expansions", turn=point + 1))
            requests += expansions
        return requests


@dataclass(frozen=True, slots=True)
class LlmJudge:
    """An article judged along several dimensions at once, then a score from all judgements."""

    num_articles: int = option(8, "articles")
    num_dimensions: int = option(6, "dimensions")
    header_len: int = option(100, "tokens of the header that all share")
    article_len: int = option(1000, "tokens of an article")
    dimension_len: int = option(30, "tokens that name a dimension")
    output_len: int = option(256, "tokens of a judgement")
    score_output_len: int = option(2, "tokens of the score")
    concurrency: int = option(8, "requests at a time, where the command says nothing")

    @property
    def about(self) -> str:
        return (
            f"A judge: {self.num_articles} articles of {self.article_len} tokens below a header of {self.header_len}, "
            f"{self.num_dimensions} judgements of {self.output_len} tokens each, joined for a score."
        )

    def requests(self, draw: Draw) -> list[WorkloadRequest]:
        header, requests = draw.ids(self.header_len), []
        dimensions = draw.strangers(self.num_dimensions + 1, self.dimension_len)
        for index, article in enumerate(draw.strangers(self.num_articles, self.article_len)):
            joined: tuple[Part, ...] = (header, article)
            for number, dimension in enumerate(dimensions[:-1]):
                name = f"a{index}.d{number}"
                requests.append(WorkloadRequest(name, (header, article, dimension), self.output_len, "judgements"))
                joined = (*joined, dimension, AnswerOf(name))
            requests.append(WorkloadRequest(f"a{index}.score", (*joined, dimensions[-1]), self.score_output_len, "scores", turn=1))
        return requests


@dataclass(frozen=True, slots=True)
class Rag:
    """As DSPy's introductory pipeline: instruction and demonstrations, retrieved passages, a question."""

    num_questions: int = option(32, "questions")
    header_len: int = option(600, "tokens of instruction and demonstrations, the same for all")
    num_passages: int = option(24, "passages that there are")
    passages_per_question: int = option(3, "passages above a question, drawn in any order")
    passage_len: int = option(120, "tokens of a passage")
    question_len: int = option(20, "tokens of a question")
    output_len: int = option(64, "tokens of an answer")
    concurrency: int = option(8, "requests at a time, where the command says nothing")

    @property
    def about(self) -> str:
        return (
            f"Retrieval: {self.header_len} tokens of instruction, {self.passages_per_question} of {self.num_passages} passages of "
            f"{self.passage_len} tokens, {self.num_questions} questions of {self.question_len}, {self.output_len} out."
        )

    def requests(self, draw: Draw) -> list[WorkloadRequest]:
        if self.passages_per_question > self.num_passages:
            raise ValueError(f"workload rag: passages_per_question: expected at most {self.num_passages}, got {self.passages_per_question}")
        header, passages = draw.ids(self.header_len), draw.strangers(self.num_passages, self.passage_len)
        return [
            WorkloadRequest(
                f"q{index}", (header, *draw.rng.sample(passages, self.passages_per_question), question), self.output_len, "questions"
            )
            for index, question in enumerate(draw.strangers(self.num_questions, self.question_len))
        ]
