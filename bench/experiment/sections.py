"""The sections of a report, each a list of blocks made from results and the pictures that were drawn."""

from collections.abc import Callable, Sequence

from bench.experiment import figures as f
from bench.experiment.findings import cards, sentences, subject
from bench.experiment.lesson import lesson_in_words, perturbed_groups
from bench.experiment.page import Block, Bullets, Cards, Heading, Picture, Table, Text, grouped
from bench.experiment.results import Results, Run, TtftResult
from bench.experiment.wording import NOT_TOLD, listed, ms, percent, seconds, spread_of, times

STEADY = 1.25  # greatest over least of equal runs, up to which nothing is said
Pictures = dict[str, str | None]  # file name by the name of its plot; None: nothing to show


def picture(pictures: Pictures, name: str, alt: str, caption: str = "") -> list[Block]:
    file = pictures.get(name)
    return [Picture(file, alt, caption)] if file else []


def over(runs: Sequence[Run], figure_of: Callable[[Run], float | None]) -> f.Spread | None:
    return f.over_repeats([figure_of(run) for run in runs])


def _token_rate(run: Run) -> float | None:
    return rates.token_rate if (rates := f.hit_rates(run.records)) else None


def _request_rate(run: Run) -> float | None:
    return rates.request_rate if (rates := f.hit_rates(run.records)) else None


def conditions(results: Results) -> list[tuple[str, str, float | None]]:
    """(what is shown, load, rate) in the plan's order."""
    closed: list[tuple[str, str, float | None]] = [(load.label, load.label, None) for load in results.closed_loads]
    return closed + [(f"{load.label}, {rate:g}/s", load.label, rate) for load in results.open_loads for rate in load.rates]


def first_screen(results: Results, pictures: Pictures) -> list[Block]:
    plan = results.plan
    repeats = ["once" if number == 1 else f"{number} times" for number in sorted({load.repeats for load in plan.loads})]
    skipped = [server.label for server in results.servers if server.skipped]
    lead = (
        f"{plan.about} {listed(results.labels).capitalize()} ran in turn on the same prompts: each load "
        f"{' or '.join(repeats)}, caches emptied before each run. "
        f"{results.environment.get('processor', '')}. {results.started_at}."
    )
    if skipped:
        lead += f" Not there, so skipped: {listed(skipped)}."
    found = cards(results)
    return [
        Heading(plan.title, 1),
        Text(lead.strip(), is_lead=True),
        *_warnings(results),
        *([Cards(found)] if found else []),
        *picture(pictures, "overview", "Times faster, prompt tokens re-used, and where the time went, load by load"),
        Heading("What it says", 2),
        Bullets(sentences(results)),
    ]


def _warnings(results: Results) -> list[Block]:
    blocks: list[Block] = []
    if results.is_partial:
        said = f"**Partial results.** {len(results.runs)} of {results.num_planned_runs} runs were measured before the experiment ended."
        blocks.append(Text(f"{said} What is missing has no figure here."))
    failed = [(run, len(run.failed)) for run in results.runs if run.failed]
    if failed:
        most, num_most = max(failed, key=lambda pair: pair[1])
        total, of_all = sum(number for _, number in failed), sum(len(run.records) for run in results.runs)
        said = f"**Requests failed:** {total} of {of_all}, in one run of {most.server} on {most.load} {num_most} of {len(most.records)}."
        blocks.append(Text(f"{said} Runs with failures are left out of the ratios, since half a load takes half the time."))
    return blocks + _unsteady(results)


def _unsteady(results: Results) -> list[Block]:
    worst = f.unsteadiness(results)
    if worst is None or worst[1] < STEADY:
        return []
    said = (
        f"**The machine was not steady.** Equal runs of {results.plan.baseline} on {worst[0]} differ by up to {times(worst[1])}, so read "
        "ratios of times with their spread. Hit rates and token counts do not depend on it."
    )
    return [Text(said)]


def reuse(results: Results, pictures: Pictures) -> list[Block]:
    rows = []
    for shown, load, rate in conditions(results):
        for server in results.labels:
            runs = results.runs_of(load, server, rate)
            hit, requests = over(runs, _token_rate), over(runs, _request_rate)
            ideal = over(runs, lambda run: run.ideal_hit_rate)
            computed = over(runs, f.prefilled_tokens)
            rows.append(
                (
                    shown,
                    server,
                    percent(hit.median if hit else None),
                    percent(ideal.median if ideal else None),
                    percent(requests.median if requests else None),
                    spread_of(computed, digits=0),
                )
            )
    return [
        Heading("What was re-used"),
        Table(
            ("load", "server", "token hit rate", "ideal", "requests with any hit", "prompt tokens computed"),
            grouped(rows),
            "Token hit rate: cached over prompt tokens, by the server's usage. Ideal: an endless pool and requests one after another. "
            "One re-used token makes a request a hit, so the fifth column says little without the third.",
            num_word_columns=2,
        ),
        *picture(pictures, "prefilled", "Prompt tokens computed in a run, by load and server"),
    ]


