"""Replicas that come and go with the load, and which of them gets a request."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.conftest import Service
from tests.e2e.service_config import GROWING, SLEEPY
from tests.support.waiting import eventually


def running(service: Service, app: str) -> int:
    from ray import serve

    return serve.status().applications[app].deployments["engine"].replica_states.get("RUNNING", 0)


@pytest.mark.slow
def test_a_model_sleeps_wakes_for_a_request_and_sleeps_again(service):
    eventually(lambda: running(service, "sleepy") == 0, 60)
    assert service.is_ready()  # asking does not wake it, and it counts as ready
    assert running(service, "sleepy") == 0
    reply = service.sdk(timeout=60).completions.create(model=SLEEPY, prompt="x", max_tokens=2)
    assert reply.usage.completion_tokens == 2
    assert running(service, "sleepy") == 1
    eventually(lambda: running(service, "sleepy") == 0, 60)


@pytest.mark.slow
def test_a_second_replica_comes_with_the_load_and_shares_it(service):
    sdk = service.sdk(timeout=120)
    with ThreadPoolExecutor(24) as pool:
        replies = [
            pool.submit(sdk.completions.create, model=GROWING, prompt=f"{n}", max_tokens=250, seed=n) for n in range(24)
        ]
        eventually(lambda: running(service, "growing") == 2, 60)
        more = [pool.submit(sdk.completions.create, model=GROWING, prompt=f"m{n}", max_tokens=100) for n in range(8)]
        assert all(future.result().choices[0].finish_reason for future in replies + more)
