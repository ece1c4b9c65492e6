"""A real Prometheus scrapes the running service by `GET /metrics`, and answers every expression of the boards and the
alert rules.
"""

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from engines.lora.format.digest import CONFIG_FILE, WEIGHTS_FILE, adapter_digest
from tests.e2e.conftest import Service
from tests.e2e.service_config import DEMO, MODEL, with_demo
from tests.support.processes.demo_modules import ROOT
from tests.support.waiting import eventually
from tests.support.watching import (
    Prometheus,
    alerts,
    expressions,
    metrics_in,
    of_nodes,
    of_service,
    running_prometheus,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CHECKPOINTS = ["tinker://demo/sampler_weights/quill", "tinker://demo/sampler_weights/tools"]
READER_KEY = "rh-e2e-prometheus-key"
REFUSED = "tinker://demo/sampler_weights/wide"
ONLY_HERE = "tinker://demo/sampler_weights/only-here"
# Counted only when something goes wrong or a remote store is used, neither of which happens here. Ray exports a counter
# from its first count on.
SILENT = {
    "ray_roundhouse_replies_unparsed_total",
    "ray_roundhouse_engine_preemptions_total",
    "ray_roundhouse_engine_failed_requests_total",
    "ray_roundhouse_engine_aborted_total",
    "ray_roundhouse_images_total",
    "ray_roundhouse_image_seconds_sum",
    "ray_roundhouse_checkpoint_fetches_total",
    "ray_roundhouse_checkpoint_evictions_total",
}
# Alerts that look at failures, or at what is absent.
NEVER_HERE = {"alert RoundhouseGone", "alert RoundhouseRequestsFail", "alert RoundhouseRefusesForLoad"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two shipped checkpoints, one of a higher rank than the model takes, and one with a digest of its own."""
    root = tmp_path_factory.mktemp("store")
    shipped = ROOT / "cluster" / "examples" / "checkpoints"
    shutil.copytree(shipped, root / "demo" / "sampler_weights")
    changes = {"wide": ('"r": 3', '"r": 512'), "only-here": ('"lora_dropout": 0.0', '"lora_dropout": 0.5')}
    for name, (before, after) in changes.items():
        folder = shutil.copytree(shipped / "quill", root / "demo" / "sampler_weights" / name)
        config = (folder / CONFIG_FILE).read_text()
        assert before in config
        (folder / CONFIG_FILE).write_text(config.replace(before, after))
        (folder / "checkpoint.json").write_text(json.dumps({"base_model": DEMO}))  # without the sums of the files
    return root


@pytest.fixture(scope="module")
def watched(session_service: Service, store: Path) -> Iterator[Service]:
    """The session's service with the demo on the torch engine, which has room for one adapter at a time."""
    config = with_demo(session_service.config, store, max_adapters=1, threads=1)
    reader = {"name": "prometheus", "sha256": hashlib.sha256(READER_KEY.encode()).hexdigest()}
    for application in config["applications"]:
        for deployment in application.get("deployments", ()):
            deployment["user_config"]["keys"] += [{**reader, "metrics": True, "models": []}]
    with session_service.serving(DEMO, config) as service:
        yield service


@pytest.fixture(scope="module")
def prometheus(watched: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    key_file = folder / "key"
    key_file.write_text(f"{READER_KEY}\n")
    with running_prometheus(of_service(watched.port, key_file), folder) as running:
        yield running


def discovery(folder: Path) -> Path:
    """The file that Ray's dashboard writes, by the code that it runs: the Ray of these tests has no dashboard."""
    import ray
    from ray._private.metrics_agent import PrometheusServiceDiscoveryWriter

    writer = PrometheusServiceDiscoveryWriter(ray.get_runtime_context().gcs_address, str(folder))
    writer.write()
    return Path(writer.get_target_file_name())


def traffic(service: Service) -> None:
    """Requests of every kind that a board shows: of both engines, with adapters that take each other's place, with
    prompts that begin alike, and some that are refused.
    """
    sdk = service.sdk(max_retries=0)
    asked = [MODEL, MODEL, DEMO, *CHECKPOINTS, *CHECKPOINTS, REFUSED, "unknown/model"]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda model: ask(sdk, model), asked))
    assert service.is_ready()


def ask(sdk: openai.OpenAI, model: str) -> None:
    prompt = "Once upon a time there was a king who had three daughters, and every one of them had a garden. " * 2
    try:
        sdk.completions.create(model=model, prompt=prompt, max_tokens=8, temperature=0)
    except (openai.NotFoundError, openai.UnprocessableEntityError):
        assert model in (REFUSED, "unknown/model")


def always_answered(expression: str) -> str:
    """Without the filter of a comparison: 1 or 0 for each series that the alert looks at."""
    return re.sub(r"\s(>|<|==) (?=[\d.])", r" \1 bool ", re.sub(r"\[\d+m\]", "[1m]", expression))


def without_data(service: Service, prometheus: Prometheus) -> dict[str, str]:
    """The expressions that have no answer yet, after some more traffic."""
    traffic(service)
    return {
        name: expression
        for name, expression in expressions().items()
        if name not in NEVER_HERE
        and not metrics_in(expression) & SILENT
        and not prometheus.ask(always_answered(expression))
    }


def test_every_expression_with_traffic_returns_data(watched: Service, prometheus: Prometheus) -> None:
    with contextlib.suppress(AssertionError):  # the one below names what is missing
        eventually(lambda: not without_data(watched, prometheus), 120)
    assert without_data(watched, prometheus) == {}


def test_the_nodes_that_ray_lists_have_the_same_metrics(watched: Service, tmp_path: Path) -> None:
    with running_prometheus(of_nodes(discovery(tmp_path)), tmp_path) as prometheus:
        eventually(lambda: prometheus.ask("ray_roundhouse_inter_token_seconds_bucket_total"), 60)
        # One of the targets may not have been asked yet, or not have answered in time on a busy machine.
        eventually(lambda: {series["value"][1] for series in prometheus.ask("up")} == {"1"}, 60)


def test_every_expression_is_evaluated_without_an_error(prometheus: Prometheus) -> None:
    for expression in expressions().values():
        prometheus.ask(expression)


def test_the_rules_are_healthy_and_a_good_service_raises_no_alarm(prometheus: Prometheus) -> None:
    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]

    eventually(lambda: all(rule["health"] != "unknown" for rule in rules()))
    assert sorted(rule["name"] for rule in rules()) == sorted(alert["alert"] for alert in alerts())
    assert {rule["name"]: rule["lastError"] for rule in rules() if rule["health"] != "ok"} == {}
    critical = {alert["alert"] for alert in alerts() if alert["labels"]["severity"] == "critical"}
    assert critical & {rule["name"] for rule in rules() if rule["state"] == "firing"} == set()


def test_what_the_service_did_is_what_prometheus_shows(watched: Service, prometheus: Prometheus, store: Path) -> None:
    """By an adapter that no other test asks for."""
    usage = watched.sdk().completions.create(model=ONLY_HERE, prompt="x", max_tokens=7).usage
    folder = store / "demo" / "sampler_weights" / "only-here"
    digest = adapter_digest((folder / CONFIG_FILE).read_bytes(), (folder / WEIGHTS_FILE).read_bytes())
    for metric, value in {"requests": 1, "completion_tokens": usage.completion_tokens}.items():
        shown = f'sum(ray_roundhouse_adapter_{metric}_total{{adapter="{digest[:12]}"}})'
        eventually(partial(prometheus.ask, shown), 60)
        (series,) = prometheus.ask(shown)
        assert float(series["value"][1]) == value
