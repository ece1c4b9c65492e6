"""Which addresses on the network count as public, and a resolver that finds no others.

The connection then uses exactly the address that was checked. So a name that resolves to a public address first and to
a private one later cannot bypass the check.
"""

import ipaddress
import re
import socket
from collections.abc import Callable
from typing import Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
"""An IPv4 address stands in the last 32 bits of these (RFC 6052)."""
_NEVER: Final = tuple(map(ipaddress.ip_network, ("64:ff9b:1::/48", "::ffff:0:0:0/96", "::/96", "fec0::/10")))
"""Networks for local translation to IPv4, and obsolete ranges. `ipaddress` counts them as public."""


class NotPublic(ValueError):
    """The address, or one that the name resolves to, is not public. aiohttp would wrap an `OSError`."""


def is_public(address: str) -> bool:
    """Whether an IP address is public, including an IPv4 address embedded in it."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if any(found in network for network in _NEVER):
        return False
    if found in _NAT64:
        return is_public(str(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)))
    mapped = getattr(found, "ipv4_mapped", None) or getattr(found, "sixtofour", None)
    return found.is_global and not found.is_multicast and (mapped is None or is_public(str(mapped)))


def check_host(host: str, is_allowed: Callable[[str], bool] = is_public) -> None:
    """Check a URL's host if it is an address, in any spelling. A name is left to the resolver. Raises `NotPublic`."""
    try:
        address = str(ipaddress.ip_address(host))
    except ValueError as exc:
        if re.fullmatch(r"[0-9a-fx.]*", host, re.IGNORECASE) and host[-1:].isdigit():
            raise NotPublic from exc  # 127.1 and 0x7f000001 are addresses too
        return
    if not is_allowed(address):
        raise NotPublic


class PublicResolver(AbstractResolver):
    """Resolves names to allowed addresses only. Raises `NotPublic`."""

    def __init__(self, is_allowed: Callable[[str], bool] = is_public) -> None:
        self._names = aiohttp.ThreadedResolver()
        self._is_allowed = is_allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._names.resolve(host, port, family)
        if not all(self._is_allowed(result["host"]) for result in found):
            raise NotPublic
        return found

    async def close(self) -> None:
        await self._names.close()
