"""Two services on ports of their own that share a board: what one key gets of both. Over Ray: `e2e/`."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from engines.fake import FakeConfig
from serve_app.access.sharing.board import Board, Hearing, Telling
from tests.support.harness import CONTEXT, RunningEdge, config_for, running_edge
from tests.support.waiting import eventually

pytest_plugins = ("tests.support.edge_fixtures",)

ENGINE = FakeConfig(vocab_size=512, context_length=CONTEXT, step_s=0.01)


@dataclass
class SharedBoard:
    """One board for the event loops of both. While it is `lost`, it does not answer."""

    board: Board = field(default_factory=Board)
    mutex: threading.Lock = field(default_factory=threading.Lock)
    is_lost: bool = False

    async def exchange(self, telling: Telling) -> Hearing:
        if self.is_lost:
            raise ConnectionError("lost")
        with self.mutex:
            return self.board.exchange(telling)


@dataclass
class Pair:
    edges: tuple[RunningEdge, RunningEdge]
    shared: SharedBoard

    def limit(self, name: str, **limits: int) -> None:
        """Each test has a key of its own, as what is used is kept by its name."""
        for edge in self.edges:
            edge.reconfigure(keys=[{**edge.config["keys"][0], "name": name, "limits": limits}])

    def status(self, at: int, max_tokens: int = 1) -> int:
        return self.edges[at % 2].complete(max_tokens=max_tokens, ignore_eos=True).status_code


@pytest.fixture(scope="module")
def pair(model_folders: dict[str, str]) -> Iterator[Pair]:
    shared, config = SharedBoard(), config_for(model_folders)
    options: dict[str, Any] = {"exchange": shared.exchange}
    with running_edge(config, ENGINE, **options) as one, running_edge(config, ENGINE, **options) as other:
        yield Pair((one, other), shared)


def test_requests_that_run_at_one_count_at_the_other_until_they_end(pair: Pair) -> None:
    pair.limit("at a time", concurrency=2)
    pair.edges[0].engine.pause()
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(pair.status, 0) for _ in range(2)]
        eventually(lambda: pair.status(1) == 429)
        assert [pair.status(1) for _ in range(5)] == [429] * 5
        pair.edges[0].engine.resume()
        assert [request.result() for request in running] == [200, 200]
    eventually(lambda: pair.status(1) == 200)


def test_one_request_after_the_other_is_never_refused_wherever_it_goes(pair: Pair) -> None:
    pair.limit("one", concurrency=1)
    assert [pair.status(at) for at in range(30)] == [200] * 30


def test_a_minute_is_used_up_at_both(pair: Pair) -> None:
    pair.limit("minute", requests_per_minute=10)
    assert [pair.status(0) for _ in range(10)] == [200] * 10
    for edge in pair.edges:
        edge.run(edge.service.shared_limits.exchange())
    assert [pair.status(at) for at in range(4)] == [429] * 4


def test_a_board_that_is_lost_refuses_nothing_that_the_service_itself_does_not_run(pair: Pair) -> None:
    pair.limit("lost", concurrency=1)
    pair.edges[0].engine.pause()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(pair.status, 0)
        eventually(lambda: pair.status(1) == 429)
        pair.shared.is_lost = True
        eventually(lambda: pair.status(1) == 200)
        assert [pair.status(1) for _ in range(5)] == [200] * 5
        pair.shared.is_lost = False
        pair.shared.board = Board()  # another one, which knows nothing
        eventually(lambda: pair.status(1) == 429)
        pair.edges[0].engine.resume()
        assert running.result() == 200
