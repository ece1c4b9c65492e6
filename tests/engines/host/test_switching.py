"""Whoever has threads that run Python beside its own lets them take turns soon."""

import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from engines.host.switching import SWITCH_INTERVAL_S
from serve_app.base.workers import Workers
from tests.support.engines.engine_harness import DrivenEngine, engine_config, request


@pytest.fixture(params=[(5e-3, SWITCH_INTERVAL_S), (1e-5, 1e-5)], ids=["from the default", "from less"])
def expected(request: pytest.FixtureRequest) -> Iterator[float]:
    own = sys.getswitchinterval()
    sys.setswitchinterval(request.param[0])
    yield request.param[1]
    sys.setswitchinterval(own)


def test_a_running_engine(expected: float) -> None:
    with DrivenEngine(engine_config()) as engine:
        engine.one(request((1, 2), max_tokens=1))
        assert sys.getswitchinterval() == pytest.approx(expected)


def test_the_threads_of_the_ingress(expected: float) -> None:
    with closing(Workers()):
        assert sys.getswitchinterval() == pytest.approx(expected)
