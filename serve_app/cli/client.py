"""A client of a running service for the terminal. It uses only Python's standard library."""

import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

_TIMEOUT_S = 600.0


class ServiceRefused(Exception):
    """The service answered with an error or did not answer."""


@dataclass(frozen=True, slots=True)
class Client:
    """`url` is the base of the API, such as http://127.0.0.1:8000/v1."""

    url: str
    key: str

    def models(self) -> list[str]:
        """The ids that this key may use. Raises `ServiceRefused`."""
        with self._request("GET", "/models", None) as reply:
            return [model["id"] for model in json.load(reply)["data"]]

    def chat(self, model: str, messages: list[dict[str, str]], **options: object) -> Iterator[dict[str, Any]]:
        """The deltas of one streamed reply. Raises `ServiceRefused`."""
        body = {"model": model, "messages": messages, "stream": True, **options}
        with self._request("POST", "/chat/completions", body) as reply:
            for event in _events(reply):
                yield from (choice["delta"] for choice in event["choices"])

    def complete(self, model: str, prompt: str, *, max_tokens: int) -> str:
        """Raises `ServiceRefused`."""
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens}
        with self._request("POST", "/completions", body) as reply:
            text: str = json.load(reply)["choices"][0]["text"]
            return text

    def load(self, model: str) -> list[dict[str, Any]]:
        """What each replica says about loading a checkpoint. Raises `ServiceRefused`."""
        with self._request("POST", f"/models/{quote(model, safe='')}/load", None) as reply:
            loads: list[dict[str, Any]] = json.load(reply)["data"]
            return loads

    def _request(self, method: str, path: str, body: object) -> http.client.HTTPResponse:
        split = urlsplit(self.url)
        kind = http.client.HTTPSConnection if split.scheme == "https" else http.client.HTTPConnection
        connection = kind(split.hostname or "", split.port, timeout=_TIMEOUT_S)
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        try:
            connection.request(
                method, split.path.rstrip("/") + path, None if body is None else json.dumps(body), headers
            )
            reply = connection.getresponse()
        except (OSError, http.client.HTTPException) as exc:
            raise ServiceRefused(f"{self.url} does not answer: {exc}.") from exc
        if reply.status != http.client.OK:
            raise ServiceRefused(_message(reply.status, reply.read()))
        return reply


def _events(reply: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream up to its end mark. Raises `ServiceRefused` for an error event or a missing mark."""
    for line in reply:
        kind, _, text = line.decode().strip().partition(": ")
        if kind != "data":
            continue
        if text == "[DONE]":
            return
        event = json.loads(text)
        if "error" in event:
            raise ServiceRefused(event["error"]["message"])
        yield event
    raise ServiceRefused("The stream ended before its last event.")


def _message(status: int, body: bytes) -> str:
    try:
        return f"{status}: {json.loads(body)['error']['message']}"
    except (ValueError, LookupError, TypeError):
        return f"{status}: {body[:200].decode(errors='replace')}"
