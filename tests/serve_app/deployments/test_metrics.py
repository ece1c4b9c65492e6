"""What is counted, under which labels, and that each metric is moved by what it tells of."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines.fake import FakeConfig, FakeEngine
from engines.interface.config import EngineConfig
from engines.interface.protocol import EngineCounters, EngineStats, GenerateRequest, Output
from engines.lora.format.digest import CONFIG_FILE, PICKLE_FILE
from serve_app.api.record import Outcome, RequestRecord
from serve_app.base.model_id import CheckpointPath
from serve_app.checkpoints import CheckpointStore, StoreCounters
from serve_app.config.checking.refusal import SECTIONS, Refusal
from serve_app.config.service import CheckpointsConfig
from serve_app.deployments.adapter_labels import OTHER, AdapterLabels
from serve_app.deployments.metrics import (
    ENGINE_COUNTERS,
    ENGINE_GAUGES,
    LEDGER_COUNTERS,
    STORE_COUNTERS,
    EngineMetrics,
    GapMetrics,
    Growth,
    ImageMetrics,
    IngressMetrics,
    LedgerMetrics,
)
from serve_app.ledger.ledger import LedgerReport
from serve_app.ledger.writer import LedgerCounters
from serve_app.replicas.token_gaps import BOUNDS_S, TokenGaps
from tests.support.engines import tiny_vision
from tests.support.engines.engine_harness import (
    BREAKS,
    RAISES,
    Collector,
    DrivenEngine,
    adapter,
    engine_config,
    explosive_folder,
    kv_bytes,
    prompt_of,
    request,
)
from tests.support.files import checkpoint_files
from tests.support.files.checkpoint_files import SIZE, files, write
from tests.support.harness import BASE, CHAT, CONTEXT, ListRecorder, RunningEdge, config_for, running_edge
from tests.support.readable_metrics import ReadableMetrics

BUCKETS = "roundhouse_inter_token_seconds_bucket"

pytest_plugins = ("tests.support.edge_fixtures",)


def test_adapters_have_labels_of_their_own_up_to_a_bound():
    labels = AdapterLabels(top=3, ever=10)
    shown = {labels.use(f"digest-{n}") for n in range(5)}
    assert shown == {"digest-0", "digest-1", "digest-2", OTHER}


def test_an_adapter_that_is_used_much_more_takes_the_label_of_the_rarest():
    labels = AdapterLabels(top=2, ever=10)
    for used in ("a", "a", "a", "b"):
        labels.use(used)
    assert [labels.use("c") for _ in range(3)] == [OTHER, "c", "c"]
    assert labels.use("b") == OTHER
    assert labels.use("a") == "a"


def test_only_so_many_labels_are_given_out_in_the_life_of_a_process():
    labels = AdapterLabels(top=1, ever=3)
    shown = set()
    for n in range(20):
        shown |= {labels.use(f"digest-{n}") for _ in range(2 ** (n + 1))} if n < 8 else {labels.use("late")}
    assert len(shown - {OTHER}) == 3


def test_an_adapter_gets_its_old_label_back_when_all_were_given_out():
    labels = AdapterLabels(top=1, ever=2)
    assert labels.use("a") == "a"
    assert [labels.use("b") for _ in range(2)] == [OTHER, "b"]
    assert [labels.use("c") for _ in range(9)] == [OTHER] * 9
    assert [labels.use("a") for _ in range(3)][-1] == "a"


def test_counting_adapters_takes_bounded_memory():
    labels = AdapterLabels()
    for n in range(25_000):
        labels.use(f"digest-{n}")
    assert len(labels._uses) <= 10_000


def test_totals_are_exported_by_what_they_grew():
    growth = Growth()
    assert growth.of({"reads": 0, "fetches": 2}) == {"fetches": 2}
    assert growth.of({"reads": 3, "fetches": 2}) == {"reads": 3}
    assert growth.of({"reads": 3, "fetches": 2}) == {}


def test_everything_that_a_store_counts_is_a_metric_and_nothing_else():
    assert [field.name for field in fields(StoreCounters)] == list(STORE_COUNTERS)


def test_everything_that_a_ledger_counts_is_a_metric_and_nothing_else():
    assert [field.name for field in fields(LedgerCounters)] == list(LEDGER_COUNTERS)


def test_what_ledgers_report_is_exported_by_what_it_grew_also_when_another_takes_over():
    readable = ReadableMetrics()
    metrics = LedgerMetrics(readable.exporter)
    for _ in range(2):
        report = metrics.reporter()
        for grown in (1, 3):
            counters = LedgerCounters(*(grown * (index + 1) for index in range(len(LEDGER_COUNTERS))))
            report(LedgerReport(counters, waiting_bytes=grown, is_up=grown == 3))
    assert readable.moved == set(readable.metrics)
    assert [readable.last(f"roundhouse_ledger_{name}") for name in LEDGER_COUNTERS] == [6, 12, 18, 24, 30, 36]
    assert readable.metrics["roundhouse_ledger_waiting_bytes"].values[()] == [1, 3, 1, 3]
    assert readable.metrics["roundhouse_ledger_up"].values[()] == [0, 1, 0, 1]


def test_everything_that_an_engine_counts_is_a_metric_and_nothing_else():
    assert [field.name for field in fields(EngineCounters)] == list(ENGINE_COUNTERS)


def test_everything_else_that_an_engine_tells_is_a_metric_of_its_own():
    other = EngineStats(1, 1, 1, 1, 1, 1, 1, 1, ("digest",), 1, 1, 1, 1.0, True)
    for one in fields(EngineStats):
        if one.name != "counters":
            told = replace(EngineStats(), **{one.name: getattr(other, one.name)})
            assert [value(told) for _, value in ENGINE_GAUGES.values()].count(True) == 1, one.name
    assert len(ENGINE_GAUGES) == len(fields(EngineStats)) - 1


def test_the_metrics_of_the_engine_bear_the_names_and_words_of_its_fields():
    readable = ReadableMetrics()
    EngineMetrics("m", readable.exporter)
    told = {**ENGINE_COUNTERS, **{name: words for name, (words, _) in ENGINE_GAUGES.items()}}
    assert {name: metric.description for name, metric in readable.metrics.items()} == {
        f"roundhouse_engine_{name}": words for name, words in told.items()
    }


def declared_by_engine() -> set[str]:
    return {f"roundhouse_engine_{name}" for name in (*ENGINE_COUNTERS, *ENGINE_GAUGES)}


class Measured(Collector):
    """A sink that has the engine's metrics exported at every output, as a replica does every second."""

    def __init__(self, engine: DrivenEngine, metrics: EngineMetrics) -> None:
        super().__init__()
        self._engine, self._metrics = engine, metrics

    def deliver(self, outputs: Sequence[Output]) -> None:
        super().deliver(outputs)
        self._metrics.record(self._engine.stats())

    def submit(self, made: GenerateRequest) -> GenerateRequest:
        self.expect(made.request_id)
        self._engine.engine.submit(made, self)
        return made

    async def ended(self, *requests: GenerateRequest) -> None:
        await self.until(lambda: all(self.results[made.request_id].ended for made in requests))

    async def ended_while_measuring(self, made: GenerateRequest) -> None:
        """Also while nothing comes out, as during the load of an adapter."""
        while not self.results[made.request_id].ended:
            self._metrics.record(self._engine.stats())
            await asyncio.sleep(0)

    async def begun(self, *requests: GenerateRequest) -> None:
        await self.until(lambda: all(self.results[made.request_id].token_ids for made in requests))


