"""Layers that carry a state from token to token, in a ragged batch."""

from collections.abc import Iterator, Sequence

import pytest
import torch

from engines.model.loader import load_model
from engines.planning.scheduler import Chunk
from engines.planning.sequence import NO_SINK, TokenSequence
from tests.support.engines.engine_harness import engine_config, plain_model, prompt_of, reference_logits, request
from tests.support.engines.runners import runner_of
from tests.support.engines.tiny_models import HYBRID

NAMES = pytest.mark.parametrize("name", sorted(HYBRID))


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Bench:
    """A hybrid model, and texts in blocks of their own."""

    def __init__(self, name: str, lengths: Sequence[int]) -> None:
        config = engine_config(name)
        self.name = name
        loaded = load_model(config)
        self.model = loaded.model
        self.runner = runner_of(loaded, config)
        self.runner.allocate(40)
        self.texts = []
        blocks = list(range(1, 40))
        for length in lengths:
            made = TokenSequence.of(request(prompt_of(length)), NO_SINK)
            made.blocks = [blocks.pop() for _ in range(-(-length // 16))]
            self.texts.append(made)

    def run(self, lengths: Sequence[int]) -> None:
        """The next tokens of each text in one batch, twice before they count, compared with the plain forward."""
        pairs = [(text, length) for text, length in zip(self.texts, lengths, strict=True) if length]
        chunks = [Chunk(text, text.num_computed, length) for text, length in pairs]
        first, second = self.runner.last_logits(chunks), self.runner.last_logits(chunks)
        for chunk in chunks:
            text = chunk.sequence
            expected = reference_logits(plain_model(self.name), text.token_ids[: chunk.end])[-1]
            torch.testing.assert_close(first[text.request_id], expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(second[text.request_id], first[text.request_id], rtol=1e-5, atol=1e-5)
            text.num_computed = chunk.end


@NAMES
def test_chunks_and_single_tokens_in_one_batch_keep_their_states_apart(name: str) -> None:
    bench = Bench(name, [30, 24, 9, 1])
    for lengths in ([20, 1, 3, 1], [1, 1, 1, 0], [2, 15, 1, 0], [1, 1, 4, 0], [6, 6, 0, 0]):
        bench.run(lengths)
    assert [text.num_pending for text in bench.texts] == [0, 0, 0, 0]


@NAMES
def test_a_forward_that_failed_half_way_leaves_the_states_as_they_were(name: str) -> None:
    bench = Bench(name, [30, 20])
    bench.run([10, 5])

    def fail(*args: object) -> None:
        raise RuntimeError("the device said no")

    handle = bench.model.get_decoder().layers[-1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="said no"):
        bench.runner.last_logits([Chunk(text, text.num_computed, 3) for text in bench.texts])
    handle.remove()
    bench.run([3, 3])
    bench.run([1, 7])


@NAMES
def test_a_text_that_was_preempted_starts_without_a_state(name: str) -> None:
    bench = Bench(name, [30, 20])
    bench.run([10, 5])
    first = bench.texts[0]
    first.num_computed, first.states = 0, {}
    bench.run([12, 1])
    bench.run([1, 1])
