"""The fixtures over `slugs.py`; a test module takes them beside those of `edge_fixtures.py`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import RunningEdge
from tests.support.marketplace.slugs import THEIR_KEY, Sell, slug
from tests.support.marketplace.upstream import Upstream, running_upstream


@pytest.fixture
def sell(edge: RunningEdge) -> Iterator[Sell]:
    """Gives the service these slugs, or one slug of these endpoints, beside its models. Takes them away at the end."""

    def sell(*entries: dict[str, Any], changes: dict[str, Any] | None = None, **fields: Any) -> None:
        slugs = list(entries) if "endpoints" in entries[0] else [slug(*entries, **fields)]
        edge.reconfigure(**{"marketplace": {"slugs": slugs}, **(changes or {})})
        assert edge.service.config_error is None, edge.service.config_error

    yield sell
    edge.reconfigure()


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with running_upstream() as running:
        yield running


@pytest.fixture
def key_file(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "key"
    path.write_text(THEIR_KEY + "\n")
    return {"file": str(path)}
