"""Downloads images from `https://` URLs, where the configuration allows that, and only from public addresses.

At every redirect, the connection uses exactly the address that was checked. So a name that resolves to a public address
first and to a private one later cannot bypass the check.
"""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from yarl import URL

from serve_app.base.public_addresses import NotPublic, PublicResolver, check_host, is_public
from serve_app.images.data_url import ImageFile
from serve_app.images.decode import MEDIA_TYPES, ImageRefused

_MAX_REDIRECTS = 3
_PIECE_BYTES = 1 << 16
_MAX_URL_CHARACTERS = 4096
_NOT_PUBLIC = "must be at a public address"


@dataclass(frozen=True, slots=True)
class Fetcher:
    """`timeout_s`: for one image with its redirects. `is_allowed`: whether an address may be connected to."""

    timeout_s: float = 10.0
    is_allowed: Callable[[str], bool] = is_public
    tls: ssl.SSLContext | None = None

    async def fetch(self, url: str, max_bytes: int) -> ImageFile:
        """Raises `ImageRefused`."""
        connector = aiohttp.TCPConnector(
            resolver=PublicResolver(self.is_allowed),
            ssl=self.tls if self.tls is not None else True,
            use_dns_cache=False,
        )
        headers = {"accept": ", ".join(MEDIA_TYPES), "accept-encoding": "identity", "user-agent": "roundhouse"}
        session = aiohttp.ClientSession(connector=connector, headers=headers, auto_decompress=False, trust_env=False)
        try:
            async with session, asyncio.timeout(self.timeout_s):
                return await self._follow(session, url, max_bytes)
        except TimeoutError as exc:
            raise ImageRefused(f"could not be fetched within {self.timeout_s:g} s") from exc
        except NotPublic as exc:
            raise ImageRefused(_NOT_PUBLIC) from exc
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            if isinstance(exc, ImageRefused):
                raise
            raise ImageRefused("could not be fetched: its server cannot be reached") from exc

    async def _follow(self, session: aiohttp.ClientSession, url: str, max_bytes: int) -> ImageFile:
        place = self._checked(URL(url))
        for _ in range(_MAX_REDIRECTS + 1):
            async with session.get(place, allow_redirects=False) as response:
                if response.status in (301, 302, 303, 307, 308):
                    place = self._checked(place.join(URL(response.headers.get("location", ""))))
                    continue
                if response.status != 200:
                    raise ImageRefused(f"could not be fetched: its server answered {response.status}")
                return ImageFile(await _read(response, max_bytes), _media_type(response))
        raise ImageRefused(f"could not be fetched: it was redirected more than {_MAX_REDIRECTS} times")

    def _checked(self, place: URL) -> URL:
        if len(str(place)) > _MAX_URL_CHARACTERS:
            raise ImageRefused(f"must have a URL of at most {_MAX_URL_CHARACTERS} characters, got {len(str(place))}")
        if place.scheme != "https" or not place.host or place.user is not None:
            raise ImageRefused("must be a data URL or an https URL without a user name")
        try:
            check_host(place.host, self.is_allowed)
        except NotPublic as exc:
            raise ImageRefused(_NOT_PUBLIC) from exc
        return place


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    content = bytearray()
    async for piece in response.content.iter_chunked(_PIECE_BYTES):
        content += piece
        if len(content) > max_bytes:
            raise ImageRefused(f"must have at most {max_bytes} bytes")
    return bytes(content)


def _media_type(response: aiohttp.ClientResponse) -> str | None:
    """The media type that the server declares; None where it declares only bytes."""
    declared = response.content_type.lower()
    if declared in MEDIA_TYPES:
        return declared
    if declared in ("application/octet-stream", "binary/octet-stream"):
        return None
    raise ImageRefused(f"must have the media type of an image, got {declared[:64]!r}")
