"""All metrics of the service. Ray exports them as `ray_<name>`, counters with `_total`, with labels for application,
deployment and replica.

One update costs 6 to 7 µs, so the ingress updates per request and a replica once a second, never per token. Tokens are
counted in plain numbers (`TokenGaps`), which the ingress exports once a second. A metric of the engine or the store has
the name of the field that it exports.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ray.serve import metrics

from engines.interface.protocol import EngineStats
from serve_app.config.checking.refusal import SECTIONS, Refusal
from serve_app.deployments.adapter_labels import AdapterLabels
from serve_app.replicas.token_gaps import BOUNDS_S, TokenGaps

if TYPE_CHECKING:  # replicas import this module too, and do not need the catalogue and renderers that a record imports
    from serve_app.api.record import RequestRecord
    from serve_app.checkpoints import StoreCounters
    from serve_app.ledger.ledger import LedgerReport

_SECONDS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0]
_LEAST_S = 1e-6  # Ray's histograms take no zero


@dataclass(frozen=True, slots=True)
class Exporter:
    """Creates metrics from a name, a description and label names: Ray's metrics, or metrics that tests can read."""

    counter: Callable[..., Any] = metrics.Counter
    gauge: Callable[..., Any] = metrics.Gauge
    histogram: Callable[..., Any] = metrics.Histogram


RAY = Exporter()


@dataclass(slots=True)
class Growth:
    """The growth of totals since the last reading."""

    _seen: dict[str, float] = field(default_factory=dict)

    def of(self, totals: Mapping[str, float]) -> dict[str, float]:
        """The totals that grew, with their growth."""
        before, self._seen = self._seen, dict(totals)
        return {name: total - before.get(name, 0) for name, total in totals.items() if total > before.get(name, 0)}


class StoreMetrics:
    """Metrics of the checkpoint store of an ingress. A changed configuration may replace the store."""

    def __init__(self, exporter: Exporter = RAY) -> None:
        self._counters = {
            name: exporter.counter(f"roundhouse_checkpoint_{name}", description)
            for name, description in STORE_COUNTERS.items()
        }
        self._store: tuple[Callable[[], StoreCounters], Growth] | None = None

    def watch(self, count: "Callable[[], StoreCounters]") -> None:
        """Export this store's counts from now on. Thread-safe."""
        self._store = count, Growth()

    def record(self) -> None:
        """Export the growth since the last call."""
        if self._store is not None:
            count, growth = self._store
            for name, more in growth.of(asdict(count())).items():
                self._counters[name].inc(more)


class LedgerMetrics:
    """Metrics of the ledger of an ingress."""

    def __init__(self, exporter: Exporter = RAY) -> None:
        self._counters = {
            name: exporter.counter(f"roundhouse_ledger_{name}", description)
            for name, description in LEDGER_COUNTERS.items()
        }
        self._waiting = exporter.gauge(
            "roundhouse_ledger_waiting_bytes", "Records that wait on disk for the ledger's database."
        )
        self._up = exporter.gauge("roundhouse_ledger_up", "1 when the ledger's database answered the last time.")

    def reporter(self) -> "Callable[[LedgerReport], None]":
        """For one ledger, whose thread calls it about once a second. A changed configuration opens another ledger."""
        growth = Growth()

        def record(report: "LedgerReport") -> None:
            self._waiting.set(report.waiting_bytes)
            self._up.set(int(report.is_up))
            for name, more in growth.of(asdict(report.counters)).items():
                self._counters[name].inc(more)

        return record


class GapMetrics:
    """The times between tokens, by model: a histogram as counters, since Ray's own takes one value at a time."""

    def __init__(self, exporter: Exporter = RAY) -> None:
        self._tokens = exporter.counter(
            "roundhouse_inter_token_seconds_bucket",
            "Tokens, but for the first of each reply, that came at most `le` seconds after the one before.",
            ("model", "le"),
        )
        self._seconds = exporter.counter(
            "roundhouse_inter_token_seconds_sum", "Time between the tokens of replies.", ("model",)
        )
        self._gaps: dict[str, tuple[TokenGaps, Growth]] = {}

    def of(self, model: str) -> TokenGaps:
        """Those that are exported under the model's name."""
        if model not in self._gaps:
            self._gaps[model] = TokenGaps(), Growth()
        return self._gaps[model][0]

    def record(self) -> None:
        """Export the growth since the last call."""
        for model, (gaps, growth) in self._gaps.items():
            totals = dict(zip(_LE, accumulate(gaps.counts), strict=True)) | {_SUM: gaps.total_s}
            for name, more in growth.of(totals).items():
                if name == _SUM:
                    self._seconds.inc(more, {"model": model})
                else:
                    self._tokens.inc(more, {"model": model, "le": name})


