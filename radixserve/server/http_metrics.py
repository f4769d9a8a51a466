"""HTTP answers counted by route and status, with few label values whatever clients send."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric
from starlette.types import Scope

OTHER_ROUTE = "other"


class MetricsRegistry(CollectorRegistry):
    """Without the client library's _created series: they double the number of series and say nothing that a dashboard reads.

    The library's own switch for them is global to the process.
    """

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class HttpMetrics:
    """`paths` are the templates of all routes: the only values that the label `route` takes, beside OTHER_ROUTE."""

    def __init__(self, registry: CollectorRegistry, paths: Iterable[str]) -> None:
        self._paths = frozenset(paths)
        name = "radixserve_http_requests"
        self._counter = Counter(name, "HTTP answers. Status 499: the client left before one.", ["route", "status"], registry=registry)

    def count(self, scope: Scope, status: int) -> None:
        self._counter.labels(self._route_of(scope), str(status)).inc()

    def _route_of(self, scope: Scope) -> str:
        # A request that was refused at the door has no route yet; its path is one only where a route has no parameters.
        route = getattr(scope.get("route"), "path", scope["path"])
        return route if route in self._paths else OTHER_ROUTE
