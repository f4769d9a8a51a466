"""What the figures say, in sentences: made from the results alone, and silent where they do not tell."""

from bench.experiment import figures as f
from bench.experiment.lesson import lesson_in_words, perturbed_groups
from bench.experiment.page import Card
from bench.experiment.plan import LoadPlan
from bench.experiment.results import Results
from bench.experiment.wording import NOT_TOLD, count, listed, ms, percent, seconds, spread_of, times

GOOD_SHARE_OF_BOUND = 0.85
ABOVE = 1.02  # of the bound: more than steady runs differ
NEAR = 0.01  # hit rates closer than this are called equal


def subject(results: Results) -> str | None:
    """The server that is spoken of first: the first one that ran and is not the baseline."""
    return next((label for label in results.labels if label != results.plan.baseline), None)


def _hit_spread(results: Results, load: str, server: str) -> f.Spread | None:
    return f.over_repeats([rates.token_rate if (rates := f.hit_rates(run.records)) else None for run in results.runs_of(load, server)])


def _ideal(results: Results, load: str, server: str) -> float | None:
    spread = f.over_repeats([run.ideal_hit_rate for run in results.runs_of(load, server)])
    return None if spread is None else spread.median


def cards(results: Results) -> tuple[Card, ...]:
    """The three figures of the first screen, on the plan's headline load."""
    server, load = subject(results), results.plan.headline
    if server is None or not f.pairs(results, load, server):
        return ()
    return (_ratio_card(results, load, server), _hit_card(results, load, server), *_time_cards(results, load, server))


def _ratio_card(results: Results, load: str, server: str) -> Card:
    pairs = f.pairs(results, load, server)
    ratio = f.over_repeats([pair.time_ratio for pair in pairs])
    bound = f.over_repeats([pair.bound for pair in pairs])
    reached = f.over_repeats([pair.of_bound for pair in pairs])
    assert ratio is not None
    note = "one pair of runs" if len(pairs) == 1 else f"{len(pairs)} pairs of runs, {ratio.low:.2f} to {ratio.high:.2f}"
    if bound is not None and reached is not None:
        note += f"; saving prefill alone allows {times(bound.median)}: "
        note += "more than that, see below" if reached.median > ABOVE else f"{percent(reached.median, 0)} of that was reached"
    return Card(times(ratio.median), f"as fast as {results.plan.baseline} on {load}", note)


def _hit_card(results: Results, load: str, server: str) -> Card:
    hit, ideal = _hit_spread(results, load, server), _ideal(results, load, server)
    if hit is None or ideal is None:
        return Card(NOT_TOLD, f"tokens re-used on {load}", "the server does not tell")
    part = f", so {percent(hit.median / ideal, 1)} of what could be re-used" if ideal > 0 else ""
    return Card(percent(hit.median), f"of tokens re-used on {load}", f"ideal {percent(ideal)}{part}")


def _time_cards(results: Results, load: str, server: str) -> tuple[Card, ...]:
    ours = f.mean_split(results.runs_of(load, server))
    theirs = f.mean_split(results.runs_of(load, results.plan.baseline))
    if ours is None or theirs is None or theirs.prefill <= 0:
        return ()
    change = ours.prefill / theirs.prefill - 1
    note = (
        f"from {seconds(theirs.prefill)} to {seconds(ours.prefill)}; decode, which no tree can save, {seconds(theirs.decode)} to "
        f"{seconds(ours.decode)}; tree and scheduler {percent(ours.bookkeeping / ours.total)} of the time"
    )
    return (Card(f"{change * 100:+.0f} %", f"time spent on prefill, {load}", note),)


def sentences(results: Results) -> tuple[str, ...]:
    server = subject(results)
    if server is None:
        return ()
    said = [
        *(_of_load(results, load, server) + _of_others(results, load, server) for load in results.closed_loads),
        _of_floor(results),
        *(_of_rates(results, load) for load in results.open_loads),
        lesson_in_words(perturbed_groups(results, server)),
        _of_pressure(results, server),
    ]
    return tuple(sentence for sentence in said if sentence)


def _of_load(results: Results, load: LoadPlan, server: str) -> str:
    pairs = f.pairs(results, load.label, server)
    ratio = f.over_repeats([pair.time_ratio for pair in pairs])
    hit, ideal = _hit_spread(results, load.label, server), _ideal(results, load.label, server)
    if ratio is None:
        return ""
    head, speed = f"`{load.label}`: ", f"{spread_of(ratio, unit='x')} as fast as {results.plan.baseline}"
    if hit is None or ideal is None:
        return f"{head}{speed}; {server} does not tell what it re-used."
    if ideal < NEAR and hit.median < NEAR:
        split = f.mean_split(results.runs_of(load.label, server))
        cost = "" if split is None else f" Tree and scheduler took {percent(split.bookkeeping / split.total, 2)} of the time"
        return f"{head}nothing is shared, so there is nothing to gain: {speed}.{cost}{', which is what the tree can cost.' if cost else ''}"
    short = "" if hit.median >= ideal - NEAR else f" ({_why_short(results, load.label, server)})"
    re_used = f"{percent(hit.median)} of the prompt tokens re-used, ideal {percent(ideal)}{short}."
    return f"{head}{re_used} {_against_bound(pairs, speed, results)}"


