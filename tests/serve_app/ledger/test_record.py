"""A record comes back from its line as it was, and nothing else passes for one."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.api.record import Outcome, RequestRecord
from serve_app.api.usage import usage_of
from serve_app.config.price import Price, Tokens
from serve_app.ledger.money import PICO, spelled, to_pico, to_usd
from serve_app.ledger.record import BrokenLine, UsageRecord, parse_line
from tests.support.ledger.usage_records import NOON, usage_record

COUNTS = st.integers(0, 10**9)
PRICES = st.decimals(0, 1_000_000, places=6)
TEXTS = st.text(max_size=20)
RECORDS = st.builds(
    usage_record,
    key=TEXTS,
    model=TEXTS,
    error_code=TEXTS,
    ended_us=st.integers(0, 2**52),
    cost=st.integers(0, 2**63 - 1),
    prompt_tokens=COUNTS,
    prompt_price=st.none() | COUNTS,
    first_token_s=st.none() | st.floats(0, 1e4),
    is_held=st.booleans(),
)
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=2))


@given(RECORDS)
def test_a_line_holds_the_whole_record(record: UsageRecord) -> None:
    line = record.line()
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert parse_line(line) == record


@given(RECORDS, st.data())
def test_a_torn_line_is_no_record(record: UsageRecord, data: st.DataObject) -> None:
    line = record.line()
    with pytest.raises(BrokenLine):
        parse_line(line[: data.draw(st.integers(0, len(line) - 2))])


@given(st.binary() | JSON.map(lambda value: repr(value).encode()))
def test_anything_else_is_no_record_and_nothing_worse(line: bytes) -> None:
    with pytest.raises(BrokenLine):
        parse_line(line)


@pytest.mark.parametrize("wrong", [{"cost": "7"}, {"cost": True}, {"key": None}, {"ended_us": -1}, {"ended_us": 2**70}])
def test_a_value_of_another_type_is_no_record(wrong: dict[str, Any]) -> None:
    with pytest.raises(BrokenLine):
        parse_line(usage_record(**wrong).line())


def test_fields_of_a_newer_version_are_left_out() -> None:
    record = usage_record()
    assert parse_line(record.line().replace(b"{", b'{"new":[1],', 1)) == record


@given(st.integers(-(10**30), 10**30))
def test_money_is_exact_in_both_units(pico: int) -> None:
    assert to_pico(to_usd(pico)) == pico
    assert Fraction(spelled(pico)) == Fraction(pico, PICO)
    assert "E" not in spelled(pico)


@given(PRICES, PRICES | st.none(), PRICES, COUNTS, COUNTS, COUNTS)
def test_a_cost_is_the_exact_sum_of_its_tokens(
    prompt: Any, cached: Any, completion: Any, fresh: int, cached_tokens: int, completion_tokens: int
) -> None:
    price = Price(prompt=prompt, cached=cached, completion=completion)
    record = RequestRecord("r", "POST", "/v1/completions", price=price)
    record.prompt_tokens, record.cached_tokens = fresh + cached_tokens, cached_tokens
    record.completion_tokens = completion_tokens
    usage = usage_of(record, NOON)
    assert usage.prompt_price is not None
    assert usage.cached_price is not None
    assert usage.completion_price is not None
    by_tokens = (
        fresh * usage.prompt_price + cached_tokens * usage.cached_price + completion_tokens * usage.completion_price
    )
    assert usage.cost == by_tokens
    assert Fraction(usage.cost, PICO) == Fraction(
        price.cost(Tokens(fresh + cached_tokens, cached_tokens, completion_tokens))
    )


@given(st.text(max_size=3000))
def test_any_text_of_an_upstream_becomes_one_that_databases_take(code: str) -> None:
    record = RequestRecord("r", "POST", "/v1/chat/completions", error_code=code, outcome=Outcome.FAILED)
    stored = usage_of(record, NOON).error_code
    assert len(stored) <= 1024
    assert "\0" not in stored
    stored.encode()
    if code.isprintable() and len(code) <= 1024:
        assert stored == code
