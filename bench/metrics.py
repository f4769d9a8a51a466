"""A server's /metrics as plain numbers, read cheaply, since it may be done in the middle of a measurement."""

import re
from collections.abc import Mapping

from bench.client import RequestFailedError, fetch

Figures = dict[str, float]  # sample name, with its labels but model_name, e.g. radixserve_step_seconds_total{part="tree"}
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


def parse_metrics(exposition: str, names: tuple[str, ...] = ("",)) -> Figures:
    """All samples whose name begins with one of `names`; the same sample of several models is added up; what is no sample is left out."""
    figures: Figures = {}
    for line in exposition.splitlines():
        if line.startswith("#") or not line.startswith(names):
            continue
        if "{" in line:
            name, _, rest = line.partition("{")
            labels, _, value = rest.rpartition("}")
        else:
            name, _, value = line.partition(" ")
            labels = ""
        try:
            number = float(value.split()[0])
        except (ValueError, IndexError):
            continue
        kept = ",".join(f'{key}="{content}"' for key, content in _LABEL.findall(labels) if key != "model_name")
        key = f"{name}{{{kept}}}" if kept else name
        figures[key] = figures.get(key, 0.0) + number
    return figures


async def read_metrics(url: str, names: tuple[str, ...] = ("",), headers: Mapping[str, str] | None = None) -> Figures | None:
    """GET /metrics; None where the server has none."""
    try:
        status, body = await fetch(url, "GET", "/metrics", timeout_s=10, headers=headers)
    except (RequestFailedError, OSError, TimeoutError):
        return None
    return parse_metrics(body.decode(errors="replace"), names) or None if status == 200 else None


def growth(before: Figures | None, after: Figures | None, *names: str) -> float | None:
    """What a counter gained, over all its labels: the first of `names` that the server has. None without /metrics or such a counter."""
    if before is None or after is None:
        return None
    for name in names:
        keys = [key for key in after if key.partition("{")[0] == name]
        if keys:
            return sum(after[key] - before.get(key, 0.0) for key in keys)
    return None
