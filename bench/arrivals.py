"""When requests are sent: an open loop's arrival times, or a closed loop's number at a time."""

import random
from dataclasses import dataclass

from bench.workloads import Workload

ARRIVALS = ("poisson", "constant", "recorded")


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` requests at a time; the next one goes out when one is answered."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency: expected at least 1, got {self.concurrency}")


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests come whether or not others are answered.

    rate: arrivals per second of requests that wait for no other; what goes on from an answer (a next turn, a branch) follows at once.
    arrivals: poisson, constant, or recorded, which takes the workload's own times and no rate. Equal seeds give equal times.
    """

    rate: float | None = None
    arrivals: str = "poisson"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.arrivals not in ARRIVALS:
            raise ValueError(f"arrivals: expected one of {', '.join(ARRIVALS)}, got {self.arrivals!r}")
        if self.arrivals == "recorded" and self.rate is not None:
            raise ValueError(f"rate: expected none with recorded arrivals (a trace has time_scale), got {self.rate}")
        if self.arrivals != "recorded" and not (self.rate is not None and self.rate > 0):
            raise ValueError(f"rate: expected requests per second above 0, got {self.rate}")


Mode = ClosedLoop | OpenLoop


def describe_mode(mode: Mode) -> str:
    if isinstance(mode, ClosedLoop):
        return f"{mode.concurrency} at a time"
    return "recorded arrivals" if mode.rate is None else f"{mode.rate:g} per second, {mode.arrivals}"


def arrival_times(workload: Workload, mode: OpenLoop) -> list[float]:
    """Seconds after the start of each request that waits for no other, in the workload's order. The first comes at once.

    Raises ValueError if arrivals are to be the recorded ones and the workload has none.
    """
    roots = [request for request in workload.requests if not request.depends_on]
    if mode.rate is None:
        times = [request.arrival_s for request in roots]
        if any(at is None for at in times):
            raise ValueError(f"workload {workload.name}: expected recorded arrival times, as a trace has them; got none")
        return [at for at in times if at is not None]
    rng = random.Random(f"arrivals/{mode.seed}")
    now, result = 0.0, []
    for _ in roots:
        result.append(now)
        now += rng.expovariate(mode.rate) if mode.arrivals == "poisson" else 1 / mode.rate
    return result
