"""Metrics that can be read back: an exporter that keeps what it is told, as strict as Ray's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from serve_app.deployments.metrics import Exporter

Labels = tuple[tuple[str, str], ...]


@dataclass
class Recorded:
    """One metric: its values by labels, of a histogram the observed ones."""

    description: str
    labels: tuple[str, ...] = ()
    values: dict[Labels, list[float]] = field(default_factory=dict)

    def _of(self, tags: Mapping[str, str] | None) -> list[float]:
        assert set(tags or {}) == set(self.labels), f"labels {tags}, declared {self.labels}"
        return self.values.setdefault(tuple(sorted((tags or {}).items())), [])

    def inc(self, amount: float, tags: Mapping[str, str] | None = None) -> None:
        assert amount > 0, "Ray refuses to add nothing"
        values = self._of(tags)
        values[:] = [sum(values) + amount]

    def set(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        self._of(tags).append(value)

    def observe(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        assert value > 0, "Ray's histograms take no zero"
        self._of(tags).append(value)


@dataclass
class ReadableMetrics:
    """All metrics by name. Gauges and histograms keep every value that they had."""

    metrics: dict[str, Recorded] = field(default_factory=dict)

    @property
    def exporter(self) -> Exporter:
        return Exporter(self._scalar, self._scalar, self._histogram)

    @property
    def moved(self) -> set[str]:
        """The metrics that had a value other than 0."""
        return {name for name, metric in self.metrics.items() if any(map(any, metric.values.values()))}

    def last(self, name: str, **labels: str) -> float:
        return self.metrics[name].values[tuple(sorted(labels.items()))][-1]

    def _scalar(self, name: str, description: str, labels: tuple[str, ...] = ()) -> Recorded:
        assert name not in self.metrics, f"{name} is declared twice"
        return self.metrics.setdefault(name, Recorded(description, labels))

    def _histogram(
        self, name: str, description: str, boundaries: Sequence[float], labels: tuple[str, ...] = ()
    ) -> Recorded:
        assert list(boundaries) == sorted(boundaries)
        return self._scalar(name, description, labels)
