"""Reports made from recorded results: what they say, that they need nothing else, and that the one in docs/ is what this code writes."""

import dataclasses
import re
from pathlib import Path

import pytest

from bench.experiment.findings import cards, sentences
from bench.experiment.page import Bullets, Heading, Picture, Table, Text, grouped, to_html, to_markdown
from bench.experiment.report import blocks_of, draw, write_report
from bench.experiment.results import Results, ResultsFile, read_results
from tests.support.recorded_experiment import recorded_results, run

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "example-report"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_report(recorded_results(), folder)
    return folder


def test_the_first_screen_tells_ratio_hit_rate_and_time() -> None:
    ratio, hits, time = cards(recorded_results())
    assert (ratio.value, ratio.label) == ("2.30x", "as fast as off on shared")
    assert ratio.note == "2 pairs of runs, 2.20 to 2.40; saving prefill alone allows 2.50x: 92 % of that was reached"
    assert (hits.value, hits.note) == ("80.0 %", "ideal 80.0 %, so 100.0 % of what could be re-used")
    assert (time.value, time.label) == ("-67 %", "time spent on prefill, shared")
    assert "decode, which no tree can save, 0.99 s to 0.89 s" in time.note


def test_what_the_sentences_say() -> None:
    said = "\n".join(sentences(recorded_results()))
    assert "`random`: nothing is shared, so there is nothing to gain: 1.00x as fast as off." in said
    assert "Prefill is 75 % of off's step time, so saving that part of it allows at most 2.50x; measured 2.30x (2.20 to 2.40)" in said
    assert "250 ms instead of 1,000 for 800 of 1,000 tokens. Beside a cold prompt that is 1.25 times the least" in said
    assert "The engine's steps alone are at 1.11; the rest is fixed cost" in said
    assert "on sustains 2 requests/s and off sustains 1 requests/s (of the rates tried: 1, 2)" in said
    assert "**What changes belongs at the end of a prompt.**" in said
    assert "100 tokens evicted and 0 requests put back to wait in 8 runs of on." in said


def test_a_hit_rate_below_the_ideal_is_explained() -> None:
    results = recorded_results()
    runs = tuple(dataclasses.replace(one, ideal_hit_rate=0.9) if one.load == "shared" else one for one in results.runs)
    said = "\n".join(sentences(dataclasses.replace(results, runs=runs)))
    assert "80.0 % of the prompt tokens re-used, ideal 90.0 % (below it without evictions: requests that came together" in said


def test_a_ratio_above_its_bound_is_not_called_a_success() -> None:
    results = recorded_results()
    runs = tuple(dataclasses.replace(one, wall_s=1.0) if (one.load, one.server) == ("shared", "on") else one for one in results.runs)
    fast = dataclasses.replace(results, runs=runs)
    assert cards(fast)[0].note == "2 pairs of runs, 4.40 to 4.80; saving prefill alone allows 2.50x: more than that, see below"
    assert "decode took 0.89 s instead of 0.99 s as well" in "\n".join(sentences(fast))
    name = "radixserve_decode_step_seconds_total"
    runs = tuple(dataclasses.replace(one, counters={**one.counters, name: 1.0}) for one in fast.runs)
    assert "which steady runs cannot be: look at the spread" in "\n".join(sentences(dataclasses.replace(fast, runs=runs)))


