"""Images behind a real Ray Serve: prepared by a deployment of its own that starts when it is needed, goes to sleep when
it is not, and whose loss costs no request.
"""

import copy
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.e2e.conftest import Service
from tests.e2e.service_config import Json, model
from tests.e2e.test_failures import replica_processes
from tests.support.files.image_files import data_url, encoded, picture
from tests.support.processes.demo_modules import ROOT
from tests.support.waiting import eventually

VISION = "roundhouse/tiny-vision"
SOURCE = str(ROOT / "cluster" / "examples" / "tiny-vision")


def with_vision(config: Json) -> Json:
    """With the small vision model beside the others, and with what prepares images, which sleeps at first."""
    config = copy.deepcopy(config)
    for application in config["applications"]:
        for deployment in application.get("deployments", ()):
            user_config = deployment["user_config"]
            models = [*user_config["models"], {"id": VISION, "app": "vision", "source": SOURCE}]
            deployment["user_config"] = {**user_config, "models": models, "images": {"app": "images"}}
    torch = {"engine": "torch", "id": VISION, "source": SOURCE, "fake": None, "max_running": 16, "threads": 1}
    config["applications"] += [
        model("vision", **torch, kv_cache_bytes=64 << 20),
        {
            "name": "images",
            "route_prefix": None,
            "import_path": "serve_app.app:images",
            "args": {
                "cpus_per_replica": 0.1,
                "replicas": {"min": 0, "max": 1, "upscale_delay_s": 0.1, "downscale_delay_s": 2},
            },
        },
    ]
    return config


@pytest.fixture(scope="module")
def seeing(session_service: Service) -> Iterator[Service]:
    with session_service.serving(VISION, with_vision(session_service.config)) as service:
        yield service


def colour_of(sdk: openai.OpenAI, colour: str) -> str:
    url = data_url(encoded(picture(colour)))
    reply = sdk.chat.completions.create(
        model=VISION,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": url}},
                    {"type": "text", "text": "What colour is the shape?"},
                ],
            }
        ],
        temperature=0,
        max_completion_tokens=8,
    )
    return reply.choices[0].message.content or ""


def test_the_first_image_wakes_the_deployment_that_prepares_it(seeing: Service) -> None:
    assert image_processes() == []
    assert colour_of(seeing.sdk(), "red") == "red"
    assert len(image_processes()) == 1


def test_many_clients_see_their_own_images(seeing: Service) -> None:
    colours = ["red", "blue", "green"] * 4
    with ThreadPoolExecutor(12) as clients:
        assert list(clients.map(lambda colour: colour_of(seeing.sdk(), colour), colours)) == colours


def test_a_killed_image_process_costs_no_request(seeing: Service) -> None:
    with ThreadPoolExecutor(8) as clients:
        asked = [clients.submit(colour_of, seeing.sdk(), "blue") for _ in range(24)]
        eventually(lambda: any(reply.done() for reply in asked))
        for pid in image_processes():
            os.kill(pid, signal.SIGKILL)
        assert [reply.result() for reply in asked] == ["blue"] * 24


def test_without_images_the_deployment_goes_to_sleep(seeing: Service) -> None:
    assert colour_of(seeing.sdk(), "green") == "green"
    eventually(lambda: not image_processes(), 60)
    assert seeing.is_ready()


def test_the_deployment_still_wakes_after_an_update_of_it_failed_and_was_undone(seeing: Service) -> None:
    from ray import serve

    assert seeing.deployed is not None
    before, broken = seeing.deployed, copy.deepcopy(seeing.deployed)
    broken["applications"][-1]["args"]["threads"] = 0
    seeing.deploy(broken)
    eventually(lambda: serve.status().applications["images"].status == "DEPLOY_FAILED")
    seeing.deploy(before)
    eventually(lambda: serve.status().applications["images"].status == "RUNNING")
    eventually(lambda: not image_processes(), 60)
    assert colour_of(seeing.sdk(timeout=60), "red") == "red"


def image_processes() -> list[int]:
    return replica_processes("images", "preprocessor")
