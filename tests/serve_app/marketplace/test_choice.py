"""Which endpoints a request may use, and in which order."""

from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.base.errors import NoEndpoint
from serve_app.config.marketplace import EndpointConfig, SlugConfig
from serve_app.marketplace.choice import PriceOptions, order
from serve_app.marketplace.recent import Recent
from serve_app.marketplace.shared_health import SharedHealth
from serve_app.marketplace.slugs import Endpoint, Slug, Wanted


def endpoint(name: str, prompt: float = 1, completion: float = 1, weight: float = 1) -> Endpoint:
    """Its clock stands still: cases of parametrised tests are made long before they run."""
    price = {"prompt": prompt, "completion": completion}
    config = EndpointConfig.model_validate({"name": name, "model": "m", "price": price, "weight": weight})
    return Endpoint(config, None, SharedHealth(clock=lambda: 0.0))


def wanted(*endpoints: Endpoint, pinned: int | None = None) -> Wanted:
    configs = tuple(each.config for each in endpoints)
    slug = Slug(SlugConfig(id="acme/tri", endpoints=configs), endpoints)
    return Wanted(slug, None if pinned is None else endpoints[pinned])


def cool(endpoint: Endpoint) -> Endpoint:
    attempt = endpoint.health.begin("mine")
    assert attempt is not None
    attempt.failed()
    return endpoint


def names(what: Wanted, options: PriceOptions = PriceOptions(), key: str = "", down: str = "") -> list[str]:  # noqa: B008
    def is_up(each: Endpoint) -> bool:
        return each.name not in down and each.health.is_available_for("mine")

    return [each.name for each in order(what, options, key, is_up)]


def limits(prompt: str | None = None, completion: str | None = None, **more: Any) -> PriceOptions:
    return PriceOptions(prompt and Decimal(prompt), completion and Decimal(completion), **more)


WEIGHTS = st.lists(st.sampled_from([0.1, 0.5, 1.0, 3.0, 100.0]), min_size=2, max_size=6)


@settings(deadline=None)
@given(WEIGHTS, st.text(min_size=1), st.data())
def test_losing_one_endpoint_moves_only_its_keys(weights: list[float], key: str, data: st.DataObject) -> None:
    endpoints = [endpoint(str(index), weight=weight) for index, weight in enumerate(weights)]
    lost = data.draw(st.sampled_from(endpoints))
    before = names(wanted(*endpoints), key=key)
    assert sorted(before) == [each.name for each in endpoints]
    assert names(wanted(*endpoints), key=key, down=lost.name) == [name for name in before if name != lost.name]
    assert names(wanted(*[each for each in endpoints if each is not lost]), key=key) == [
        name for name in before if name != lost.name
    ]


@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 2, 5), (0.1, 1, 1)])
def test_each_endpoint_gets_its_share_of_the_keys(weights: tuple[float, ...]) -> None:
    what = wanted(*(endpoint(str(index), weight=weight) for index, weight in enumerate(weights)))
    firsts = Counter(names(what, key=f"key-{number}")[0] for number in range(4000))
    for index, weight in enumerate(weights):
        assert firsts[str(index)] / 4000 == pytest.approx(weight / sum(weights), abs=0.03)


def test_a_key_prefers_the_same_endpoint_whatever_the_prices_and_speeds() -> None:
    cheap, dear = endpoint("cheap", 1), endpoint("dear", 100)
    firsts = {names(wanted(cheap, dear), limits(sort="throughput"), f"key-{number}")[0] for number in range(50)}
    assert firsts == {"cheap", "dear"}


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=6))
def test_without_a_key_the_cheapest_comes_first_and_ties_are_in_configured_order(prices) -> None:
    endpoints = [endpoint(str(index), *price) for index, price in enumerate(prices)]
    expected = sorted(range(len(prices)), key=lambda index: (sum(prices[index]), index))
    assert names(wanted(*endpoints)) == [str(index) for index in expected]


def test_the_fastest_comes_first_after_those_that_were_never_measured() -> None:
    slow, fast, new, newer = (endpoint(name) for name in ("slow", "fast", "new", "newer"))
    slow.recent.saw_first_token(2.0), slow.recent.saw_tokens(10, 1.0)
    fast.recent.saw_first_token(0.1), fast.recent.saw_tokens(90, 1.0)
    for sort in ("latency", "throughput"):
        assert names(wanted(slow, fast, new, newer), limits(sort=sort)) == ["new", "newer", "fast", "slow"]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=5), st.integers(0, 4), st.data())
def test_only_endpoints_within_the_price_are_used(prices, most: int, data: st.DataObject) -> None:
    endpoints = [endpoint(str(index), *price) for index, price in enumerate(prices)]
    options = data.draw(st.sampled_from([limits(str(most)), limits(None, str(most)), limits(str(most), str(most))]))
    fit = {
        str(index)
        for index, (prompt, completion) in enumerate(prices)
        if (options.max_prompt is None or prompt <= most) and (options.max_completion is None or completion <= most)
    }
    for key in ("", "k"):
        if fit:
            assert set(names(wanted(*endpoints), options, key)) == fit
        else:
            with pytest.raises(NoEndpoint):
                names(wanted(*endpoints), options, key)


def test_those_that_cool_down_are_left_out() -> None:
    first, second = endpoint("a"), endpoint("b")
    assert names(wanted(cool(first), second)) == ["b"]


def test_a_pinned_endpoint_is_the_only_one() -> None:
    assert names(wanted(endpoint("a"), endpoint("b", 9), pinned=1)) == ["b"]


@pytest.mark.parametrize(
    ("what", "options", "sentence"),
    [
        (
            lambda: wanted(cool(endpoint("a")), endpoint("b", 2)),
            limits("1"),
            "No endpoint of 'acme/tri' can be used: "
            "1 of 2 are not available now, and 1 of 2 cost more than price allows.",
        ),
        (
            lambda: wanted(cool(endpoint("a"))),
            limits(),
            "No endpoint of 'acme/tri' can be used: 1 of 1 are not available now.",
        ),
        (
            lambda: wanted(endpoint("a"), cool(endpoint("b")), pinned=1),
            limits(),
            "The endpoint 'b' of 'acme/tri' is not available now.",
        ),
        (
            lambda: wanted(endpoint("a"), endpoint("b", 2), pinned=1),
            limits("1"),
            "The endpoint 'b' of 'acme/tri' costs more than price allows.",
        ),
    ],
)
def test_when_none_can_be_used_the_message_says_why(
    what: Callable[[], Wanted], options: PriceOptions, sentence: str
) -> None:
    with pytest.raises(NoEndpoint) as caught:
        names(what(), options)
    assert str(caught.value) == sentence


def test_new_measurements_count_a_fifth() -> None:
    recent = Recent()
    assert (recent.first_token_s, recent.tokens_per_s) == (None, None)
    for after_s in (1.0, 2.0):
        recent.saw_first_token(after_s)
    for within_s in (1.0, 0.5):
        recent.saw_tokens(10, within_s)
    assert (recent.first_token_s, recent.tokens_per_s) == (pytest.approx(1.2), pytest.approx(12))


@pytest.mark.parametrize(("count", "within_s"), [(0, 1.0), (5, 0.0), (-1, 1.0)])
def test_a_reply_of_one_token_has_no_throughput(count: int, within_s: float) -> None:
    recent = Recent()
    recent.saw_tokens(count, within_s)
    assert recent.tokens_per_s is None
