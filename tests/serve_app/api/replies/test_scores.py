"""Log-probabilities kept in arrays: what was put in comes out, at a fraction of the memory."""

import tracemalloc

from engines.interface.protocol import TokenLogprob
from serve_app.api.replies.scores import Scored, Scores


def test_what_was_put_in_comes_out() -> None:
    scored = [
        Scored(5, None, 0),
        Scored(6, TokenLogprob(6, -0.125), 3),
        Scored(7, TokenLogprob(7, -2.5, ((1, -0.1), (7, -2.5))), 4),
        Scored(8, TokenLogprob(8, float("-inf"), ((2, -0.5),)), 2**40),
    ]
    scores = Scores()
    scores.extend(scored[:1])
    scores.extend(scored[1:])
    assert list(scores) == scored
    assert (len(scores), scores.num_values) == (4, 4 + 3)
    assert scores != Scores()


def test_32000_tokens_with_20_alternatives_take_little_memory() -> None:
    """As objects they took 96 MB."""
    scores = Scores()
    tracemalloc.start()
    try:
        for start in range(0, 32_000, 100):
            top = tuple((index, -0.5 - index) for index in range(20))
            scores.extend(Scored(token, TokenLogprob(token, -0.25, top), token) for token in range(start, start + 100))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 14_000_000
