"""Downloads images from `https://` URLs, where the configuration allows that, and only from public addresses.

At every redirect, the connection uses exactly the address that was checked. So a name that resolves to a public address
first and to a private one later cannot bypass the check.
"""

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from serve_app.images.data_url import ImageFile
from serve_app.images.decode import MEDIA_TYPES, ImageRefused

_MAX_REDIRECTS = 3
_PIECE_BYTES = 1 << 16
_MAX_URL_CHARACTERS = 4096


_NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""An IPv4 address stands in the last 32 bits of these (RFC 6052)."""
_NEVER = tuple(map(ipaddress.ip_network, ("64:ff9b:1::/48", "::ffff:0:0:0/96", "::/96", "fec0::/10")))
"""Networks for local translation to IPv4, and obsolete ranges. `ipaddress` counts them as public."""


def is_public(address: str) -> bool:
    """Whether an IP address is public, including an IPv4 address embedded in it."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if any(found in network for network in _NEVER):
        return False
    if found in _NAT64:
        return is_public(str(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)))
    mapped = getattr(found, "ipv4_mapped", None) or getattr(found, "sixtofour", None)
    return found.is_global and not found.is_multicast and (mapped is None or is_public(str(mapped)))


@dataclass(frozen=True, slots=True)
class Fetcher:
    """`timeout_s`: for one image with its redirects. `is_allowed`: whether an address may be connected to."""

    timeout_s: float = 10.0
    is_allowed: Callable[[str], bool] = is_public
    tls: ssl.SSLContext | None = None

    async def fetch(self, url: str, max_bytes: int) -> ImageFile:
        """Raises `ImageRefused`."""
        connector = aiohttp.TCPConnector(
            resolver=_Resolver(self.is_allowed), ssl=self.tls if self.tls is not None else True, use_dns_cache=False
        )
        headers = {"accept": ", ".join(MEDIA_TYPES), "accept-encoding": "identity", "user-agent": "roundhouse"}
        session = aiohttp.ClientSession(connector=connector, headers=headers, auto_decompress=False, trust_env=False)
        try:
            async with session, asyncio.timeout(self.timeout_s):
                return await self._follow(session, url, max_bytes)
        except TimeoutError as exc:
            raise ImageRefused(f"could not be fetched within {self.timeout_s:g} s") from exc
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
            address = str(ipaddress.ip_address(place.host))
        except ValueError as exc:
            if re.fullmatch(r"[0-9a-fx.]*", place.host, re.IGNORECASE) and place.host[-1].isdigit():
                raise ImageRefused("must be at a public address") from exc  # 127.1 and 0x7f000001 are addresses too
            return place  # a name: `_Resolver` judges what it resolves to
        if not self.is_allowed(address):
            raise ImageRefused("must be at a public address")
        return place


class _Resolver(AbstractResolver):
    """Resolves names to allowed addresses only."""

    def __init__(self, is_allowed: Callable[[str], bool]) -> None:
        self._names = aiohttp.ThreadedResolver()
        self._is_allowed = is_allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._names.resolve(host, port, family)
        if not all(self._is_allowed(result["host"]) for result in found):
            raise ImageRefused("must be at a public address")
        return found

    async def close(self) -> None:
        await self._names.close()


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
