"""Marketplace slugs for the tests: entries of the configuration, requests, and a clock for the health of endpoints."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import httpx

from serve_app.api.record import RequestRecord
from serve_app.marketplace.shared_health import SharedHealth
from serve_app.marketplace.slugs import Endpoint
from tests.support.harness import BASE, KEY, RunningEdge

SLUG = "acme/tri"
THEIR_KEY = "sk-the-key-of-the-upstream"
FAST = {"connect_timeout_s": 1.0, "first_byte_timeout_s": 1.0, "idle_timeout_s": 1.0, "total_timeout_s": 20.0}

Sell = Callable[..., None]


def priced(prompt: float = 1, completion: float = 1, cached: float | None = None) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion, "cached": cached}


def local(name: str, model: str = BASE, *, price: Any = None, **fields: Any) -> dict[str, Any]:
    """An endpoint that is served here."""
    return {"name": name, "model": model, "price": price or priced(), **fields}


def remote(name: str, url: str, *, price: Any = None, weight: float = 1.0, **upstream: Any) -> dict[str, Any]:
    """An endpoint elsewhere, with short time limits."""
    about = {"url": url, "model": "their/model", "allow_private": True, **FAST, **upstream}
    return {"name": name, "upstream": about, "price": price or priced(), "weight": weight}


def slug(*endpoints: dict[str, Any], id: str = SLUG, **fields: Any) -> dict[str, Any]:
    return {"id": id, "endpoints": list(endpoints), **fields}


def ask(edge: RunningEdge, model: str = SLUG, *, key: str = KEY, **fields: Any) -> httpx.Response:
    """A streamed completion, read to its end."""
    body = {"model": model, "prompt": "hi", "stream": True, "max_tokens": 4, **fields}
    return edge.post("/completions", key=key, **body)


def ask_chat(edge: RunningEdge, model: str = SLUG, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "hi"}]
    return edge.post("/chat/completions", **{"model": model, "messages": messages, "stream": True, **fields})


def text_of(edge: RunningEdge, response: httpx.Response) -> str:
    """What a stream says, which must end well."""
    *events, done = edge.events(response)
    assert done == "[DONE]", response.text
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def endpoint_of(response: httpx.Response) -> str | None:
    """The endpoint that answered well."""
    assert response.status_code == 200, response.text
    return response.headers.get("x-endpoint")


def listed(edge: RunningEdge, name: str = SLUG, *, secret: str = KEY) -> Any:
    """What GET /models/{slug}/endpoints shows."""
    with edge.http(secret) as client:
        response = client.get(f"/models/{name}/endpoints")
    assert response.status_code == 200, response.text
    return response.json()["data"]


def last_record(edge: RunningEdge) -> RequestRecord:
    """Of the request that ended last."""
    edge.wait_until_idle()
    return edge.recorder.ended[-1]


@dataclass
class ManualClock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def under_clock(edge: RunningEdge) -> ManualClock:
    """From now on the health of all endpoints of this configuration goes by the clock that is returned."""
    clock = ManualClock()

    def clocked(endpoint: Endpoint) -> Endpoint:
        return replace(endpoint, health=SharedHealth(clock))

    marketplace = edge.service.settings.marketplace
    slugs = {
        name: replace(found, endpoints=tuple(map(clocked, found.endpoints)))
        for name, found in marketplace.slugs.items()
    }
    edge.service.settings = replace(edge.service.settings, marketplace=replace(marketplace, slugs=slugs))
    return clock