_LE = (*map(str, BOUNDS_S), "+Inf")
_SUM = "sum"


class AdapterMetrics:
    """Requests of adapters, and their tokens."""

    def __init__(self, exporter: Exporter = RAY) -> None:
        labels = ("model", "adapter")
        self._requests = exporter.counter(
            "roundhouse_adapter_requests", "Requests by adapter; rarely used adapters share 'other'.", labels
        )
        self._tokens = [
            exporter.counter("roundhouse_adapter_prompt_tokens", "Prompt tokens by adapter.", labels),
            exporter.counter("roundhouse_adapter_cached_tokens", "Those from the prefix cache, by adapter.", labels),
            exporter.counter("roundhouse_adapter_completion_tokens", "Sampled tokens by adapter.", labels),
        ]
        self._labels = AdapterLabels()

    def count(self, record: "RequestRecord") -> None:
        of_adapter = {"model": record.model, "adapter": self._labels.use(record.adapter_digest)}
        self._requests.inc(1, of_adapter)
        tokens = (record.prompt_tokens, record.cached_tokens, record.completion_tokens)
        for counter, number in zip(self._tokens, tokens, strict=True):
            _add(counter, number, of_adapter)


class EndpointMetrics:
    """Requests that endpoints of marketplace slugs were tried for."""

    def __init__(self, exporter: Exporter = RAY) -> None:
        labels = ("slug", "endpoint")
        self._requests = exporter.counter(
            "roundhouse_endpoint_requests",
            "Requests that an endpoint of a marketplace slug was tried for.",
            (*labels, "outcome"),
        )
        self._fallbacks = exporter.counter(
            "roundhouse_endpoint_fallbacks",
            "Requests that an endpoint failed for before its first byte, so that the next one was tried.",
            labels,
        )

    def count(self, record: "RequestRecord") -> None:
        for name in record.passed_over:
            of_endpoint = {"slug": record.slug, "endpoint": name}
            self._requests.inc(1, of_endpoint | {"outcome": "failed"})
            self._fallbacks.inc(1, of_endpoint)
        if record.endpoint:
            of_endpoint = {"slug": record.slug, "endpoint": record.endpoint}
            self._requests.inc(1, of_endpoint | {"outcome": record.outcome.value})


