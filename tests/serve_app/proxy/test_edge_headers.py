"""What happens to headers before and after everything else."""

import asyncio

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from serve_app.proxy import middlewares
from serve_app.proxy.edge_headers import EdgeHeaders
from serve_app.proxy.error_shape import ErrorShape


async def echo(request: Request) -> JSONResponse:
    response = JSONResponse([[name, value] for name, value in request.headers.items()])
    response.raw_headers += [(b"x-request-id", b"ours"), (b"X-Request-ID", b"serve's")]
    return response


def get(headers: dict[str, str] | httpx.Headers) -> httpx.Response:
    async def main() -> httpx.Response:
        app = EdgeHeaders(Starlette(routes=[Route("/", echo)]))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.get("/", headers=headers)

    return asyncio.run(main())


def test_headers_that_steer_serve_are_taken_away():
    steering = {
        "X-Request-Timeout-Seconds": "0.1",
        "x-request-disconnect-disabled": "?1",
        "serve_multiplexed_model_id": "m",
        "Serve-Multiplexed-Model-Id": "m",
        "X-Session-Id": "s",
        "x_session_id": "s",
        "x-serve-router-replica": "r",
    }
    names = [name for name, _ in get({**steering, "x-kept": "yes"}).json()]
    assert "x-kept" in names
    assert not {name.lower() for name in steering} & set(names)


@pytest.mark.parametrize("value", ["\xe9", "", "a b", "x" * 129])
def test_a_request_id_that_serve_could_not_read_is_taken_away(value):
    headers = httpx.Headers([(b"x-request-id", value.encode("latin-1")), (b"x-kept", b"yes")])
    names = [name for name, _ in get(headers).json()]
    assert "x-kept" in names
    assert "x-request-id" not in names
    assert ["x-request-id", "mine"] in get(httpx.Headers({"x-request-id": "mine"})).json()


def test_of_two_request_ids_the_services_own_stays():
    assert get({}).headers.get_list("x-request-id") == ["ours"]


def test_serve_gets_them_as_middlewares():
    assert [middleware.cls for middleware in middlewares()] == [EdgeHeaders, ErrorShape]
