"""`GET /metrics`: which keys may read it, and what they get. What is in it: `deployments/test_node_metrics.py`."""

from collections.abc import Iterator

import pytest

from tests.support.harness import KEY, OTHER_KEY, RunningEdge
from tests.support.wire import refused

pytest_plugins = ("tests.support.edge_fixtures",)

TEXT = b"# TYPE ray_roundhouse_x gauge\nray_roundhouse_x 1\n"


async def exposition() -> bytes:
    return TEXT


@pytest.fixture
def exporting(edge: RunningEdge, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningEdge]:
    """A service that has metrics, with a key that may read them and one that may not."""
    monkeypatch.setattr(edge.service, "read_metrics", exposition)
    reader, other = edge.config["keys"]
    edge.reconfigure(keys=[{**reader, "metrics": True}, other])
    yield edge
    edge.reconfigure()


def test_a_key_that_may_read_the_metrics_gets_them(exporting: RunningEdge) -> None:
    with exporting.http(KEY) as client:
        response = client.get("../metrics")
    assert (response.status_code, response.content) == (200, TEXT)
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_without_a_key_nobody_reads_them(exporting: RunningEdge) -> None:
    with exporting.http(None) as client:
        assert client.get("../metrics").status_code == 401


def test_for_a_key_that_may_not_there_is_no_such_path(exporting: RunningEdge) -> None:
    with exporting.http(OTHER_KEY) as client:
        response = client.get("../metrics")
    assert refused(response, 404) == ("There is no path '/metrics' for this key.", None)


def test_where_nothing_exports_metrics_there_is_no_such_path(edge: RunningEdge) -> None:
    with edge.http(KEY) as client:
        assert client.get("../metrics").status_code == 404