class IngressMetrics:
    """Metrics of requests: the `record.Recorder` of the ingress."""

    def __init__(self, exporter: Exporter = RAY) -> None:
        of_request = ("model", "key")
        self._requests = exporter.counter(
            "roundhouse_requests", "Requests that ended.", (*of_request, "endpoint", "status", "outcome")
        )
        self._probes = exporter.counter(
            "roundhouse_probes", "Probes that were answered; they are not among the requests.", ("path", "status")
        )
        self._running = exporter.gauge("roundhouse_requests_running", "Requests that this ingress is running.")
        self._prompt_tokens = exporter.counter("roundhouse_prompt_tokens", "Prompt tokens.", of_request)
        self._cached_tokens = exporter.counter(
            "roundhouse_cached_tokens", "Prompt tokens that came from the prefix cache.", of_request
        )
        self._completion_tokens = exporter.counter("roundhouse_completion_tokens", "Sampled tokens.", of_request)
        self._unparsed = exporter.counter(
            "roundhouse_replies_unparsed", "Replies with a tool call that did not parse, kept as text.", ("model",)
        )
        self._first_token_s = exporter.histogram(
            "roundhouse_first_token_seconds", "Time from the request to its first token.", _SECONDS, ("model",)
        )
        self._queue_s = exporter.histogram(
            "roundhouse_queue_seconds",
            "Time in an engine's queue until the request was admitted to the batch, its adapter's load included.",
            _SECONDS,
            ("model",),
        )
        self._duration_s = exporter.histogram(
            "roundhouse_request_seconds", "Time from the request to its end.", _SECONDS, ("model", "outcome")
        )
        self._config_error = exporter.gauge(
            "roundhouse_config_error", "Parts of the last configuration that were refused, by section.", ("section",)
        )
        self._num_running = 0
        self._num_refused: dict[str, int] = {}
        self._adapters = AdapterMetrics(exporter)
        self._endpoints = EndpointMetrics(exporter)
        self._gaps = GapMetrics(exporter)
        self.store = StoreMetrics(exporter)
        self.ledger = LedgerMetrics(exporter)

    def request_started(self, record: "RequestRecord") -> None:
        if not record.is_probe:
            self._num_running += 1
            self._running.set(self._num_running)

    def request_ended(self, record: "RequestRecord") -> None:
        if record.is_probe:
            self._probes.inc(1, {"path": record.path, "status": str(record.status)})
            return
        self._num_running -= 1
        self._running.set(self._num_running)
        outcome = {"endpoint": record.route, "status": str(record.status), "outcome": record.outcome.value}
        of_request = {"model": record.model, "key": record.key_name}
        self._requests.inc(1, of_request | outcome)
        self.store.record()
        self._endpoints.count(record)
        if not record.model:
            return
        of_model = {"model": record.model}
        _add(self._prompt_tokens, record.prompt_tokens, of_request)
        _add(self._cached_tokens, record.cached_tokens, of_request)
        _add(self._completion_tokens, record.completion_tokens, of_request)
        _add(self._unparsed, int(record.unparsed), of_model)
        if record.first_token_s is not None:
            self._first_token_s.observe(record.first_token_s, of_model)
        if record.timing is not None:
            self._queue_s.observe(max(record.timing.queued_s, _LEAST_S), of_model)
        self._duration_s.observe(record.duration_s, of_model | {"outcome": record.outcome.value})
        if record.adapter_digest:
            self._adapters.count(record)

    def gaps_of(self, model: str) -> TokenGaps:
        return self._gaps.of(model)

    def config_checked(self, refusals: Sequence[Refusal]) -> None:
        self._num_refused = {section: sum(one.section == section for one in refusals) for section in SECTIONS}
        self.refresh()

    def refresh(self) -> None:
        """Set the gauges again, and export what tokens were counted; called about once a second. Ray drops a gauge that
        was not set for some 20 s.
        """
        self._gaps.record()
        self._running.set(self._num_running)
        for section, refused in self._num_refused.items():
            self._config_error.set(refused, {"section": section})


STORE_COUNTERS: Mapping[str, str] = {
    "reads": "Checkpoints of local roots that were read and hashed.",
    "fetches": "Checkpoints of remote roots that were downloaded.",
    "evictions": "Checkpoints that were dropped from the disk cache to make room.",
    "refusals": "Requests for a checkpoint whose files cannot be served.",
    "unreadable": "Requests for a checkpoint whose checkpoint.json cannot be read; the log has the reason.",
}
"""The fields of `checkpoints.store.StoreCounters`, with descriptions."""

LEDGER_COUNTERS: Mapping[str, str] = {
    "records": "Records of requests that were written into the ledger's database.",
    "dropped": "Records that were lost because too many waited for the database, or the disk took none.",
    "refused": "Records that were lost because the database refuses their values.",
    "torn": "Lines of spools that hold no record, as a crash of the machine leaves them.",
    "adopted": "Folders of records that other processes left and that were written.",
    "write_errors": "Tries to write that failed; the records wait.",
}
"""The fields of `ledger.writer.LedgerCounters`, with descriptions."""

ENGINE_COUNTERS: Mapping[str, str] = {
    "requests": "Requests that the engine accepted.",
    "finished": "Requests that completed.",
    "aborted": "Requests that their callers cancelled.",
    "failed_requests": "Requests that ended with an error of the engine, or lost their place in a full queue.",
    "preemptions": "Preemptions of running requests, for lack of a KV cache block or for another tenant's turn.",
    "steps": "Steps of the engine.",
    "step_seconds": "Time spent in steps.",
    "prompt_tokens": "Prompt tokens of the requests whose prompt was computed.",
    "cached_tokens": "Prompt tokens of those requests that came from the prefix cache.",
    "prefill_tokens": "Prompt tokens computed; those of a preempted request count again.",
    "decode_tokens": "Tokens computed in decode steps.",
    "generated_tokens": "Tokens sampled.",
    "adapter_loads": "Adapters read into memory.",
    "adapter_load_seconds": "Time to load adapters, from the start of a read to the step that takes the adapter in.",
    "adapter_evictions": "Adapters that were evicted from their slot by another adapter.",
    "adapter_refusals": "Adapters that were refused because the model cannot apply them.",
    "images_encoded": "Images that the vision tower encoded.",
    "images_reused": "Images whose features were kept from an earlier request.",
}
"""The fields of `engines.interface.protocol.EngineCounters`, with descriptions."""

