"""POST /models/{id}/load: a checkpoint is loaded by every replica."""

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextvars import ContextVar
from urllib.parse import quote

import httpx
import pytest

from engines.interface.errors import AdapterRefused, EngineError
from engines.interface.protocol import FinishReason, GenerateRequest, TokenDelta
from serve_app.cli.commands import main
from serve_app.replicas.generation import on_replica
from tests.support.harness import CHAT, KEY, RunningEdge, StoredCheckpoint

pytest_plugins = ("tests.support.edge_fixtures",)

PATH = "tinker://run:1/sampler_weights/n"


OF_REQUEST: ContextVar[bool] = ContextVar("of_request", default=False)


class Three:
    """Three replicas; an error in place of one is what it answers. Serve loses all but one of the calls that are made
    in the context of one request.
    """

    def __init__(self, **errors: EngineError) -> None:
        self.errors = errors
        self.asked: dict[str, GenerateRequest] = {}
        self._all_asked = asyncio.Event()

    async def generate(
        self, deployment: str, request: GenerateRequest, *, affinity: str
    ) -> AsyncGenerator[TokenDelta, None]:
        assert not OF_REQUEST.get()
        (name,) = (one for one in "abc" if affinity == on_replica(one))
        self.asked[name] = request
        if len(self.asked) == 3:
            self._all_asked.set()
        await self._all_asked.wait()
        if name in self.errors:
            raise self.errors[name]
        yield TokenDelta((1,), finish_reason=FinishReason.LENGTH)

    def running(self, deployment: str) -> Sequence[str]:
        OF_REQUEST.set(True)
        return list("abc")

    def held(self, deployment: str) -> Collection[bytes]:
        return []

    async def readiness(self, deployments: Collection[str]) -> Mapping[str, str | None]:
        return dict.fromkeys(deployments)


@pytest.fixture
def stored(edge: RunningEdge) -> RunningEdge:
    edge.checkpoints.held[PATH] = StoredCheckpoint("d1", owner="alice")
    return edge


def _load(edge: RunningEdge, model: str = PATH, key: str = KEY) -> httpx.Response:
    with edge.http(key) as client:
        return client.post(f"/models/{quote(model, safe='')}/load")


def _with(edge: RunningEdge, replicas: Three) -> httpx.Response:
    before = edge.service.replicas
    edge.service.replicas = replicas
    try:
        return _load(edge)
    finally:
        edge.service.replicas = before


def test_every_replica_loads_it_at_the_same_time_and_says_how_long_it_took(stored: RunningEdge) -> None:
    replicas = Three()
    response = _with(stored, replicas)
    assert response.headers["x-checkpoint-digest"] == response.json()["digest"] == "d1"
    loads = response.json()["data"]
    assert [(load["replica"], load["error"]) for load in loads] == [("a", None), ("b", None), ("c", None)]
    assert all(0 <= load["seconds"] < 60 for load in loads)
    requests = replicas.asked.values()
    assert {request.adapter.digest for request in requests if request.adapter} == {"d1"}
    assert len({request.request_id for request in requests}) == 3
    assert stored.checkpoints.kept == []


def test_one_replica_that_cannot_load_it_says_why(stored: RunningEdge) -> None:
    response = _with(stored, Three(b=AdapterRefused("no such tensor")))
    assert [load["error"] for load in response.json()["data"]] == [None, "no such tensor", None]
    assert response.json()["data"][1]["seconds"] is None


def test_if_no_replica_can_load_it_the_answer_is_that_of_a_request(stored: RunningEdge) -> None:
    response = _with(stored, Three(**{name: AdapterRefused("no such tensor") for name in "abc"}))
    stored.script.says(AdapterRefused("no such tensor"))
    asked = stored.complete(model=PATH)
    assert (response.status_code, response.json()["error"]) == (422, asked.json()["error"])


def test_an_engine_loads_it(stored: RunningEdge) -> None:
    assert _load(stored).json()["data"][0]["error"] is None
    (request,) = stored.script.requests
    assert (request.adapter and request.adapter.digest, request.sampling.max_tokens) == ("d1", 1)


def test_what_cannot_be_loaded_is_refused(stored: RunningEdge) -> None:
    assert (_load(stored, CHAT).status_code, _load(stored, CHAT).json()["error"]["param"]) == (400, "model")
    assert _load(stored, "tinker://other/sampler_weights/n").status_code == 404
    assert _load(stored, key="rh-other-key").status_code == 404
    assert _load(stored, key="wrong").status_code == 401
    assert stored.script.requests == []


def test_the_command_says_what_each_replica_says(
    stored: RunningEdge, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUNDHOUSE_API_KEY", KEY)
    url = f"http://127.0.0.1:{stored.port}/v1"
    assert main(["checkpoints", "warm", PATH, "--url", url]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{PATH} is loaded."
