"""What is lost or changed while clients ask: every request is answered, and nothing of it is left."""

import contextlib
import copy
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import httpx
import psutil
import pytest

from tests.e2e.conftest import Json, Service
from tests.e2e.service_config import KEY, MODEL, PAIR, with_pair
from tests.e2e.test_failures import Listening
from tests.support.soak.kinds import texts
from tests.support.soak.load import Load, Tally, under
from tests.support.soak.vitals import below
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]

LONG_S = 180  # for what takes seconds on an idle machine


@pytest.fixture(scope="module")
def pair(session_service: Service) -> Iterator[Service]:
    """The session's service with a model of two replicas beside the others."""
    with session_service.serving(PAIR, with_pair(session_service.config), within_s=LONG_S) as service:
        eventually(lambda: len(running(service, "pair")) == 2, LONG_S)
        yield service


@contextlib.contextmanager
def loaded(service: Service, *models: str) -> Iterator[Tally]:
    """With clients of these models, none of which may be refused."""
    kinds = [replace(kind, refusals=frozenset()) for model in models for kind in texts(model, 64)]
    with under(Load(service.url, KEY, kinds, clients=12)) as tally:
        wait_for_answers(tally)
        yield tally
        wait_for_answers(tally)
    assert tally.faults == []


def wait_for_answers(tally: Tally, more: int = 40) -> None:
    answered = tally.answered
    eventually(lambda: tally.answered >= answered + more, LONG_S)


def running(service: Service, app: str) -> set[int]:
    """The processes of an engine's replicas that run; none while Serve's controller is away, or builds the model."""
    from ray.exceptions import RayError
    from ray.serve.context import _get_global_client

    try:
        deployments = _get_global_client().get_serve_details()["applications"][app]["deployments"]
    except RayError:
        return set()
    replicas = deployments["engine"]["replicas"] if "engine" in deployments else []
    return {replica["pid"] for replica in replicas if replica["state"] == "RUNNING"}


def controllers() -> list[int]:
    """The controller of this Serve; another may be on this machine."""
    return [process.pid for process in below(os.getpid()) if "ray::ServeController" in " ".join(command_line(process))]


def command_line(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def is_deployed(service: Service, config: Json) -> bool:
    """Whether the controller took the configuration."""
    from ray.exceptions import RayError

    try:
        service.deploy(config)
    except RayError:
        return False
    return True


def user_config(config: Json) -> Json:
    """That of the first ingress."""
    return config["applications"][0]["deployments"][0]["user_config"]


def with_alias(config: Json) -> Json:
    config = copy.deepcopy(config)
    models = user_config(config)["models"]
    models.append({**models[0], "id": "tiny/Alias"})
    return config


def has_alias(service: Service) -> bool:
    return "tiny/Alias" in [model.id for model in service.sdk().models.list()]


def told(service: Service) -> Json:
    return httpx.get(f"{service.url}/readyz", timeout=30).json()


def test_while_the_controller_is_gone_requests_are_answered_and_its_successor_takes_changes(pair: Service) -> None:
    before, replicas = pair.deployed, running(pair, "pair")
    assert before is not None
    stream = Listening(pair)
    with loaded(pair, MODEL, PAIR) as tally:
        stream.start()
        assert stream.started.wait(LONG_S)
        (victim,) = controllers()
        os.kill(victim, signal.SIGKILL)
        wait_for_answers(tally)
        eventually(lambda: controllers() not in ([], [victim]), LONG_S)
        eventually(lambda: is_deployed(pair, with_alias(before)), LONG_S)
        eventually(lambda: has_alias(pair), LONG_S)
        stream.join(LONG_S)
    assert stream.lines[-1] == "data: [DONE]"
    eventually(lambda: running(pair, "pair") == replicas, LONG_S)
    pair.deploy(before)
    eventually(lambda: not has_alias(pair), LONG_S)
    assert_nothing_left(pair)


def test_no_request_fails_while_all_replicas_of_a_model_are_replaced(pair: Service) -> None:
    before = pair.deployed
    assert before is not None
    changed = copy.deepcopy(before)
    (model,) = [application for application in changed["applications"] if application["name"] == "pair"]
    model["args"]["max_running"] = 65
    with loaded(pair, PAIR):
        for config in (changed, before):
            old = running(pair, "pair")
            pair.deploy(config)
            eventually(partial(are_replaced, pair, "pair", old), LONG_S)
    assert_nothing_left(pair)


def are_replaced(service: Service, app: str, old: set[int]) -> bool:
    """All of them, by as many others."""
    now = running(service, app)
    return len(now) == len(old) and not now & old


def test_no_request_fails_while_good_and_bad_configurations_come(pair: Service) -> None:
    from ray import serve

    before = pair.deployed
    assert before is not None
    bad: Json = copy.deepcopy(before)
    user_config(bad)["models"].append({"id": "no/Model", "app": "m", "source": "/nowhere"})
    user_config(bad)["limits"]["messages"] = 0
    broken: Json = copy.deepcopy(before)
    (model,) = [application for application in broken["applications"] if application["name"] == "sleepy"]
    model["args"]["max_runing"] = 3
    with loaded(pair, MODEL, PAIR):
        pair.deploy(with_alias(before))
        eventually(lambda: has_alias(pair), LONG_S)
        pair.deploy(bad)
        eventually(lambda: sorted(told(pair).get("config_errors", ())) == ["limits", "models"], LONG_S)
        pair.deploy(broken)
        eventually(lambda: serve.status().applications["sleepy"].status == "DEPLOY_FAILED", LONG_S)
        pair.deploy(before)
        eventually(lambda: serve.status().applications["sleepy"].status == "RUNNING", LONG_S)
        eventually(lambda: told(pair) == {"status": "ready"} and not has_alias(pair), LONG_S)
    assert_nothing_left(pair)


def test_a_stream_that_lasts_longer_than_its_replica_may_take_to_stop_ends_with_an_error(pair: Service) -> None:
    """`m` has one replica: the streams are on it, and others wait for the next."""
    before = pair.deployed
    assert before is not None
    hasty, next_one = copy.deepcopy(before), copy.deepcopy(before)
    for config, max_running in ((hasty, 64), (next_one, 65)):
        (model,) = [application for application in config["applications"] if application["name"] == "m"]
        model["args"] |= {"graceful_shutdown_timeout_s": 1, "max_running": max_running}
    old = running(pair, "m")
    pair.deploy(hasty)
    eventually(lambda: are_replaced(pair, "m", old), LONG_S)
    eventually(pair.is_ready, LONG_S)
    streams = [Listening(pair) for _ in range(4)]
    for stream in streams:
        stream.start()
    assert all(stream.started.wait(LONG_S) for stream in streams)
    pair.deploy(next_one)
    for stream in streams:
        stream.join(LONG_S)
        assert json.loads(stream.lines[-1].removeprefix("data: "))["error"]["code"] == "unavailable"
    pair.deploy(before)
    eventually(pair.is_ready, LONG_S)
    assert_nothing_left(pair)


def assert_nothing_left(service: Service) -> None:
    """In the replicas, and of the changes."""
    eventually(lambda: service.is_idle("m") and service.is_idle("pair"), LONG_S)
    eventually(lambda: told(service) == {"status": "ready"}, LONG_S)
