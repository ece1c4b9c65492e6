"""A replica whose process is stopped: it says nothing, accepts nothing, and does not die by itself."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.conftest import Service
from tests.e2e.service_config import KEY, MODEL, PAIR, with_pair
from tests.e2e.test_failures import replica_processes
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[float]:
    """The process stopped, until it is killed; when it was stopped."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield time.monotonic()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def complete(service: Service, model_id: str, prompt: str) -> tuple[int, float]:
    """Status of a completion, and how long it took."""
    asked_at = time.monotonic()
    body = {"model": model_id, "prompt": prompt, "max_tokens": 3}
    headers = {"authorization": f"Bearer {KEY}"}
    reply = httpx.post(f"{service.url}/v1/completions", json=body, headers=headers, timeout=60)
    return reply.status_code, time.monotonic() - asked_at


def test_readiness_tells_of_a_replica_that_is_stopped_and_it_is_replaced(service):
    (victim,) = replica_processes("m")
    assert complete(service, MODEL, "x")[0] == 200
    with stopped(victim) as stopped_at:
        eventually(lambda: not service.is_ready(), 20)
        assert time.monotonic() - stopped_at < 12
        eventually(lambda: victim not in replica_processes("m"), 60)
        eventually(lambda: replica_processes("m"), 60)
        assert time.monotonic() - stopped_at < 40
        eventually(service.is_ready, 60)
    assert complete(service, MODEL, "x")[0] == 200


def test_what_comes_while_one_of_two_replicas_is_stopped_is_answered_by_the_other(service):
    service.deploy(with_pair(service.config))
    eventually(lambda: len(replica_processes("pair")) == 2, 60)
    eventually(lambda: complete(service, PAIR, "x")[0] == 200, 60)
    eventually(service.is_ready, 60)
    eventually(lambda: len(service.engines("pair")) == 2, 60)  # a process is there before its replica runs
    victim = replica_processes("pair")[0]
    with stopped(victim) as stopped_at, ThreadPoolExecutor(16) as clients:
        # About half of these go to the stopped one: nothing is known yet. They get another replica once it is.
        asked = [clients.submit(complete, service, PAIR, f"prompt {n}") for n in range(16)]
        answers = [answer.result() for answer in asked]
        assert {status for status, _ in answers} == {200}
        slowest = max(seconds for _, seconds in answers)
        assert slowest < 15, answers
        known_at = time.monotonic()
        answers = [complete(service, PAIR, f"prompt {n}") for n in range(16)]
        assert {status for status, _ in answers} == {200}
        assert sorted(seconds for _, seconds in answers)[-2] < 2, answers
        assert service.is_ready()
        eventually(lambda: victim not in replica_processes("pair"), 60)
        assert time.monotonic() - stopped_at < 40
        assert known_at - stopped_at < 15
    eventually(lambda: len(replica_processes("pair")) == 2, 60)
    eventually(lambda: service.is_idle("pair"), 30)
