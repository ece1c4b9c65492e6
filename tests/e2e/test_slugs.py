"""Marketplace slugs on Ray: endpoints of the cluster, another service, and a proxy in between."""

from pathlib import Path

import httpx

from tests.e2e.conftest import Service
from tests.e2e.service_config import KEY, MODEL, PLAIN_PREFIX, SLEEPY
from tests.e2e.test_reconfigure import changed
from tests.support.marketplace.slugs import local, priced, remote, slug
from tests.support.waiting import eventually

BOTH, ASLEEP = "acme/both", "acme/asleep"


def ask(service: Service, name: str) -> httpx.Response:
    body = {"model": name, "prompt": "x", "stream": True, "max_tokens": 4}
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.post(f"{service.url}/v1/completions", json=body, headers=headers, timeout=60)


def endpoints(service: Service, name: str) -> dict[str, str]:
    response = httpx.get(f"{service.url}/v1/models/{name}/endpoints", headers={"authorization": f"Bearer {KEY}"})
    return {item["name"]: item["health"] for item in response.json()["data"]}


def test_a_slug_streams_from_a_replica_and_from_another_service_and_wakes_a_model(
    service: Service, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text(KEY)
    other = f"{service.url}{PLAIN_PREFIX}/v1"
    config, user_config = changed(service)
    far = remote("far", other, model=MODEL, key={"file": str(tmp_path / "key")}, first_byte_timeout_s=30.0)
    user_config["marketplace"] = {
        "slugs": [
            slug(local("here", MODEL, price=priced(2, 2)), far, id=BOTH),
            slug(local("here", SLEEPY), id=ASLEEP),
        ]
    }
    service.deploy(config)
    eventually(lambda: ask(service, f"{BOTH}/ep/here").status_code == 200, 30)
    for name, endpoint in ((BOTH, "far"), (f"{BOTH}/ep/here", "here"), (ASLEEP, "here")):
        response = ask(service, name)
        assert (response.status_code, response.headers.get("x-endpoint")) == (200, endpoint), response.text
        assert response.text.endswith("data: [DONE]\n\n")
    assert endpoints(service, BOTH) == {"here": "up", "far": "up"}
    assert endpoints(service, ASLEEP) == {"here": "up"}