ENGINE_GAUGES: Mapping[str, tuple[str, Callable[[EngineStats], float]]] = {
    "running": ("Requests in the batch.", lambda stats: stats.running),
    "waiting": ("Requests in the queue.", lambda stats: stats.waiting),
    "queued_tokens": ("Tokens of prompts that have to be computed yet.", lambda stats: stats.queued_tokens),
    "blocks": ("Blocks of the KV cache.", lambda stats: stats.blocks_total),
    "blocks_free": ("Blocks that no running request uses, including cached ones.", lambda stats: stats.blocks_free),
    "blocks_cached": ("Free blocks whose content is in the prefix cache.", lambda stats: stats.blocks_cached),
    "adapter_slots": ("Slots for adapters.", lambda stats: stats.adapter_slots_total),
    "adapters_loaded": ("Adapters in slots.", lambda stats: len(stats.adapters)),
    "adapters_pinned": ("Adapters in use by running requests.", lambda stats: stats.adapter_slots_pinned),
    "adapters_in_memory": ("Adapters in host memory, those in slots too.", lambda stats: stats.adapters_in_memory),
    "adapter_bytes": ("Host memory that they take.", lambda stats: stats.adapter_bytes),
    "adapters_loading": ("Adapters that are being read, or wait for it.", lambda stats: stats.adapters_loading),
    "stalled_seconds": ("Time since the last step while requests wait or run.", lambda stats: stats.stalled_s),
    "failed": ("1 when the engine has failed and its replica must be replaced.", lambda stats: stats.failed),
}
"""The other fields of `EngineStats`: descriptions, and how to read the value from a snapshot."""


class EngineMetrics:
    """Metrics of one replica's engine."""

    def __init__(self, model: str, exporter: Exporter = RAY) -> None:
        self._tags = {"model": model}
        self._counters = {
            name: exporter.counter(f"roundhouse_engine_{name}", description, ("model",))
            for name, description in ENGINE_COUNTERS.items()
        }
        self._growth = Growth()
        self._gauges = [
            (exporter.gauge(f"roundhouse_engine_{name}", description, ("model",)), value)
            for name, (description, value) in ENGINE_GAUGES.items()
        ]

    def record(self, stats: EngineStats) -> None:
        """Export a snapshot; called about once a second."""
        for gauge, value in self._gauges:
            gauge.set(float(value(stats)), self._tags)
        for name, more in self._growth.of(asdict(stats.counters)).items():
            self._counters[name].inc(more, self._tags)


class ImageMetrics:
    """Metrics of one process that prepares images: its `images.recorder.ImageRecorder`."""

    def __init__(self, exporter: Exporter = RAY) -> None:
        self._images = exporter.counter(
            "roundhouse_images", "Images of requests: prepared, reused from the cache, or refused.", ("outcome",)
        )
        self._seconds = exporter.histogram(
            "roundhouse_image_seconds", "Time to fetch or to prepare an image.", _SECONDS, ("stage",)
        )

    def fetched(self, seconds: float) -> None:
        self._seconds.observe(max(seconds, _LEAST_S), {"stage": "fetch"})

    def prepared(self, seconds: float) -> None:
        self._images.inc(1, {"outcome": "prepared"})
        self._seconds.observe(max(seconds, _LEAST_S), {"stage": "prepare"})

    def reused(self) -> None:
        self._images.inc(1, {"outcome": "reused"})

    def refused(self) -> None:
        self._images.inc(1, {"outcome": "refused"})


def _add(counter: metrics.Counter, amount: float, tags: dict[str, str]) -> None:
    if amount > 0:  # Ray refuses to add nothing
        counter.inc(amount, tags)
