"""One stand-in upstream for all tests of a module; the module takes the fixtures with `pytest_plugins`."""

from collections.abc import Iterator

import pytest

from tests.support.marketplace.upstream import Upstream, running_upstream


@pytest.fixture(scope="module")
def module_server() -> Iterator[Upstream]:
    with running_upstream() as server:
        yield server


@pytest.fixture
def server(module_server: Upstream) -> Iterator[Upstream]:
    """With its normal behaviour, and nothing received."""
    module_server.received.clear()
    yield module_server
    module_server.behaves("normal")