def test_the_page_needs_nothing_else(folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf-8")
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert sources
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "<script" not in page
    assert "url(" not in page
    assert len(sources) == len(list(folder.glob("*.png"))) == 11


def test_markdown_and_pictures_belong_together(folder: Path) -> None:
    text = (folder / "report.md").read_text(encoding="utf-8")
    named = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert set(named) == {path.name for path in folder.glob("*.png")}
    assert all((folder / name).read_bytes().startswith(PNG) for name in named)
    assert "| shared | on | 80.0 % | 75.0 % | 2.50x | 2.30x (2.20 to 2.40) | 2.20, 2.40 | 92 % | 0.25 |" in text
    assert "| 1,000 | 800 | 1,000 | 250 | 0.250 | 0.200 | 1.25 |" in text


def test_the_request_hit_ratio_stands_only_beside_the_token_hit_rate(folder: Path) -> None:
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert "| shared | on | 80.0 % | 80.0 % | 75.0 % | 72 |" in text
    assert "| load | server | token hit rate | ideal | requests with any hit | prompt tokens computed |" in text
    assert text.count("requests with any hit") == 1


def test_failures_and_counters_are_told(folder: Path) -> None:
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert "the server's counter gained in **14 of 14** runs that tell both" in text
    assert "Failed requests: 2 of 104 (the first: RequestFailedError: HTTP 503)." in text


def silent(results: Results) -> Results:
    """As from servers that tell nothing but text and times."""
    runs = tuple(
        dataclasses.replace(
            one, counters={}, samples=(), records=tuple(dataclasses.replace(r, prompt_tokens=None, cached_tokens=None) for r in one.records)
        )
        for one in results.runs
    )
    return dataclasses.replace(results, runs=runs, ttft=())


def test_servers_that_tell_nothing_get_a_report(tmp_path: Path) -> None:
    results = silent(recorded_results())
    pictures = draw(results, tmp_path)
    assert {name for name, file in pictures.items() if file is None} == {
        "prefilled",
        "pressure",
        "pool_over_time",
        "ttft_floor",
        "perturbed",
    }
    text = to_markdown(blocks_of(results, pictures))
    assert "on does not tell what it re-used" in text
    assert "| shared | on | n/a | n/a | n/a | 2.30x (2.20 to 2.40) | 2.20, 2.40 | n/a | 0.25 |" in text
    assert "in **0 of 0** runs" in text


def test_a_server_that_was_skipped_is_named(tmp_path: Path) -> None:
    results = recorded_results()
    servers = (
        *results.servers,
        dataclasses.replace(results.servers[0], label="peer", skipped="the environment variable PEER_X is not set"),
    )
    text = to_markdown(blocks_of(dataclasses.replace(results, servers=servers), {}))
    assert "Not there, so skipped: peer." in text
    assert "skipped: the environment variable PEER_X is not set" in text


def test_an_unsteady_machine_is_said_at_once() -> None:
    results = recorded_results()
    assert "not steady" not in to_markdown(blocks_of(results, {}))
    slow = run("random", "off", 2, 9.0, results.runs_of("random", "off")[0].records, {})
    text = to_markdown(blocks_of(dataclasses.replace(results, runs=(*results.runs, slow)), {}))
    assert "**The machine was not steady.** Equal runs of off on random differ by up to 3.00x" in text


def test_partial_results_get_a_report_that_says_so(tmp_path: Path) -> None:
    """After any run an experiment may end: every figure that is missing is n/a, and nothing is said of what was not measured."""
    results = recorded_results()
    assert not results.is_partial
    file = ResultsFile(tmp_path / "results.json")
    (tmp_path / "report.md").write_text("of an experiment before")
    for number in range(1, len(results.runs) + 1):
        file.write(dataclasses.replace(results, runs=results.runs[:number], ttft=()))
        assert not (tmp_path / "report.md").exists()
        partial = read_results(tmp_path / "results.json")
        assert (len(partial.runs), partial.is_partial) == (number, True)
        text = to_markdown(blocks_of(partial, {}))
        assert f"**Partial results.** {number} of 16 runs were measured before the experiment ended." in text
        assert ("requests/s (of the rates tried" in text) == (number >= 15)
    file.write(results)
    assert not read_results(tmp_path / "results.json").is_partial
    write_report(dataclasses.replace(results, runs=results.runs[:1], ttft=()), tmp_path)


def test_failures_are_said_at_once() -> None:
    results = recorded_results()
    text = to_markdown(blocks_of(results, {}))
    assert "**Requests failed:** 2 of 104, in one run of off on rising 1 of 10." in text.partition("## What it says")[0]
    whole = tuple(one for one in results.runs if not one.failed)
    assert "Requests failed" not in to_markdown(blocks_of(dataclasses.replace(results, runs=whole), {}))


def test_lateness_is_of_open_loops_alone() -> None:
    results = recorded_results()
    runs = [dataclasses.replace(one, records=tuple(dataclasses.replace(r, scheduled_s=0.0) for r in one.records)) for one in results.runs]
    runs = [late if late.rate is None else one for late, one in zip(runs, results.runs)]
    text = to_markdown(blocks_of(dataclasses.replace(results, runs=tuple(runs)), {}))
    assert "The generator sent open-loop requests 0.0 ms (p50) to 0.0 ms (most) after their time." in text


def test_every_server_is_compared_in_words() -> None:
    """A third server, a quarter slower than on, and one repeat of everything."""
    results = recorded_results()
    first = [one for one in results.runs if one.repeat == 0]
    third = [dataclasses.replace(one, server="int8", wall_s=one.wall_s * 1.25) for one in first if one.server == "on"]
    servers = (*results.servers, dataclasses.replace(results.servers[0], label="int8"))
    plan_servers = (*results.plan.servers, dataclasses.replace(results.plan.servers[0], label="int8", about="another model"))
    loads = tuple(dataclasses.replace(load, repeats=1) for load in results.plan.loads)
    plan = dataclasses.replace(results.plan, servers=plan_servers, loads=loads)
    more = dataclasses.replace(results, plan=plan, servers=servers, runs=(*first, *third))
    text = to_markdown(blocks_of(more, {}))
    assert "On, off and int8 ran in turn on the same prompts: each load once, caches emptied" in text
    assert "one pair of runs; saving prefill alone" in text
    assert "| int8 | 0.1.0 | `radixserve serve`; another model |" in text
    ratios = re.findall(r"- `shared`: .*measured ([0-9.]+)x .* That was on; beside it int8 ([0-9.]+)x\.", text)
    assert [float(on) for on, _ in ratios] == [pytest.approx(1.25 * float(int8), abs=0.01) for _, int8 in ratios] != []
    assert "beside it" not in to_markdown(blocks_of(results, {}))


def test_a_generator_that_was_late_is_said() -> None:
    results = recorded_results()
    runs = [
        dataclasses.replace(one, records=tuple(dataclasses.replace(r, scheduled_s=r.sent_s - 0.3) for r in one.records))
        if one.rate is not None
        else one
        for one in results.runs
    ]
    text = to_markdown(blocks_of(dataclasses.replace(results, runs=tuple(runs)), {}))
    assert "requests 300 ms (p50) to 300 ms (most) after their time: **it was a bottleneck, so arrivals were not quite those" in text
    on_time = [dataclasses.replace(one, records=tuple(dataclasses.replace(r, scheduled_s=r.sent_s) for r in one.records)) for one in runs]
    assert "bottleneck" not in to_markdown(blocks_of(dataclasses.replace(results, runs=tuple(on_time)), {}))


def test_where_the_time_to_a_hits_first_token_goes() -> None:
    """250 ms: 200 in the step, 30 elsewhere in the server, 20 outside; a server that does not tell has no such table."""
    results = recorded_results()
    text = to_markdown(blocks_of(results, {}))
    assert "| 1,000 | 800 | 200 | 30.0 | 20.0 | 1.11 |" in text
    untold = dataclasses.replace(results, ttft=tuple(dataclasses.replace(pair, hit_step_s=None) for pair in results.ttft))
    text = to_markdown(blocks_of(untold, {}))
    assert "of the steps alone" not in text
    assert "The engine's steps alone" not in text


def test_text_is_shown_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    page = to_html([Heading("<b>"), Text("a **b** `c<d`"), Picture("a.png", '"x"'), Bullets(("1 < 2",))], "</title>", tmp_path)
    assert "<h2>&lt;b&gt;</h2>" in page
    assert "<p>a <strong>b</strong> <code>c&lt;d</code></p>" in page
    assert 'alt="&quot;x&quot;"' in page
    assert "<title>&lt;/title&gt;</title>" in page
    assert to_markdown([Table(("a", "b"), (("x|y", "1"),))]) == "| a | b |\n| --- | ---: |\n| x\\|y | 1 |\n"
    assert grouped([("a", "1"), ("a", "2"), ("b", "3")]) == (("a", "1"), ("", "2"), ("b", "3"))


def test_the_report_in_docs_is_what_this_code_writes() -> None:
    """Else: python -m bench.experiment --report docs/example-report"""
    results = read_results(EXAMPLE / "results.json")
    text = (EXAMPLE / "report.md").read_text(encoding="utf-8")
    pictures = {path.stem: path.name for path in EXAMPLE.glob("*.png")}
    names = {"itl": "token_latency", "pool": "pool_over_time"}
    assert text == to_markdown(blocks_of(results, {names.get(stem, stem): name for stem, name in pictures.items()}))
