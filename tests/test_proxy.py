"""What happens to headers before and after everything else."""

import asyncio

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from serve_app.proxy import EdgeHeaders, middlewares


async def echo(request: Request) -> JSONResponse:
    response = JSONResponse([[name, value] for name, value in request.headers.items()])
    response.raw_headers += [(b"x-request-id", b"ours"), (b"X-Request-ID", b"serve's")]
    return response


def get(headers: dict[str, str]) -> httpx.Response:
    async def main() -> httpx.Response:
        app = EdgeHeaders(Starlette(routes=[Route("/", echo)]))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.get("/", headers=headers)

    return asyncio.run(main())


def test_headers_that_steer_serve_are_taken_away():
    sent = {"X-Request-Timeout-Seconds": "0.1", "x-request-disconnect-disabled": "?1", "x-kept": "yes"}
    names = [name for name, _ in get(sent).json()]
    assert "x-kept" in names
    assert not {"x-request-timeout-seconds", "x-request-disconnect-disabled"} & set(names)


def test_of_two_request_ids_the_services_own_stays():
    assert get({}).headers.get_list("x-request-id") == ["ours"]


def test_serve_gets_it_as_a_middleware():
    (middleware,) = middlewares()
    assert middleware.cls is EdgeHeaders