def attribution(results: Results, pictures: Pictures) -> list[Block]:
    rows, splits = [], []
    for load in (load.label for load in results.closed_loads):
        for server in results.labels:
            splits.append((load, server, *_split_cells(results.runs_of(load, server))))
            if server != results.plan.baseline and (pairs := f.pairs(results, load, server)):
                rows.append((load, server, *_pair_cells(pairs)))
    blocks: list[Block] = [
        Heading("What the tree saves, and what it cannot"),
        Text(
            "A prefix tree saves **prefill**: h, the token hit rate, of a share f of the step time. So the total time can fall to 1 - h "
            f"f at the least, and the ratio to {results.plan.baseline} is at most 1 / (1 - h f). **Decode** computes every output token "
            "with or without a tree."
        ),
        Table(
            ("load", "server", "h", "f", "bound 1/(1-hf)", "measured ratio", "each pair", "of the bound", "TTFT p50 ratio"),
            grouped(rows),
            f"Measured ratio: total time of {results.plan.baseline} over that of the server, pair by pair, median (least to greatest). "
            "A decode row in a step that also held prompt tokens is taken off f at what it costs in the other steps. TTFT p50 ratio: the "
            "median time to first token over that of the baseline; below 1 is sooner.",
            num_word_columns=2,
        ),
        Table(
            ("load", "server", "total", "prefill", "decode", "tree, scheduler", "no step"),
            grouped(splits),
            "Mean seconds of a run, from the engine's own step times. No step: nothing to compute, or HTTP and client.",
            num_word_columns=2,
        ),
    ]
    return blocks + _floor(results, pictures)


def _pair_cells(pairs: list[f.Pair]) -> tuple[str, ...]:
    ratio = f.over_repeats([pair.time_ratio for pair in pairs])
    bound = f.over_repeats([pair.bound for pair in pairs])
    share = f.over_repeats([pair.prefill_share for pair in pairs])
    hit = over([pair.other for pair in pairs], _token_rate)
    reached = f.over_repeats([pair.of_bound for pair in pairs])
    return (
        percent(hit.median if hit else None),
        percent(share.median if share else None),
        times(bound.median if bound else None),
        spread_of(ratio, unit="x"),
        ", ".join(f"{pair.time_ratio:.2f}" for pair in pairs),
        percent(reached.median if reached else None, 0),
        spread_of(f.over_repeats([pair.ttft_ratio for pair in pairs])),
    )


def _split_cells(runs: Sequence[Run]) -> tuple[str, ...]:
    total = over(runs, lambda run: run.wall_s)
    split = f.mean_split(runs)
    if split is None:
        return (seconds(total.median if total else None), *[NOT_TOLD] * 4)
    return (seconds(split.total), seconds(split.prefill), seconds(split.decode), f"{split.bookkeeping:.3f} s", seconds(split.idle))


def _floor(results: Results, pictures: Pictures) -> list[Block]:
    if not results.ttft:
        return []
    rows = tuple((f"{pair.n:,}", f"{pair.p:,}", *_floor_cells(pair)) for pair in results.ttft)
    return [
        Heading("One request at a time: a hit against the floor", 3),
        Table(
            ("n, prompt tokens", "p, of these re-used", "cold TTFT, ms", "hit TTFT, ms", "hit / cold", "floor", "ratio / floor"),
            rows,
            "Floor: F(n, p) / F(n, 0) with F(n, p) = 2 N (n - p) + 2 L d (n² - p²) operations (N parameters, L layers, width d): "
            "arithmetic alone, at one rate for all of it, without HTTP and the fixed cost of a step.",
            num_word_columns=0,
        ),
        *_parts_of_a_hit(results),
        *picture(pictures, "ttft_floor", "Time to first token of a hit over that of a cold prompt, beside the floor"),
    ]


def _floor_cells(pair: TtftResult) -> tuple[str, ...]:
    return (ms(pair.cold_s), ms(pair.hit_s), f"{pair.ratio:.3f}", f"{pair.floor:.3f}", f"{pair.ratio / pair.floor:.2f}")


def _parts_of_a_hit(results: Results) -> list[Block]:
    """Where the time to a hit's first token goes, as far as the server tells."""
    rows = []
    for pair in results.ttft:
        if pair.hit_step_s is not None and pair.hit_server_s is not None and pair.steps_over_floor is not None:
            parts = (pair.hit_step_s, pair.hit_server_s - pair.hit_step_s, pair.hit_s - pair.hit_server_s)
            rows.append((f"{pair.n:,}", f"{pair.p:,}", *map(ms, parts), f"{pair.steps_over_floor:.2f}"))
    if not rows:
        return []
    return [
        Table(
            ("n", "p", "in the step, ms", "elsewhere in the server, ms", "client and connection, ms", "ratio / floor of the steps alone"),
            tuple(rows),
            "Where the time to a hit's first token goes, in medians. The step computes the tokens that were not re-used. Elsewhere in the "
            "server: reading the request, the way to the engine and back, making the first event.",
            num_word_columns=0,
        )
    ]


def lesson(results: Results, pictures: Pictures) -> list[Block]:
    server = subject(results)
    groups = perturbed_groups(results, server) if server else []
    if not groups:
        return []
    rows = tuple((group.change, percent(group.front), percent(group.end), percent(group.shareable)) for group in groups)
    return [
        Heading("Same meaning, other bytes"),
        Text(lesson_in_words(groups)),
        Table(("change", "at the front", "at the end", "ideal for the end"), rows, f"Token hit rates of the server `{server}`."),
        *picture(pictures, "perturbed", "Token hit rate by kind of change, at the front and at the end"),
    ]