def harmless(length: int, seed: int = 0, **options: Any) -> GenerateRequest:
    """A request without the tokens at which the model raises."""
    never = ((RAISES, -100.0), (BREAKS, -100.0))
    prompt = [token % RAISES for token in prompt_of(length, seed)]
    return request(prompt, **{"max_tokens": 4, "logit_bias": never, **options})


async def everything_that_happens_to_an_engine(sink: Measured, engine: DrivenEngine) -> None:
    """Prompts in and out of the cache, adapters that come and go, one that is refused; more requests than fit, one that
    is given up, one that fails.
    """
    await sink.ended(sink.submit(harmless(40)))
    await sink.ended(sink.submit(harmless(40)))
    for kind in ("q-v", "head"):
        await sink.ended_while_measuring(sink.submit(harmless(5, adapter=adapter("llama", kind))))
    await sink.ended(sink.submit(harmless(5, adapter=adapter("llama", "too-wide"))))
    await sink.ended(sink.submit(request((1, RAISES))))
    growing = [sink.submit(harmless(100, seed, max_tokens=90)) for seed in range(4)]
    await sink.ended(*growing)
    leaving = sink.submit(harmless(20, max_tokens=300))
    await sink.begun(leaving)
    engine.engine.abort(leaving.request_id)
    await engine.is_idle()


def use_images(folder: Path, metrics: EngineMetrics) -> None:
    """An image that is new, and one that was sent before."""
    settings: dict[str, Any] = {"threads": 1, "kv_cache_bytes": 8 << 20, "context_length": 192}
    with DrivenEngine(EngineConfig(source=str(tiny_vision.save("llava", folder)), **settings)) as engine:
        sink = Measured(engine, metrics)
        for length in (3, 4):
            engine.run(sink.ended(sink.submit(tiny_vision.asking(length, tiny_vision.image_for("llava", 1)))))
        engine.run(engine.is_idle())
        metrics.record(engine.stats())


