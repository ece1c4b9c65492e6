"""Replicas that die, and engines that hang."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.conftest import Service
from tests.e2e.service_config import GROWING, KEY, MODEL
from tests.support.waiting import eventually


def replica_processes(app: str, deployment: str = "engine") -> list[int]:
    """By the title that Serve gives them."""
    title = f"ray::ServeReplica:{app}:{deployment}"
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if title in (entry / "cmdline").read_text():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


class Listening(threading.Thread):
    """A client of one long stream; knows how it ended."""

    def __init__(self, service: Service) -> None:
        super().__init__()
        self._service = service
        self.started = threading.Event()
        self.lines: list[str] = []
        self.ended_at = 0.0

    def run(self) -> None:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 3000, "stream": True}
        headers = {"authorization": f"Bearer {KEY}"}
        url = f"{self._service.url}/v1/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=30) as reply:
            for line in reply.iter_lines():
                self.lines += [line] if line else []
                self.started.set()
        self.ended_at = time.monotonic()


def test_when_a_replica_is_killed_its_streams_end_with_an_error_and_the_service_comes_back(service):
    listeners = [Listening(service) for _ in range(8)]
    for listener in listeners:
        listener.start()
    for listener in listeners:
        assert listener.started.wait(10)
    (victim,) = replica_processes("m")
    killed_at = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    for listener in listeners:
        listener.join(10)
        assert json.loads(listener.lines[-1].removeprefix("data: "))["error"]["code"] == "unavailable"
        assert listener.ended_at - killed_at < 3

    # No request hangs meanwhile: each is answered, or refused with the advice to try again.
    answers = []
    while not answers or answers[-1] != 200:
        asked_at = time.monotonic()
        reply = httpx.post(
            f"{service.url}/v1/completions",
            json={"model": MODEL, "prompt": "x", "max_tokens": 2},
            headers={"authorization": f"Bearer {KEY}"},
            timeout=30,
        )
        assert time.monotonic() - asked_at < 15
        assert reply.status_code == 200 or (reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1)
        answers.append(reply.status_code)
        assert time.monotonic() - killed_at < 60
    assert replica_processes("m") != [victim]
    eventually(service.is_ready)


def test_while_a_replica_is_gone_the_service_says_that_it_is_not_ready(service):
    (victim,) = replica_processes("m")
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: not service.is_ready(), 5)
    eventually(service.is_ready, 60)


def test_a_model_that_is_not_deployed_is_refused_without_a_long_wait(service):
    config = {**service.config, "applications": [a for a in service.config["applications"] if a["name"] != "growing"]}
    service.deploy(config)
    eventually(lambda: not service.is_ready())
    started = time.monotonic()
    with pytest.raises(openai.InternalServerError) as refused:
        service.sdk(max_retries=0).completions.create(model=GROWING, prompt="x", max_tokens=2)
    assert refused.value.status_code == 503
    assert time.monotonic() - started < 10
