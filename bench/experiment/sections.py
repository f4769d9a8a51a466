"""The sections of a report, each a list of blocks made from results and the pictures that were drawn."""

import shlex
from collections.abc import Callable, Sequence

from bench.experiment import figures as f
from bench.experiment.findings import cards, sentences, subject
from bench.experiment.lesson import lesson_in_words, perturbed_groups
from bench.experiment.page import Block, Bullets, Cards, Code, Heading, Picture, Table, Text
from bench.experiment.results import Results, Run
from bench.experiment.wording import NOT_TOLD, count, listed, ms, percent, scaled, seconds, spread_of, times

Pictures = dict[str, str | None]  # file name by the name of its plot; None: nothing to show


def _picture(pictures: Pictures, name: str, alt: str, caption: str = "") -> list[Block]:
    file = pictures.get(name)
    return [Picture(file, alt, caption)] if file else []


def _over(runs: Sequence[Run], figure_of: Callable[[Run], float | None]) -> f.Spread | None:
    return f.over_repeats([figure_of(run) for run in runs])


def _token_rate(run: Run) -> float | None:
    return rates.token_rate if (rates := f.hit_rates(run.records)) else None


def _request_rate(run: Run) -> float | None:
    return rates.request_rate if (rates := f.hit_rates(run.records)) else None


def _conditions(results: Results) -> list[tuple[str, str, float | None]]:
    """(what is shown, load, rate) in the plan's order."""
    closed: list[tuple[str, str, float | None]] = [(load.label, load.label, None) for load in results.closed_loads]
    return closed + [(f"{load.label}, {rate:g}/s", load.label, rate) for load in results.open_loads for rate in load.rates]


def first_screen(results: Results, pictures: Pictures) -> list[Block]:
    plan = results.plan
    repeats = sorted({load.repeats for load in plan.loads})
    skipped = [server.label for server in results.servers if server.skipped]
    lead = (
        f"{plan.about} {listed(results.labels).capitalize()} in turn on the same prompts, {'/'.join(map(str, repeats))} repeats of each load, "
        f"cache flushed before each run. {results.environment.get('processor', '')}. {results.started_at}."
    )
    if skipped:
        lead += f" Not there, so skipped: {listed(skipped)}."
    found = cards(results)
    return [
        Heading(plan.title, 1),
        Text(lead.strip(), is_lead=True),
        *([Cards(found)] if found else []),
        *_picture(pictures, "overview", "Times faster, prompt tokens re-used, and where the time went, load by load"),
        Heading("What it says", 2),
        Bullets(sentences(results)),
    ]


def reuse(results: Results, pictures: Pictures) -> list[Block]:
    rows = []
    for shown, load, rate in _conditions(results):
        for server in results.labels:
            runs = results.runs_of(load, server, rate)
            hit, requests = _over(runs, _token_rate), _over(runs, _request_rate)
            ideal = _over(runs, lambda run: run.ideal_hit_rate)
            computed = _over(runs, f.prefilled_tokens)
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
            tuple(rows),
            "Token hit rate: cached over prompt tokens, by the server's usage. Ideal: an endless pool and requests one after another. "
            "One re-used token makes a request a hit, so the fifth column says little without the third.",
            num_word_columns=2,
        ),
        *_picture(pictures, "prefilled", "Prompt tokens computed in a run, by load and server"),
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
            "A prefix tree saves **prefill**: h, the token hit rate, of a share f of the step time. So the total time can fall to 1 - h f at the "
            f"least, and the ratio to {results.plan.baseline} is at most 1 / (1 - h f). **Decode** computes every output token with or without a tree."
        ),
        Table(
            ("load", "server", "h", "f", "1 / (1 - h f)", "measured ratio", "each pair", "of the bound", "TTFT p50 ratio"),
            tuple(rows),
            f"Measured ratio: total time of {results.plan.baseline} over that of the server, pair by pair, median (least to greatest). "
            "A decode row in a step that also held prompt tokens is taken off f at what it costs in the other steps.",
            num_word_columns=2,
        ),
        Table(
            ("load", "server", "total", "prefill", "decode", "tree, scheduler", "no step"),
            tuple(splits),
            "Mean seconds of a run, from the engine's own step times. No step: nothing to compute, or HTTP and client.",
            num_word_columns=2,
        ),
    ]
    return blocks + _floor(results, pictures)


def _pair_cells(pairs: list[f.Pair]) -> tuple[str, ...]:
    ratio = f.over_repeats([pair.time_ratio for pair in pairs])
    bound = f.over_repeats([pair.bound for pair in pairs])
    share = f.over_repeats([pair.prefill_share for pair in pairs])
    hit = _over([pair.other for pair in pairs], _token_rate)
    reached = ratio.median / bound.median if ratio and bound else None
    return (
        percent(hit.median if hit else None),
        percent(share.median if share else None),
        times(bound.median if bound else None),
        spread_of(ratio, unit="x"),
        ", ".join(f"{pair.time_ratio:.2f}" for pair in pairs),
        percent(reached, 0),
        spread_of(f.over_repeats([pair.ttft_ratio for pair in pairs])),
    )