def test_every_metric_of_the_engine_is_moved_by_a_real_one(tmp_path: Path) -> None:
    readable = ReadableMetrics()
    metrics = EngineMetrics("m", readable.exporter)
    settings: dict[str, Any] = {"source": str(explosive_folder()), "trust_remote_code": True, "self_test": False}
    settings |= {"kv_cache_bytes": kv_bytes("llama", 33), "max_running": 3, "max_adapters": 1, "max_adapter_rank": 64}
    with DrivenEngine(engine_config(**settings)) as engine:
        metrics.record(engine.stats())
        sink = Measured(engine, metrics)
        engine.run(everything_that_happens_to_an_engine(sink, engine))
        counters = engine.stats().counters
        assert counters.finished + counters.aborted + counters.failed_requests == counters.requests
        assert (counters.aborted, counters.failed_requests, counters.adapter_refusals) == (1, 2, 1)
        finished = [result for result in sink.results.values() if result.finish_reason]
        assert counters.generated_tokens >= sum(len(result.token_ids) for result in finished)
        metrics.record(engine.stats())
        engine.run(sink.ended(sink.submit(request((1, BREAKS)))))
        metrics.record(engine.stats())
    with_images = ReadableMetrics()
    use_images(tmp_path, EngineMetrics("v", with_images.exporter))
    of_images = {f"roundhouse_engine_images_{what}" for what in ("encoded", "reused")}
    assert readable.moved | (with_images.moved & of_images) == declared_by_engine()
    assert [with_images.last(name, model="v") for name in sorted(of_images)] == [1, 1]
    assert readable.last("roundhouse_engine_failed", model="m") == 1


def test_a_request_that_an_engine_took_ends_in_one_counter():
    async def check() -> EngineCounters:
        engine = FakeEngine(FakeConfig(max_running=1))
        await engine.start()
        sink = Collector()
        made = [request(prompt_of(5), max_tokens=tokens) for tokens in (3, 10**4, 10**4)]
        for one in made:
            sink.expect(one.request_id)
            engine.submit(one, sink)
        await sink.until(lambda: bool(sink.results[made[1].request_id].token_ids))
        engine.abort(made[1].request_id)
        await engine.close()
        return engine.stats().counters

    counters = asyncio.run(check())
    assert (counters.requests, counters.finished, counters.aborted, counters.failed_requests) == (3, 1, 1, 1)


def test_a_request_that_loses_its_place_in_a_full_queue_has_failed():
    async def check() -> EngineCounters:
        engine = FakeEngine(FakeConfig(max_running=1, max_waiting=2))
        await engine.start()
        sink = Collector()
        made = [request(prompt_of(5), max_tokens=300, tenant=name) for name in ("crowd", "crowd", "crowd", "other")]
        for one in made:
            sink.expect(one.request_id)
        engine.submit(made[0], sink)
        await sink.until(lambda: bool(sink.results[made[0].request_id].token_ids))
        for one in made[1:]:
            engine.submit(one, sink)
        await sink.until(lambda: all(result.ended for result in sink.results.values()))
        await engine.close()
        return engine.stats().counters

    counters = asyncio.run(check())
    assert (counters.requests, counters.finished, counters.aborted, counters.failed_requests) == (4, 3, 0, 1)


@dataclass
class Exporting(ListRecorder):
    """Keeps the records, and exports them as an ingress does."""

    readable: ReadableMetrics = field(default_factory=ReadableMetrics)

    def __post_init__(self) -> None:
        self.metrics = IngressMetrics(self.readable.exporter)

    def gaps_of(self, model: str) -> TokenGaps:
        return self.metrics.gaps_of(model)

    def request_started(self, record: RequestRecord) -> None:
        super().request_started(record)
        self.metrics.request_started(record)

    def request_ended(self, record: RequestRecord) -> None:
        self.metrics.request_ended(record)
        super().request_ended(record)

    def config_checked(self, refusals: Sequence[Refusal]) -> None:
        super().config_checked(refusals)
        self.metrics.config_checked(refusals)


