"""Exact money: USD as decimals, and as the integers of 10^-12 USD that spools and databases hold."""

from decimal import Context, Decimal
from typing import Final

PICO: Final = 10**12
"""One token of a price with six decimals per million costs a whole number of 10^-12 USD."""

_PLACES: Final = 12
_EXACT: Final = Context(prec=100)


def to_pico(usd: Decimal) -> int:
    """An amount of at most twelve decimals in 10^-12 USD."""
    scaled = usd.scaleb(_PLACES, _EXACT)
    whole = int(scaled)
    assert whole == scaled, usd
    return whole


def to_usd(pico: int) -> Decimal:
    return Decimal(pico).scaleb(-_PLACES, _EXACT)


def spelled(pico: int) -> str:
    """USD as a plain decimal without trailing zeros."""
    return f"{to_usd(pico).normalize(_EXACT):f}"
