"""Which addresses count as public, in every spelling, and names that resolve to others."""

import asyncio

import pytest

from serve_app.base.public_addresses import NotPublic, PublicResolver, check_host, is_public


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:127.0.0.1", False),
        ("2002:7f00:1::", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::808:808", True),
        ("64:ff9b:1::a9fe:a9fe", False),
        ("::ffff:0:7f00:1", False),
        ("::7f00:1", False),
        ("fec0::1", False),
    ],
)
def test_what_is_public(address: str, expected: bool) -> None:
    assert is_public(address) is expected


@pytest.mark.parametrize("host", ["127.1", "0x7f000001", "2130706433", "127.0.0.1", "::1", "10.1.2.3"])
def test_hosts_that_are_private_addresses_in_any_spelling(host: str) -> None:
    with pytest.raises(NotPublic):
        check_host(host)


@pytest.mark.parametrize("host", ["8.8.8.8", "example.org", "cafe.example", "1and1.com"])
def test_names_and_public_addresses_are_left_to_the_resolver(host: str) -> None:
    check_host(host)


def test_a_name_of_a_private_address_is_not_resolved() -> None:
    async def resolve() -> None:
        resolver = PublicResolver()
        try:
            await resolver.resolve("localhost")
        finally:
            await resolver.close()

    with pytest.raises(NotPublic):
        asyncio.run(resolve())
