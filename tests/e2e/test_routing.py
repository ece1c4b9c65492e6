"""What replicas report to Serve's controller while ingresses listen to them, and requests for certain replicas."""

from urllib.parse import quote

import httpx
import pytest

from serve_app.replicas.reports import Report
from tests.e2e.service_config import KEY, PAIR, PLAIN_PREFIX, with_pair
from tests.support.files.checkpoint_files import PATH, digest, files, write
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow


def test_replicas_report_next_to_nothing_to_serve_as_the_ingress_has_asked_each_of_them(service):
    with service.serving(PAIR, with_pair(service.config)):
        eventually(lambda: len(service.engines("pair")) == 2, 60)
        eventually(lambda: service.broadcast("pair", "record_routing_stats") == 2 * [Report().fields()], 60)
        for n in range(8):
            reply = service.sdk().completions.create(model=PAIR, prompt=f"prompt {n}", max_tokens=3)
            assert reply.usage.completion_tokens == 3
        assert service.broadcast("pair", "record_routing_stats") == 2 * [Report().fields()]
        eventually(lambda: service.is_idle("pair"), 30)


@pytest.mark.parametrize("prefix", ["", PLAIN_PREFIX])
def test_a_checkpoint_is_loaded_by_every_replica(service, tmp_path, prefix):
    write(tmp_path, files(metadata={"base_model": PAIR}))
    config = with_pair(service.config)
    for application in config["applications"]:
        for deployment in application.get("deployments", ()):
            deployment["user_config"]["checkpoints"] = {"roots": [str(tmp_path)]}
    with service.serving(PAIR, config):
        eventually(lambda: len(service.engines("pair")) == 2, 60)

        def loaded_by() -> set[str]:
            headers = {"authorization": f"Bearer {KEY}"}
            url = f"{service.url}{prefix}/v1/models/{quote(str(PATH), safe='')}/load"
            reply = httpx.post(url, headers=headers, timeout=60)
            assert reply.status_code == 200, reply.text
            assert reply.json()["digest"] == digest(files())
            assert [load["error"] for load in reply.json()["data"]] == [None] * len(reply.json()["data"])
            return {load["replica"] for load in reply.json()["data"]}

        eventually(lambda: len(loaded_by()) == 2, 60)
        eventually(lambda: service.is_idle("pair"), 30)
