"""Drawing keeps the device busy: only who collects the tokens waits for it."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from engines.planning.sequence import NO_SINK, TokenSequence
from engines.sampling.sampler import Draws, sample
from tests.support.engines.engine_harness import request

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 0.0, "presence_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": ((3, 1.0),)},
    {},
    {"top_p": 0.9, "logprobs": 0},
    {"top_k": 7, "min_p": 0.1},
]


def drawing(kind: int) -> TokenSequence:
    made = TokenSequence.of(
        request((1, 2), **{"max_tokens": 100, "temperature": 1.0, "seed": kind, **KINDS[kind]}), NO_SINK
    )
    made.append(1)
    return made


@pytest.mark.parametrize("kinds", [[0], [0, 0, 1], [3, 3], [4, 5], [0, 1, 2, 3, 4, 5]])
def test_draws_are_begun_without_a_look_at_a_number(kinds: list[int]) -> None:
    """A look at a number waits for the device. Fake tensors have none."""
    sequences = [drawing(kind) for kind in kinds]
    with FakeTensorMode():
        begun = Draws(torch.empty(len(kinds), 2000, dtype=torch.bfloat16), sequences)
        assert begun.token_ids.shape == (len(kinds),)
        with pytest.raises(DataDependentOutputException):
            begun.collect()


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", [[0], [0, 0, 1], [3, 3], [4, 5], [0, 1, 2, 3, 4, 5]])
def test_draws_on_a_device_wait_for_it_at_the_end_only_and_are_those_of_the_cpu(kinds: list[int]) -> None:
    sequences = [drawing(kind) for kind in kinds]
    logits = torch.randn(len(kinds), 2000, generator=torch.Generator().manual_seed(0)) * 3
    on_device = logits.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        begun = Draws(on_device, sequences)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for found, expected in zip(begun.collect(), sample(logits, sequences), strict=True):
        assert found.token_id == expected.token_id
        assert (found.logprob is None) == (expected.logprob is None)
