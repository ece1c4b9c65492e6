"""Prices of tokens in USD, as exact decimals."""

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Final

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator
from typing_extensions import Doc

from serve_app.base.explain import Complaint
from serve_app.config.checking.section import Section

MAX_USD_PER_MILLION: Final = 1_000_000
_MILLION: Final = Decimal(1_000_000)
_MAX_PLACES: Final = 6


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one request that a price counts. `cached` is a part of `prompt`."""

    prompt: int
    cached: int
    completion: int


def _usd(value: Any) -> Decimal:
    """A number, or a string that holds one. YAML reads `0.1` as a float, whose shortest form is 0.1 again."""
    limit = f"must be a number of at most {_MAX_PLACES} decimals"
    if isinstance(value, Decimal):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise Complaint(limit, value)
    try:
        usd = Decimal(str(value))
    except InvalidOperation:
        raise Complaint(limit, value) from None
    if not usd.is_finite() or -int(usd.normalize().as_tuple().exponent) > _MAX_PLACES:
        raise Complaint(limit, value)
    return usd


Usd = Annotated[Decimal, BeforeValidator(_usd), Ge(0), Le(MAX_USD_PER_MILLION)]
BudgetTokens = Annotated[int, Ge(1), Le(10**12)]
BudgetUsd = Annotated[Decimal, BeforeValidator(_usd), Gt(0), Le(1_000_000)]


class Price(Section):
    """What tokens cost. A cost is exact: a price of six decimals for a million tokens is a whole number of 10^-12 USD
    for one.
    """

    prompt: Annotated[Usd, Doc("USD per million prompt tokens, with at most six decimals.")]
    cached: Annotated[
        Usd | None, Doc("USD per million prompt tokens that came from a prefix cache; null: as `prompt`.")
    ] = None
    completion: Annotated[Usd, Doc("USD per million completion tokens, with at most six decimals.")]

    @property
    def of_cached(self) -> Decimal:
        """USD per million prompt tokens that came from a prefix cache."""
        return self.prompt if self.cached is None else self.cached

    def cost(self, tokens: Tokens) -> Decimal:
        """USD."""
        fresh = tokens.prompt - tokens.cached
        return (fresh * self.prompt + tokens.cached * self.of_cached + tokens.completion * self.completion) / _MILLION