def test_what_is_refused_of_a_configuration_is_counted_by_section_and_forgotten_when_it_is_good() -> None:
    readable = ReadableMetrics()
    metrics = IngressMetrics(readable.exporter)

    def counted(*paths: str) -> dict[str, float]:
        metrics.config_checked([Refusal(path, f"{path} is wrong.") for path in paths])
        return {section: readable.last("roundhouse_config_error", section=section) for section in SECTIONS}

    nothing = dict.fromkeys(SECTIONS, 0)
    assert counted("models[1].source", "models", "keys[0]", "", "nonsense") == nothing | {
        "models": 2,
        "keys": 1,
        "config": 2,
    }
    assert counted() == nothing


def test_gauges_are_set_again_though_nothing_happens_because_ray_forgets_those_that_are_not() -> None:
    readable = ReadableMetrics()
    metrics = IngressMetrics(readable.exporter)
    metrics.config_checked([Refusal("models", "It is wrong.")])
    metrics.request_started(RequestRecord("id", "POST", "/v1/completions"))
    gauges = [readable.metrics[f"roundhouse_{name}"].values for name in ("config_error", "requests_running")]
    before = [[list(seen) for seen in values.values()] for values in gauges]
    metrics.refresh()
    after = [[list(seen) for seen in values.values()] for values in gauges]
    assert after == [[[*seen, seen[-1]] for seen in values] for values in before]
    assert readable.last("roundhouse_config_error", section="models") == 1
    assert readable.last("roundhouse_requests_running") == 1


def use_checkpoints(edge: RunningEdge, cache: Path) -> None:
    """One of a folder, and two of a remote root, for which the cache has room one at a time; two that are broken."""
    assert edge.complete(model="tinker://local/sampler_weights/1", max_tokens=2).status_code == 200
    assert edge.complete(model="tinker://remote/sampler_weights/2", max_tokens=2).status_code == 200
    assert edge.complete(model="tinker://remote/sampler_weights/3", max_tokens=2).status_code == 200
    assert [entry.name for entry in (cache / "content").iterdir()] == [checkpoint_files.digest(files(3))]
    assert edge.complete(model="tinker://local/sampler_weights/refused").status_code == 422
    assert edge.complete(model="tinker://local/sampler_weights/unreadable").status_code == 404


def use_slug(edge: RunningEdge) -> None:
    """Its first endpoint cannot be served, its second can."""
    price = {"prompt": 1, "completion": 1}
    endpoints = [
        {"name": "gone", "model": "tinker://no/sampler_weights/1", "price": price},
        {"name": "here", "model": BASE, "price": price},
    ]
    edge.reconfigure(marketplace={"slugs": [{"id": "acme/two", "endpoints": endpoints}]})
    response = edge.complete(model="acme/two", stream=True, max_tokens=2)
    assert (response.status_code, response.headers["x-endpoint"]) == (200, "here")


