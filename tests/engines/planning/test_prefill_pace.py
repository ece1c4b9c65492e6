"""How much prefill goes beside decoding."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.planning.prefill_pace import PrefillPace


def paced(decode_s: Sequence[float], prefills: Sequence[tuple[int, float]], *, limit: int = 256) -> PrefillPace:
    pace = PrefillPace(limit, ratio=1.5)
    for seconds in decode_s:
        pace.decoded(seconds)
    for tokens, seconds in prefills:
        pace.prefilled(tokens, seconds)
    return pace


def test_prefill_takes_no_longer_than_the_ratio_allows() -> None:
    # 0.5 ms a token, 40 ms a decode: 1.5 * 40 / 0.5 = 120, in whole blocks 112
    assert paced([0.04] * 3, [(100, 0.05)] * 3).tokens == 112


@pytest.mark.parametrize(("decode_s", "prefills"), [([], [(100, 0.05)]), ([0.04], []), ([0.04], [(31, 9.0)])])
def test_the_limit_holds_while_too_little_is_known(decode_s: list[float], prefills: list[tuple[int, float]]) -> None:
    assert paced(decode_s, prefills).tokens == 256


def test_one_slow_step_changes_nothing() -> None:
    assert paced([0.04, 0.04, 4.0], [(100, 0.05), (100, 0.05), (100, 5.0)]).tokens == 112


def test_old_measurements_are_forgotten() -> None:
    assert paced([0.04] * 9 + [0.08] * 9, [(100, 0.05)] * 3).tokens == 240


def test_a_slow_prefill_still_progresses() -> None:
    assert paced([0.001], [(100, 50.0)]).tokens == 32
    assert paced([0.001], [(100, 50.0)], limit=19).tokens == 19


seconds = st.floats(0, 1e6)


@given(st.lists(seconds), st.lists(st.tuples(st.integers(1, 5000), seconds)), st.integers(1, 4096))
def test_the_budget_is_always_between_the_smallest_and_the_limit(
    decode_s: list[float], prefills: list[tuple[int, float]], limit: int
) -> None:
    assert min(32, limit) <= paced(decode_s, prefills, limit=limit).tokens <= limit
