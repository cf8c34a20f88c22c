"""HTTP requests by route, under the names of Prometheus' FastAPI instrumentation. API processes report every request when it is
over."""

from octavo.messages import Responded
from octavo.observe.metrics.exposition import Histogram, Scrape

BOUNDS = (0.1, 0.5, 1.0)
HIGH_BOUNDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0,
)  # fmt: skip
UNCOUNTED = frozenset(
    {"/metrics", "/health", "/health/live", "/health/ready", "/health/progress", "/load", "/ping", "/version"}
)
"""Monitoring asks for these all the time: counted or logged, they would drown the rest."""

OUTCOMES = ("done", "kept", "refused", "time", "memory", "crash", "abandoned", "overloaded", "unavailable", "failed")
"""How a job of compiling ends (server/state/compiler.py)."""


class HttpMetrics:
    def __init__(self) -> None:
        self._requests: dict[tuple[str, str, str], int] = {}  # (handler, method, status) → times
        self._seconds: dict[tuple[str, str], Histogram] = {}
        self._all_seconds = Histogram(HIGH_BOUNDS)
        self.jobs: dict[str, int] = dict.fromkeys(OUTCOMES, 0)  # of compiling, by outcome

    def responded(self, responded: Responded) -> None:
        for outcome, times in responded.jobs.items():
            self.jobs[outcome] += times
        if responded.handler in UNCOUNTED:
            return
        key = (responded.handler, responded.method, f"{responded.status // 100}xx")
        self._requests[key] = self._requests.get(key, 0) + 1
        self._seconds.setdefault(key[:2], Histogram(BOUNDS)).observe(responded.seconds)
        self._all_seconds.observe(responded.seconds)

    def text(self) -> str:
        scrape = Scrape({})
        labels = ("handler", "method", "status")
        counts = [(dict(zip(labels, key, strict=True)), times) for key, times in self._requests.items()]
        scrape.counter("http_requests", "HTTP requests by route, method and status.", counts)
        scrape.histograms(
            "http_request_duration_seconds",
            "Time from an HTTP request's first byte to its response's last byte, by route.",
            [({"handler": handler, "method": method}, seconds) for (handler, method), seconds in self._seconds.items()],
        )
        scrape.histogram(
            "http_request_duration_highr_seconds",
            "Time from an HTTP request's first byte to its response's last byte, in fine buckets.",
            self._all_seconds,
        )
        return scrape.text()
