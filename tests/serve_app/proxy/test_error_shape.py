"""Errors that Serve writes in plain text."""

import asyncio

import httpx
import pytest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from serve_app.proxy.error_shape import ErrorShape


def answer(response: Response) -> httpx.Response:
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(ErrorShape(response))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get("/")

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("status", "code", "headers"),
    [
        (404, "not_found", {}),
        (408, None, {}),
        (500, "internal_error", {"x-should-retry": "false"}),
        (503, "unavailable", {"retry-after": "2"}),
        (507, None, {}),
    ],
)
def test_a_plain_error_becomes_one_in_shape_with_the_same_status(status, code, headers):
    reply = answer(PlainTextResponse("Request dropped due to backpressure", status))
    assert reply.status_code == status
    (error,) = reply.json().values()
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert "backpressure" not in error["message"]
    assert reply.headers["content-type"] == "application/json"
    assert {name: reply.headers[name] for name in headers} == headers


def test_serves_advice_when_to_try_again_gives_way_to_ours():
    reply = answer(PlainTextResponse("busy", 503, {"Retry-After": "77", "x-kept": "1"}))
    assert reply.headers.get_list("retry-after") == ["2"]
    assert reply.headers["x-kept"] == "1"


@pytest.mark.parametrize(
    "response", [PlainTextResponse("success"), JSONResponse({"error": {"message": "m"}}, 503)], ids=["200", "json"]
)
def test_everything_else_passes_as_it_is(response):
    reply = answer(response)
    assert (reply.status_code, reply.content) == (response.status_code, response.body)