def test_every_metric_of_the_ingress_is_moved_by_requests_over_http(
    model_folders: dict[str, str], tmp_path: Path
) -> None:
    recorder = Exporting()
    about = {"base_model": CHAT}
    write(tmp_path / "root", files(1, about), CheckpointPath("local", "1"))
    pickled = {CONFIG_FILE: b"{}", PICKLE_FILE: b""}
    write(tmp_path / "root", pickled, CheckpointPath("local", "refused"))
    write(tmp_path / "root", files(1, about | {"owner": 7}), CheckpointPath("local", "unreadable"))
    for fill in (2, 3):
        write(tmp_path / "remote", files(fill, about), CheckpointPath("remote", str(fill)))

    def open_checkpoints(_: CheckpointsConfig) -> CheckpointStore:
        # fsspec's own name of a local folder: what it holds is fetched like that of any other remote root.
        roots = [str(tmp_path / "root"), f"local://{tmp_path / 'remote'}"]
        store = CheckpointStore(roots, cache_directory=str(tmp_path / "cache"), cache_bytes=SIZE * 3 // 2)
        recorder.metrics.store.watch(lambda: store.counters)
        return store

    engine = FakeConfig(vocab_size=512, context_length=CONTEXT)
    with running_edge(config_for(model_folders), engine, recorder=recorder, open_checkpoints=open_checkpoints) as edge:
        for _ in range(2):
            edge.complete(list(range(100, 140)), max_tokens=3)
        edge.script.says("<tool_call>\n{nothing\n</tool_call>")
        edge.chat(tools=[{"type": "function", "function": {"name": "f"}}])
        edge.script.makes_something_up()
        use_checkpoints(edge, tmp_path / "cache")
        use_slug(edge)
        edge.reconfigure(keys=[{"name": ""}])
        for path in ("healthz", "readyz"):
            assert httpx.get(f"http://127.0.0.1:{edge.port}/{path}").status_code == 200
        edge.wait_until_idle()
    recorder.metrics.refresh()
    readable = recorder.readable
    of_ledger = {name for name in readable.metrics if name.startswith("roundhouse_ledger_")}
    assert readable.moved == set(readable.metrics) - of_ledger - {"roundhouse_adapter_cached_tokens"}
    of_slug = {"slug": "acme/two", "endpoint": "gone"}
    assert readable.last("roundhouse_endpoint_requests", **of_slug, outcome="failed") == 1
    assert readable.last("roundhouse_endpoint_fallbacks", **of_slug) == 1
    assert readable.last("roundhouse_endpoint_requests", slug="acme/two", endpoint="here", outcome="done") == 1
    of_base = {"model": BASE, "key": "test"}
    assert readable.last("roundhouse_prompt_tokens", **of_base) == 82
    assert readable.last("roundhouse_cached_tokens", **of_base) == 32
    assert readable.last("roundhouse_completion_tokens", **of_base) == 8
    assert readable.last("roundhouse_replies_unparsed", model=CHAT) == 1
    assert readable.last("roundhouse_requests_running") == 0
    assert [readable.last(f"roundhouse_checkpoint_{name}") for name in STORE_COUNTERS] == [3, 2, 1, 1, 1]
    assert readable.last("roundhouse_inter_token_seconds_bucket", model=BASE, le="+Inf") == 8 - 3
    assert len(readable.metrics["roundhouse_queue_seconds"].values[(("model", BASE),)]) == 3
    assert readable.last("roundhouse_probes", path="/readyz", status="200") == 1


def test_a_probe_that_fails_is_no_request_that_fails() -> None:
    readable = ReadableMetrics()
    metrics = IngressMetrics(readable.exporter)
    probe = RequestRecord("id", "GET", "/readyz", status=503, outcome=Outcome.FAILED, is_probe=True)
    metrics.request_started(probe)
    metrics.request_ended(probe)
    assert readable.moved == {"roundhouse_probes"}
    assert readable.last("roundhouse_probes", path="/readyz", status="503") == 1


@pytest.mark.parametrize(
    ("path", "endpoint"),
    [
        ("/v1/chat/completions", "chat"),
        ("/plain/v1/completions", "completions"),
        ("/v1/models", "models"),
        ("/v1/models/a/usage", "models"),
        ("/v1/usage", "usage"),
        ("/version", "version"),
        ("/openapi.json", "openapi.json"),
        ("/wp-login.php", "other"),
    ],
)
def test_a_request_counts_by_its_endpoint_and_not_by_its_path(path: str, endpoint: str) -> None:
    readable = ReadableMetrics()
    metrics = IngressMetrics(readable.exporter)
    metrics.request_started(RequestRecord("id", "GET", path))
    metrics.request_ended(RequestRecord("id", "GET", path, status=200))
    of_request = {"model": "", "key": "", "status": "200", "outcome": "done"}
    assert readable.last("roundhouse_requests", endpoint=endpoint, **of_request) == 1


def test_the_tokens_of_an_adapter_are_counted_by_kind() -> None:
    readable = ReadableMetrics()
    metrics = IngressMetrics(readable.exporter)
    counts = {"prompt_tokens": 7, "cached_tokens": 5, "completion_tokens": 3}
    record = RequestRecord("id", "POST", "/v1/completions", model="m", adapter_digest="d", duration_s=1, **counts)
    for _ in range(2):
        metrics.request_ended(record)
    for name, number in counts.items():
        assert readable.last(f"roundhouse_adapter_{name}", model="m", adapter="d") == 2 * number


def test_the_times_between_tokens_are_exported_as_a_histogram_by_what_they_grew() -> None:
    readable = ReadableMetrics()
    metrics = GapMetrics(readable.exporter)
    metrics.of("m").add(0.08, 4)
    for _ in range(2):
        metrics.record()
    metrics.of("m").add(60, 1)
    metrics.record()
    below = {dict(labels)["le"]: sum(seen) for labels, seen in readable.metrics[BUCKETS].values.items()}
    assert below == {**{str(bound): 4 for bound in BOUNDS_S if bound >= 0.02}, "+Inf": 5}
    assert readable.last("roundhouse_inter_token_seconds_sum", model="m") == 60.08


def test_images_are_counted_by_what_became_of_them() -> None:
    readable = ReadableMetrics()
    metrics = ImageMetrics(readable.exporter)
    metrics.fetched(0.5)
    metrics.prepared(0.0)
    metrics.reused()
    metrics.refused()
    assert [readable.last("roundhouse_images", outcome=one) for one in ("prepared", "reused", "refused")] == [1, 1, 1]
    assert readable.last("roundhouse_image_seconds", stage="fetch") == 0.5
    assert readable.last("roundhouse_image_seconds", stage="prepare") > 0
