"""Histograms of plain integers, and the Prometheus text format.

prometheus_client takes a lock and walks its buckets for every observation. The step loop observes hundreds of values in a
millisecond, so only the text format is Prometheus'."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

Labels = Mapping[str, str]


class Histogram:
    """Counts per bucket. `bounds` are inclusive upper bounds in rising order; +Inf is implied."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds)), "bounds must rise"
        self.bounds = list(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)


class Scrape:
    """Writes the text of one scrape, metric by metric. `labels` are on every sample."""

    def __init__(self, labels: Labels) -> None:
        self._labels = dict(labels)
        self._lines: list[str] = []

    def gauge(self, name: str, help: str, samples: Iterable[tuple[Labels, float]]) -> None:
        self._family(name, help, "gauge", samples)

    def counter(self, name: str, help: str, samples: Iterable[tuple[Labels, float]]) -> None:
        self._family(f"{name}_total", help, "counter", samples)

    def histogram(self, name: str, help: str, histogram: Histogram) -> None:
        self.histograms(name, help, [({}, histogram)])

    def histograms(self, name: str, help: str, samples: Iterable[tuple[Labels, Histogram]]) -> None:
        self._head(name, help, "histogram")
        for labels, histogram in samples:
            seen = 0
            for bound, count in zip([*histogram.bounds, float("inf")], histogram.counts, strict=True):
                seen += count
                self._sample(f"{name}_bucket", {**labels, "le": _number(float(bound))}, seen)
            self._sample(f"{name}_count", labels, seen)
            self._sample(f"{name}_sum", labels, histogram.total)

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def _family(self, name: str, help: str, kind: str, samples: Iterable[tuple[Labels, float]]) -> None:
        self._head(name, help, kind)
        for labels, value in samples:
            self._sample(name, labels, value)

    def _head(self, name: str, help: str, kind: str) -> None:
        self._lines.append(f"# HELP {name} {help}")
        self._lines.append(f"# TYPE {name} {kind}")

    def _sample(self, name: str, labels: Labels, value: float) -> None:
        inner = ",".join(f'{key}="{_escape(text)}"' for key, text in {**self._labels, **labels}.items())
        self._lines.append(f"{name}{{{inner}}} {_number(float(value))}" if inner else f"{name} {_number(float(value))}")


def _number(value: float) -> str:
    return "+Inf" if value == float("inf") else repr(value)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