def _split_cells(runs: Sequence[Run]) -> tuple[str, ...]:
    total = _over(runs, lambda run: run.wall_s)
    split = f.mean_split(runs)
    if split is None:
        return (seconds(total.median if total else None), *[NOT_TOLD] * 4)
    return (seconds(split.total), seconds(split.prefill), seconds(split.decode), f"{split.bookkeeping:.3f} s", seconds(split.idle))


def _floor(results: Results, pictures: Pictures) -> list[Block]:
    if not results.ttft:
        return []
    rows = tuple(
        (
            f"{pair.n:,}",
            f"{pair.p:,}",
            ms(pair.cold_s),
            ms(pair.hit_s),
            f"{pair.ratio:.3f}",
            f"{pair.floor:.3f}",
            f"{pair.ratio / pair.floor:.2f}",
        )
        for pair in results.ttft
    )
    return [
        Heading("One request at a time: a hit against the floor", 3),
        Table(
            ("n, prompt tokens", "p, of these re-used", "cold TTFT, ms", "hit TTFT, ms", "hit / cold", "floor", "ratio / floor"),
            rows,
            "Floor: F(n, p) / F(n, 0) with F(n, p) = 2 N (n - p) + 2 L d (n² - p²) operations (N parameters, L layers, width d): arithmetic alone, "
            "at one rate for all of it, without HTTP and the fixed cost of a step.",
            num_word_columns=0,
        ),
        *_picture(pictures, "ttft_floor", "Time to first token of a hit over that of a cold prompt, beside the floor"),
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
        Table(("change", "at the front", "at the end", "ideal for the end"), rows, f"Token hit rates on {server}."),
        *_picture(pictures, "perturbed", "Token hit rate by kind of change, at the front and at the end"),
    ]


def latency(results: Results, pictures: Pictures) -> list[Block]:
    rows = []
    for shown, load, rate in _conditions(results):
        for server in results.labels:
            runs = results.runs_of(load, server, rate)
            ttft = [scaled(_over(runs, f.ttft_quantile(name)), 1e3) for name in ("p50", "p95", "p99")]
            gaps = [scaled(_over(runs, f.gap_quantile(name)), 1e3) for name in ("p50", "p95", "p99")]
            tpot = _over(runs, f.tpot_p50)
            shown_gaps = " / ".join(NOT_TOLD if gap is None else f"{gap.median:.1f}" for gap in gaps)
            rows.append((shown, server, *(spread_of(each, digits=0) for each in ttft), ms(tpot.median if tpot else None), shown_gaps))
    num = sorted({len(run.records) for run in results.runs})
    return [
        Heading("Latency"),
        Table(
            ("load", "server", "TTFT p50, ms", "TTFT p95, ms", "TTFT p99, ms", "TPOT p50, ms", "between tokens p50 / p95 / p99, ms"),
            tuple(rows),
            f"Percentiles within a run ({num[0]} to {num[-1]} requests, so a p99 is the slowest or near it), then the median (least to greatest) over "
            "repeats. TTFT is from a request's own sending to its first token: what it waited in the server's queue is in it.",
            num_word_columns=2,
        ),
        *_picture(pictures, "ttft", "Time to first token at the 50th, 95th and 99th percentile"),
        *_picture(
            pictures, "ttft_distribution", "Distribution of the time to first token", "All repeats together; further left is sooner."
        ),
        *_picture(pictures, "token_latency", "Time between two tokens of a stream"),
    ]


def throughput(results: Results, pictures: Pictures) -> list[Block]:
    rows = []
    for shown, load, rate in _conditions(results):
        for server in results.labels:
            runs = results.runs_of(load, server, rate)
            queue = scaled(_over(runs, f.queue_mean_s), 1e3)
            requests = spread_of(_over(runs, f.request_rate))
            rows.append((shown, server, spread_of(_over(runs, f.output_rate), digits=1), requests, spread_of(queue, digits=0)))
    head = ("load", "server", "output tokens/s", "requests/s", "mean time in the queue, ms")
    caption = "Queue: from arrival at the scheduler to first admission, by the server's own histogram."
    return [
        Heading("Throughput and queue"),
        Table(head, tuple(rows), caption, num_word_columns=2),
        *_picture(pictures, "throughput", "Throughput and time in the queue"),
    ]


