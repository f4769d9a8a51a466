"""Sections of a report about speed and load: latency, throughput, goodput, the pool."""

from bench.experiment import figures as f
from bench.experiment.page import Block, Heading, Table, Text, grouped
from bench.experiment.results import Results
from bench.experiment.sections import Pictures, conditions, over, picture
from bench.experiment.wording import NOT_TOLD, percent, scaled, spread_of


def _median_ms(spread: f.Spread | None) -> str:
    if spread is None:
        return NOT_TOLD
    return f"{spread.median:,.0f}" if spread.median >= 100 else f"{spread.median:.1f}"


def latency(results: Results, pictures: Pictures) -> list[Block]:
    rows = []
    for shown, load, rate in conditions(results):
        for server in results.labels:
            runs = results.runs_of(load, server, rate)
            ttft = [scaled(over(runs, f.ttft_quantile(name)), 1e3) for name in ("p50", "p95", "p99")]
            gaps = [scaled(over(runs, f.gap_quantile(name)), 1e3) for name in ("p50", "p95", "p99")]
            tpot = over(runs, f.tpot_p50)
            rows.append((shown, server, spread_of(ttft[0], digits=0), *map(_median_ms, (*ttft[1:], scaled(tpot, 1e3), *gaps))))
    num = sorted({len(run.records) for run in results.runs})
    return [
        Heading("Latency"),
        Table(
            ("load", "server", "TTFT p50, ms", "p95", "p99", "TPOT p50, ms", "ITL p50, ms", "p95", "p99"),
            grouped(rows),
            "TTFT: time to first token. TPOT: time per further token, in the mean of a request. ITL: each pause between two tokens. "
            f"Percentiles within a run ({num[0]} to {num[-1]} requests, so a p99 is the slowest or near it), then the median (least to "
            "greatest) over repeats. TTFT is from a request's own sending to its first token: what it waited in the server's queue is in "
            "it.",
            num_word_columns=2,
        ),
        *picture(pictures, "ttft", "Time to first token at the 50th, 95th and 99th percentile"),
        *picture(pictures, "ttft_distribution", "Distribution of the time to first token", "All repeats together; further left is sooner."),
        *picture(pictures, "token_latency", "Time between two tokens of a stream"),
    ]


def throughput(results: Results, pictures: Pictures) -> list[Block]:
    rows = []
    for shown, load, rate in conditions(results):
        for server in results.labels:
            runs = results.runs_of(load, server, rate)
            queue = scaled(over(runs, f.queue_mean_s), 1e3)
            requests = spread_of(over(runs, f.request_rate))
            rows.append((shown, server, spread_of(over(runs, f.output_rate), digits=1), requests, spread_of(queue, digits=0)))
    head = ("load", "server", "output tokens/s", "requests/s", "mean time in the queue, ms")
    caption = "Queue: from arrival at the scheduler to first admission, by the server's own histogram."
    return [
        Heading("Throughput and queue"),
        Table(head, grouped(rows), caption, num_word_columns=2),
        *picture(pictures, "throughput", "Throughput and time in the queue"),
    ]


def goodput(results: Results, pictures: Pictures) -> list[Block]:
    if not results.open_loads:
        return []
    limits, rows = results.plan.limits, []
    for load in results.open_loads:
        for rate in load.rates:
            for server in results.labels:
                runs = results.runs_of(load.label, server, rate)
                good, share = over(runs, lambda run: f.goodput(run, limits)), over(runs, lambda run: f.good_share(run, limits))
                rows.append((load.label, server, f"{rate:g}", spread_of(scaled(share, 100), digits=0), spread_of(good)))
    return [
        Heading("Goodput under load"),
        Text(
            f"A request is good if its first token came within {limits.ttft_ms:g} ms and its further ones at {limits.tpot_ms:g} ms each or "
            "less in the mean; a failed one is not good. Requests are sent at their own times, whether the server keeps up or not."
        ),
        Table(("load", "server", "requests/s offered", "% good", "good requests/s"), grouped(rows), num_word_columns=2),
        *picture(
            pictures, "goodput", "Goodput against the offered rate", f"Dotted: {percent(limits.share, 0)} good (left), all good (right)."
        ),
    ]


def pool(results: Results, pictures: Pictures) -> list[Block]:
    rows = []
    for shown, load, rate in conditions(results):
        for server in results.labels:
            runs = results.runs_of(load, server, rate)
            if runs and all(f.evicted(run) is not None for run in runs):
                cells = (over(runs, f.peak_pool_use), over(runs, f.peak_pool_cached))
                shares = [percent(cell.median if cell else None, 0) for cell in cells]
                moves = [spread_of(over(runs, f.evicted), digits=0), spread_of(over(runs, f.retracted), digits=0)]
                rows.append((shown, server, *shares, *moves))
    if not rows:
        return []
    return [
        Heading("The pool"),
        Table(
            (
                "load",
                "server",
                "peak held by running requests",
                "peak cached, may be evicted",
                "tokens evicted",
                "requests put back to wait",
            ),
            grouped(rows),
            f"Peaks are of what was read from /metrics every {results.plan.sample_interval_s:g} s.",
            num_word_columns=2,
        ),
        *picture(pictures, "pool_over_time", "Use of the pool over time", "First repeat of each load, at the highest rate of an open one."),
        *picture(pictures, "pressure", "Evictions and retractions"),
    ]
