"""Changes to a running service."""

import copy
import hashlib
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.conftest import Json, Service
from tests.e2e.service_config import MODEL, SLEEPY
from tests.support.waiting import eventually


def changed(service: Service) -> tuple[Json, Json]:
    """A copy of the configuration, and the user_config of the first ingress in it."""
    config = copy.deepcopy(service.config)
    return config, config["applications"][0]["deployments"][0]["user_config"]


def pids(service: Service) -> list[int]:
    """Of the replicas of the first model that run."""
    from ray.serve.context import _get_global_client

    engine = _get_global_client().get_serve_details()["applications"]["m"]["deployments"]["engine"]
    return [replica["pid"] for replica in engine["replicas"] if replica["state"] == "RUNNING"]


def test_a_new_key_and_model_work_within_seconds_and_restart_nothing(service):
    before = pids(service)
    assert before
    config, user_config = changed(service)
    user_config["keys"].append({"name": "second", "sha256": "0" * 64})
    user_config["models"].append({**user_config["models"][0], "id": "tiny/Alias"})
    service.deploy(config)
    eventually(lambda: "tiny/Alias" in [model.id for model in service.sdk().models.list()], 10)
    assert service.sdk().completions.create(model="tiny/Alias", prompt="x", max_tokens=2).model == "tiny/Alias"
    assert pids(service) == before


@pytest.mark.parametrize("value", [{"models": []}, {"limits": {"messages": 0}}, {"nonsense": 1}])
def test_what_is_bad_of_a_configuration_changes_nothing(service, value):
    config, user_config = changed(service)
    user_config.update(value)
    service.deploy(config)
    good = [service.sdk().completions.create(model=MODEL, prompt="x", max_tokens=2) for _ in range(20)]
    assert len(good) == 20
    assert service.is_ready()


def status(service: Service, key: str) -> int:
    return httpx.get(f"{service.url}/v1/models", headers={"authorization": f"Bearer {key}"}, timeout=10).status_code


def test_a_key_is_revoked_by_a_change_that_holds_a_bad_model(service):
    revoked = "rh-soon-to-be-revoked"
    config, user_config = changed(service)
    user_config["keys"].append({"name": "other", "sha256": hashlib.sha256(revoked.encode()).hexdigest()})
    service.deploy(config)
    eventually(lambda: status(service, revoked) == 200, 10)
    config, user_config = changed(service)
    user_config["models"].append({"id": "no/Model", "app": "m", "source": "/nowhere"})
    service.deploy(config)
    eventually(lambda: status(service, revoked) == 401, 10)
    eventually(lambda: "config_errors" in httpx.get(f"{service.url}/readyz", timeout=10).json(), 10)
    assert httpx.get(f"{service.url}/readyz", timeout=10).json() == {"status": "ready", "config_errors": ["models"]}
    assert service.sdk().completions.create(model=MODEL, prompt="x", max_tokens=2).model == MODEL


def test_requests_under_way_finish_when_their_model_is_replaced(service):
    """`args` change, so Serve starts a new replica and drains the old one."""
    before = pids(service)
    sdk = service.sdk(timeout=60)
    with ThreadPoolExecutor(8) as pool:
        running = [
            pool.submit(sdk.completions.create, model=MODEL, prompt=f"{n}", max_tokens=400, seed=n) for n in range(8)
        ]
        eventually(lambda: service.engines("m")[0]["running"] == 8)
        config = copy.deepcopy(service.config)
        config["applications"][2]["args"]["max_running"] = 65
        service.deploy(config)
        replies = [future.result() for future in running]
    assert all(reply.choices[0].finish_reason for reply in replies)
    eventually(lambda: service.is_ready() and pids(service) not in ([], before))


@pytest.mark.slow
def test_an_error_in_the_arguments_of_a_model_is_one_readable_sentence_and_is_corrected_without_a_trace(service):
    from ray import serve

    config = copy.deepcopy(service.config)
    config["applications"][3]["args"]["max_runing"] = 3
    service.deploy(config)
    eventually(lambda: serve.status().applications["sleepy"].status == "DEPLOY_FAILED")
    message = serve.status().applications["sleepy"].message
    assert message.splitlines()[-1] == "max_runing is not a known key. Did you mean 'max_running'?"
    assert "Traceback" not in message
    service.deploy(service.config)
    eventually(lambda: serve.status().applications["sleepy"].status == "RUNNING")
    reply = service.sdk(timeout=30).completions.create(model=SLEEPY, prompt="x", max_tokens=2)
    assert reply.usage.completion_tokens == 2