def _of_others(results: Results, load: LoadPlan, server: str) -> str:
    """Where more than two servers ran: how the ones that are not spoken of compare with the baseline."""
    told = []
    for label in results.labels:
        if label not in (server, results.plan.baseline) and (pairs := f.pairs(results, load.label, label)):
            told.append(f"{label} {spread_of(f.over_repeats([pair.time_ratio for pair in pairs]), unit='x')}")
    return f" That was {server}; beside it {listed(told)}." if told else ""


def _why_short(results: Results, load: str, server: str) -> str:
    gone = f.over_repeats([f.evicted(run) for run in results.runs_of(load, server)])
    if gone is not None and gone.median > 0:
        return f"below it: {count(gone.median)} tokens were evicted in a run, so some had gone before they were asked for again"
    return "below it without evictions: requests that came together could not yet re-use each other"


def _against_bound(pairs: list[f.Pair], speed: str, results: Results) -> str:
    bound = f.over_repeats([pair.bound for pair in pairs])
    share = f.over_repeats([pair.prefill_share for pair in pairs])
    reached = f.over_repeats([pair.of_bound for pair in pairs])
    if bound is None or share is None or reached is None:
        return f"{speed[0].upper()}{speed[1:]}."
    if reached.median > ABOVE:
        verdict = f"above it, {_why_above(pairs)}"
    elif reached.median > 1:
        verdict = "at it"
    else:
        verdict = "close to it" if reached.median >= GOOD_SHARE_OF_BOUND else "**below what could be had**"
    rest = " Most of the time is decode, which a prefix tree cannot save." if share.median < 0.5 else ""
    return (
        f"Prefill is {percent(share.median, 0)} of {results.plan.baseline}'s step time, so saving that part of it allows at most "
        f"{times(bound.median)}; measured {speed}, {percent(reached.median, 0)} of the bound: {verdict}.{rest}"
    )


def _why_above(pairs: list[f.Pair]) -> str:
    ours, theirs = f.mean_split([pair.other for pair in pairs]), f.mean_split([pair.baseline for pair in pairs])
    if ours is not None and theirs is not None and ours.decode < 0.9 * theirs.decode:
        return f"which counts prefill alone, and decode took {seconds(ours.decode)} instead of {seconds(theirs.decode)} as well"
    return "which steady runs cannot be: look at the spread"


def _of_floor(results: Results) -> str:
    if not results.ttft:
        return ""
    each = [f"{ms(pair.hit_s)} ms instead of {ms(pair.cold_s)} for {pair.p:,} of {pair.n:,} tokens" for pair in results.ttft]
    over = [pair.ratio / pair.floor for pair in results.ttft]
    steps = [figure for pair in results.ttft if (figure := pair.steps_over_floor) is not None]
    alone = f" The engine's steps alone are at {_from_to(steps)}; the rest is fixed cost: HTTP, two processes, the client." if steps else ""
    return (
        f"One request at a time, a hit has its first token after {listed(each)}. Beside a cold prompt that is {_from_to(over)} times the "
        f"least that the arithmetic of prefill allows (the floor).{alone}"
    )


def _from_to(values: list[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def _of_rates(results: Results, load: LoadPlan) -> str:
    limits, told = results.plan.limits, []
    for label in results.labels:
        if not all(results.runs_of(load.label, label, rate) for rate in load.rates):
            continue  # the experiment ended before
        rate = f.sustained_rate(results, load.label, label, load.rates)
        told.append(
            f"{label} {f'sustains {rate:g} requests/s' if rate is not None else f'does not sustain {min(load.rates):g} requests/s'}"
        )
    if not told:
        return ""
    tried = ", ".join(f"{rate:g}" for rate in load.rates)
    return (
        f"`{load.label}`: with a first token within {limits.ttft_ms:g} ms and {limits.tpot_ms:g} ms for each further one, for at least "
        f"{percent(limits.share, 0)} of the requests, {listed(told)} (of the rates tried: {tried})."
    )


def _of_pressure(results: Results, server: str) -> str:
    runs = [run for run in results.runs if run.server == server]
    gone = [f.evicted(run) for run in runs]
    back = [f.retracted(run) for run in runs]
    if not runs or any(value is None for value in (*gone, *back)):
        return ""
    evicted, retracted = sum(value or 0.0 for value in gone), sum(value or 0.0 for value in back)
    if not evicted and not retracted:
        return "The pool, which holds keys and values, was never short: nothing evicted, nobody put back to wait."
    moves = f"{count(evicted)} tokens evicted and {count(retracted)} requests put back to wait"
    return f"The pool, which holds keys and values, was short at times: {moves} in {len(runs)} runs of {server}."