def goodput(results: Results, pictures: Pictures) -> list[Block]:
    if not results.open_loads:
        return []
    limits, rows = results.plan.limits, []
    for load in results.open_loads:
        for rate in load.rates:
            for server in results.labels:
                runs = results.runs_of(load.label, server, rate)
                good, share = _over(runs, lambda run: f.goodput(run, limits)), _over(runs, lambda run: f.good_share(run, limits))
                rows.append((load.label, server, f"{rate:g}", spread_of(scaled(share, 100), digits=0), spread_of(good)))
    return [
        Heading("Goodput under load"),
        Text(
            f"A request is good if its first token came within {limits.ttft_ms:g} ms and its further ones at {limits.tpot_ms:g} ms each or less in the "
            "mean; a failed one is not good. Requests are sent at their own times, whether the server keeps up or not."
        ),
        Table(("load", "server", "requests/s offered", "% good", "good requests/s"), tuple(rows), num_word_columns=2),
        *_picture(
            pictures, "goodput", "Goodput against the offered rate", f"Dotted: {percent(limits.share, 0)} good (left), all good (right)."
        ),
    ]


def pool(results: Results, pictures: Pictures) -> list[Block]:
    rows = []
    for shown, load, rate in _conditions(results):
        for server in results.labels:
            runs = results.runs_of(load, server, rate)
            if runs and all(f.evicted(run) is not None for run in runs):
                cells = (_over(runs, f.peak_pool_use), _over(runs, f.peak_pool_cached))
                shares = [percent(cell.median if cell else None, 0) for cell in cells]
                moves = [spread_of(_over(runs, f.evicted), digits=0), spread_of(_over(runs, f.retracted), digits=0)]
                rows.append((shown, server, *shares, *moves))
    if not rows:
        return []
    return [
        Heading("The pool"),
        Table(
            ("load", "server", "peak held by running requests", "peak cached, free to go", "tokens evicted", "requests put back to wait"),
            tuple(rows),
            f"Peaks are of what was read from /metrics every {results.plan.sample_interval_s:g} s.",
            num_word_columns=2,
        ),
        *_picture(
            pictures, "pool_over_time", "Use of the pool over time", "First repeat of each load, at the highest rate of an open one."
        ),
        *_picture(pictures, "pressure", "Evictions and retractions"),
    ]


def checks(results: Results) -> list[Block]:
    told = [agree for run in results.runs if (agree := f.counts_agree(run)) is not None]
    failed = sum(record.error is not None for run in results.runs for record in run.records)
    late = [record.sent_s - record.scheduled_s for run in results.runs for record in run.records if record.scheduled_s is not None]
    first_error = next((record.error for run in results.runs for record in run.records if record.error), None)
    items = [
        f"Cached tokens added up by the client equal the growth of the server's counter in **{sum(told)} of {len(told)}** runs that tell both.",
        f"Failed requests: {count(failed)} of {count(sum(len(run.records) for run in results.runs))}"
        + (f" (the first: {first_error})." if failed else "."),
    ]
    if late:
        lag = f.quantiles(late)
        assert lag is not None
        items.append(f"The generator sent open-loop requests {ms(lag.p50)} ms (p50) to {ms(max(late))} ms (most) after their time.")
    return [Heading("Can it be trusted?"), Bullets(tuple(items))]


def method(results: Results) -> list[Block]:
    plan = results.plan
    servers = tuple((s.label, s.version or NOT_TOLD, f"skipped: {s.skipped}" if s.skipped else f"`{s.command}`") for s in results.servers)
    loads = tuple(
        (load.label, load.workload, _load_words(load.options, load.concurrency, load.rates, load.arrivals), load.about)
        for load in plan.loads
    )
    return [
        Heading("How it was made"),
        Code(results.command),
        Table(("", ""), tuple(results.environment.items()), num_word_columns=2),
        Table(("server", "version", "command"), servers, num_word_columns=3),
        Table(
            ("load", "workload", "options", "about"),
            loads,
            f"Seed {plan.seed}; it took {results.took_s / 60:.1f} minutes.",
            num_word_columns=4,
        ),
        Text(
            "All servers stay up; they run in turn, the order reversed from repeat to repeat, so a drift of the machine meets all of them. Each repeat has prompts of "
            "its own, the same for every server. `results.json` holds every request; `--report` makes this page from it again."
        ),
    ]


def _load_words(options: dict[str, object], concurrency: int | None, rates: tuple[float, ...], arrivals: str) -> str:
    mode = f"{concurrency} at a time" if concurrency else f"{arrivals} arrivals at {', '.join(f'{rate:g}' for rate in rates)}/s"
    return ", ".join([mode, *(f"{name} {value}" for name, value in options.items())])


def command_line(arguments: Sequence[str]) -> str:
    return shlex.join(["python", "-m", "bench.experiment", *arguments])
