"""docs/compat.md: the table of what ran, kept between runs, so that a run of one tool leaves the rows of the others."""

import re
from dataclasses import dataclass
from pathlib import Path

HEAD = """# Tools that run against this server unchanged

`make compat` makes one environment per tool, starts `radixserve serve` with the default model in float32, runs each tool against it
and writes this table; `make compat ARGS="--only kvlint"` runs one. The requests that the tools sent are in `tests/http/recorded/`;
the test suite replays them.

| tool | version | command | result | date |
|---|---|---|---|---|
"""
TAIL = """
What is checked, beyond that the tool ends well:
- kvlint simulates a prefix cache of its own; its hit rate must be that of our counters, at page size 1 (its SGLang model) and 16
  (its vLLM model).
- lm-eval must give the same log-likelihoods (within 1e-3) and texts as its own transformers backend, with a cold and a warm cache,
  and with this server as its tokenizer.
- bench_serving must count as many cached tokens as our counter. It is unpacked from SGLang's wheel without the engine; what it
  imports of the engine (a constant, two functions that join an address) is replaced.
- smg: the header that names the server behind a reply must not change within a prefix; after a SIGKILL no reply may be anything
  but a stream, though streams that had begun on the lost server end in an error.

Not run:
- aiperf 0.13.0: can be downloaded; no check is written (guidellm stands for it).
- the npm package openai 7.59.0: the registry can be reached; no check is written.
- `vllm bench serve`: comes with vLLM alone, which is gigabytes.
- inference-perf: needs Python 3.12.
- llama-index: no check is written.
"""


@dataclass(frozen=True, slots=True)
class Row:
    tool: str
    version: str
    command: str
    result: str
    date: str


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


def read_rows(path: Path) -> dict[str, Row]:
    """Rows by tool; none if there is no such file."""
    if not path.is_file():
        return {}
    table = path.read_text(encoding="utf-8").split("|---|---|---|---|---|\n")[-1]
    rows = {}
    for line in table.splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 5:
            rows[cells[0]] = Row(cells[0], cells[1], cells[2].strip("`"), cells[3], cells[4])
    return rows


def write_rows(rows: dict[str, Row], path: Path) -> None:
    lines = []
    for row in rows.values():
        command = f"`{_cell(row.command)}`" if row.command else ""
        lines.append(f"| {_cell(row.tool)} | {_cell(row.version)} | {command} | {_cell(row.result)} | {row.date} |\n")
    path.write_text(HEAD + "".join(lines) + TAIL, encoding="utf-8")
