"""Images behind https URLs: from allowed addresses only, within limits, and never led elsewhere."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from cryptography import x509

from serve_app.images.data_url import ImageFile
from serve_app.images.decode import ImageRefused
from serve_app.images.fetch import Fetcher
from tests.support.processes.certificates import self_signed

CONTENT = b"\x89PNG of no meaning"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("tls"), "localhost")


async def reply(request: web.Request) -> web.StreamResponse:
    name = request.match_info["name"]
    port = request.url.port
    if name == "redirect":
        raise web.HTTPFound(f"https://localhost:{port}/image.png")
    if name == "loop":
        raise web.HTTPFound("/loop")
    if name == "down":
        raise web.HTTPFound(f"http://localhost:{port}/image.png")
    if name == "inside":
        raise web.HTTPFound("https://169.254.169.254/latest/meta-data")
    if name == "page":
        return web.Response(text="<html>", content_type="text/html")
    if name == "large":
        return web.Response(body=bytes(5000), content_type="image/png")
    if name == "slow":
        await asyncio.sleep(30)
    if name == "missing":
        raise web.HTTPNotFound
    return web.Response(body=CONTENT, content_type="image/png")


@asynccontextmanager
async def server(certificate: tuple[Path, Path]) -> AsyncIterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    app = web.Application()
    app.router.add_get("/{name}", reply)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    listening = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listening, ssl_context=context).start()
    try:
        yield f"https://localhost:{listening.getsockname()[1]}"
    finally:
        await runner.cleanup()


def trusting(certificate: tuple[Path, Path]) -> Fetcher:
    """That may connect to this machine, as no other does."""
    tls = ssl.create_default_context(cafile=str(certificate[0]))
    return Fetcher(timeout_s=2, is_allowed=lambda address: address in ("127.0.0.1", "::1"), tls=tls)


def fetched(certificate: tuple[Path, Path], name: str, fetcher: Fetcher | None = None) -> ImageFile:
    async def run() -> ImageFile:
        async with server(certificate) as url:
            return await (fetcher or trusting(certificate)).fetch(f"{url}/{name}", 1000)

    return asyncio.run(run())


def refusal(certificate: tuple[Path, Path], name: str, fetcher: Fetcher | None = None) -> str:
    with pytest.raises(ImageRefused) as caught:
        fetched(certificate, name, fetcher)
    return str(caught.value)


@pytest.mark.parametrize("name", ["image.png", "redirect"])
def test_an_image_is_fetched_through_redirects(certificate: tuple[Path, Path], name: str) -> None:
    assert fetched(certificate, name) == ImageFile(CONTENT, "image/png")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("loop", "could not be fetched: it was redirected more than 3 times"),
        ("down", "must be a data URL or an https URL without a user name"),
        ("inside", "must be at a public address"),
        ("page", "must have the media type of an image, got 'text/html'"),
        ("large", "must have at most 1000 bytes"),
        ("slow", "could not be fetched within 2 s"),
        ("missing", "could not be fetched: its server answered 404"),
    ],
)
def test_everything_else_is_refused(certificate: tuple[Path, Path], name: str, message: str) -> None:
    assert refusal(certificate, name) == message


def test_a_name_of_a_private_address_is_refused_before_anything_is_sent(certificate: tuple[Path, Path]) -> None:
    tls = ssl.create_default_context(cafile=str(certificate[0]))
    assert refusal(certificate, "image.png", Fetcher(tls=tls)) == "must be at a public address"


def test_a_server_that_nobody_vouches_for_is_refused(certificate: tuple[Path, Path]) -> None:
    fetcher = Fetcher(is_allowed=lambda address: True)
    assert refusal(certificate, "image.png", fetcher) == "could not be fetched: its server cannot be reached"


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1/a",
        "https://[::1]/a",
        "https://10.0.0.1/a",
        "https://[::ffff:10.0.0.1]/a",
        "https://0x7f000001/a",
        "https://127.1/a",
        "https://2130706433/a",
    ],
)
def test_addresses_of_this_network_are_refused(url: str) -> None:
    with pytest.raises(ImageRefused):
        asyncio.run(Fetcher(timeout_s=2).fetch(url, 1000))


@pytest.mark.parametrize("url", ["http://example.org/a.png", "ftp://example.org/a", "https://", "file:///etc/passwd"])
def test_other_schemes_are_refused(url: str) -> None:
    with pytest.raises(ImageRefused, match="must be a data URL or an https URL"):
        asyncio.run(Fetcher().fetch(url, 1000))


def test_the_certificate_of_the_tests_is_for_this_machine(certificate: tuple[Path, Path]) -> None:
    found = x509.load_pem_x509_certificate(certificate[0].read_bytes())
    assert "localhost" in found.subject.rfc4514_string()
