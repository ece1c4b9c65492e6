"""Mixed load at saturation: nothing that clients see is outside the contract, and nothing of it is left.

The long version, on a service that runs: `tests/bench/soak.py`.
"""

import asyncio
import copy
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serve_app.deployments.node_metrics import NodeMetrics
from tests.e2e.conftest import Json, Service
from tests.e2e.service_config import KEY, MODEL
from tests.e2e.test_images import VISION, with_vision
from tests.support.files.lora_files import write_vision_adapter
from tests.support.soak.kinds import Subjects
from tests.support.soak.load import Load, under
from tests.support.soak.passing import PassingCheckpoints
from tests.support.soak.vitals import Vitals, below, under_way, vitals
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]

CLIENTS = 60
WARM_UP_S, LOAD_S = 20.0, 60.0
# What a service may take more after three times as many requests: caches that are not full yet, rather than leaks.
MORE_BYTES, MORE_FILES = 200 << 20, 40


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def checkpoints(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PassingCheckpoints]:
    """Of the vision model, which has room for fewer of them than there are."""
    template = write_vision_adapter(tmp_path_factory.mktemp("adapter") / "template", VISION)
    passing = PassingCheckpoints(store, template, VISION)
    passing.pass_on()
    yield passing
    passing.close()


@pytest.fixture(scope="module")
def saturated(session_service: Service, store: Path) -> Iterator[Service]:
    """The session's service with a vision model of few places, few adapters, and a KV cache for two of its prompts."""
    config = cramped(with_vision(session_service.config), store)
    with session_service.serving(VISION, config, within_s=300) as service:
        yield service


def cramped(config: Json, store: Path) -> Json:
    config = copy.deepcopy(config)
    for application in config["applications"]:
        for deployment in application.get("deployments", ()):
            deployment["user_config"]["checkpoints"] = {"roots": [str(store)]}
        if application["name"] == "vision":
            few = {"max_running": 8, "max_waiting": 4, "max_adapters": 2}
            application["args"] |= {**few, "context_length": 512, "kv_cache_bytes": 2 << 20}
    return config


def held_by(service: Service) -> Vitals:
    """By the processes of the service, once it is idle and its metrics say so too."""
    eventually(lambda: service.is_idle("m") and service.is_idle("vision"), 120)
    eventually(lambda: under_way(asyncio.run(metrics())) == {}, 120)
    assert [engine["adapters_pinned"] for engine in service.engines("vision")] == [0]
    assert [engine["kv_used_fraction"] for engine in service.engines("vision")] == [0.0]
    return vitals(below(os.getpid()))


async def metrics() -> str:
    nodes = NodeMetrics()
    try:
        return (await nodes.read()).decode()
    finally:
        await nodes.close()


def test_mixed_load_gets_what_the_contract_says_and_leaves_nothing(
    saturated: Service, checkpoints: PassingCheckpoints
) -> None:
    kinds = Subjects(MODEL, VISION, checkpoints.name).kinds()
    held = []
    for seed, seconds in enumerate((WARM_UP_S, LOAD_S)):
        ends_at = time.monotonic() + seconds
        with under(Load(saturated.url, KEY, kinds, CLIENTS, seed)) as tally:
            while time.monotonic() < ends_at:
                answered = tally.answered
                eventually(lambda answered=answered: tally.answered >= answered + CLIENTS, 120)
                checkpoints.pass_on()
        assert tally.faults == []
        held.append(held_by(saturated))
    assert min(tally.served(kind) for kind in ("chat", "completion, streamed", "image", "checkpoint")) > 0
    assert sum(count for (_, outcome), count in tally.outcomes.items() if outcome.startswith("429")) > 0
    assert held[1].memory_bytes - held[0].memory_bytes < MORE_BYTES, held
    assert held[1].open_files - held[0].open_files < MORE_FILES, held
    assert saturated.is_ready()


def test_when_the_kv_cache_is_full_requests_wait_for_each_other_and_all_end_whole(saturated: Service) -> None:
    """Eight replies of 280 tokens each, and a cache for 1,008."""
    before = preemptions(asyncio.run(metrics()))
    sdk = saturated.sdk(max_retries=0, timeout=300)
    no_end = {"2": -100}
    with ThreadPoolExecutor(8) as clients:
        asked = [
            clients.submit(
                sdk.completions.create, model=VISION, prompt=f"{n}", max_tokens=280, seed=n, logit_bias=no_end
            )
            for n in range(8)
        ]
        replies = [reply.result() for reply in asked]
    assert [reply.usage.completion_tokens for reply in replies] == [280] * 8
    eventually(lambda: preemptions(asyncio.run(metrics())) > before, 60)
    held_by(saturated)


def preemptions(exported: str) -> float:
    lines = [line for line in exported.splitlines() if line.startswith("ray_roundhouse_engine_preemptions_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)
