"""Prices as they are written, and exact costs."""

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from serve_app.base.explain import explain
from serve_app.config.price import Price, Tokens

USD = st.decimals(0, 1_000_000, places=6)
COUNTS = st.integers(0, 2**31)


def sentence(raw: object) -> str:
    with pytest.raises(ValidationError) as caught:
        Price.model_validate(raw)
    return explain(caught.value.errors(include_url=False)[0], "price")[1]


@pytest.mark.parametrize("written", [0.1, "0.1", "0.100000", Decimal("0.1")])
def test_a_price_is_what_is_written(written: object) -> None:
    price = Price.model_validate({"prompt": written, "completion": 3})
    assert (price.prompt, price.completion, price.cached) == (Decimal("0.1"), Decimal(3), None)


@pytest.mark.parametrize("written", [0.0000001, "1.1234567", "NaN", "inf", "dear", True, None, [1]])
def test_what_is_no_price_of_six_decimals(written: object) -> None:
    assert sentence({"prompt": written, "completion": 1}).startswith("prompt must be a number of at most 6 decimals")


@pytest.mark.parametrize(
    ("written", "limit"), [(-0.1, "at least 0"), ("-1", "at least 0"), (1_000_000.1, "at most 1000000")]
)
def test_prices_out_of_range(written: object, limit: str) -> None:
    assert f"must be {limit}, got " in sentence({"prompt": written, "completion": 1})


def test_cached_tokens_cost_as_much_as_others_unless_they_have_a_price() -> None:
    tokens = Tokens(prompt=1000, cached=400, completion=10)
    assert Price.model_validate({"prompt": 2, "completion": 8}).cost(tokens) == Decimal("0.00208")
    assert Price.model_validate({"prompt": 2, "cached": 0.5, "completion": 8}).cost(tokens) == Decimal("0.00148")


@given(USD, USD, USD, COUNTS, COUNTS, COUNTS)
def test_costs_are_exact(
    prompt: Decimal, cached: Decimal, completion: Decimal, fresh: int, reused: int, new: int
) -> None:
    price = Price(prompt=prompt, cached=cached, completion=completion)
    cost = price.cost(Tokens(fresh + reused, reused, new))
    exact = fresh * Fraction(prompt) + reused * Fraction(cached) + new * Fraction(completion)
    assert Fraction(cost) == exact / 1_000_000
    assert (cost * 10**12) % 1 == 0
