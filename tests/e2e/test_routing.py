"""What replicas report to Serve's controller while ingresses listen to them."""

import pytest

from serve_app.replicas.reports import Report
from tests.e2e.service_config import PAIR, with_pair
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
