"""Compares the engine's ragged, paged forward with the model's own plain forward, once, when a model is loaded.

Two random prompts are cut into chunks, laid into shuffled blocks and run in one batch, the last tokens one by one as in
decoding. Whatever the engine misses of a model (a mask, a state that leaks between sequences, an unknown attention)
shows as different logits.
"""

import logging
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engines.compute.runner import ModelRunner
from engines.interface.config import EngineConfig
from engines.interface.errors import ModelRefused
from engines.interface.protocol import GenerateRequest, SamplingParams
from engines.model.loader import LoadedModel
from engines.planning.scheduler import Chunk
from engines.planning.sequence import NO_SINK, TokenSequence

logger = logging.getLogger(__name__)

_BEYOND_WINDOW = 24
_LONGEST = 1024
_DECODED = 3

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
"""Largest accepted |engine - plain| / |plain| of the logits (L2, mean removed). Measured on SmolLM2: 1e-6 in float32,
0.03 in bfloat16, where both differ from float32 by 0.02 to 0.03. A missed window or mask gives 0.5 and more.
"""


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The prompts, and the plain forward's logits of their last tokens: [_DECODED + 1, vocab] each."""

    prompts: tuple[tuple[int, ...], ...]
    expected: tuple[torch.Tensor, ...]


def prepare(loaded: LoadedModel, context_length: int) -> SelfTest:
    """Run the plain model on prompts that fit into the context. Call it before a `PagedModel` takes the model over."""
    rng = random.Random(0)
    lengths = (min(_prompt_length(loaded), context_length), min(21, context_length))
    prompts = tuple(tuple(rng.randrange(loaded.vocab_size) for _ in range(length)) for length in lengths)
    expected = []
    model: Any = loaded.model
    for prompt in prompts:
        ids = torch.tensor([prompt], device=loaded.device)
        rows = torch.arange(max(0, len(prompt) - _DECODED - 1), len(prompt), device=loaded.device)
        # An explicit mask: some models treat a prompt token that equals their padding id as padding.
        mask = torch.ones_like(ids)
        output = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=rows)
        expected.append(output.logits[0].float())
    return SelfTest(prompts, tuple(expected))


def check(test: SelfTest, runner: ModelRunner, loaded: LoadedModel, config: EngineConfig) -> float:
    """The largest relative difference. Raises `ModelRefused` when it exceeds the dtype's tolerance."""
    found = _run_in_chunks(runner, _laid_out(test.prompts, runner, config), config, shortest=17)
    differences = [_difference(a, b) for a, b in zip(found, test.expected, strict=True)]
    limit = TOLERANCE[loaded.dtype]
    if not all(difference <= limit for difference in differences):  # NaN is not
        worst = next((d for d in differences if math.isnan(d)), max(differences))
        raise ModelRefused(
            f"{loaded.config.model_type}: the engine's logits differ from the model's own by {worst:.3g} (relative); "
            f"the limit for {loaded.dtype} is {limit:g}."
        )
    logger.info("self-test: relative difference %.2g (limit %g)", max(differences), limit)
    return max(differences)


def check_exact(test: SelfTest, runner: ModelRunner, loaded: LoadedModel, config: EngineConfig) -> None:
    """Raises `ModelRefused` unless the bits of the logits are the same alone, in a batch and in other chunks."""
    together = _run_in_chunks(runner, _laid_out(test.prompts, runner, config), config, shortest=17)
    for prompt, expected in zip(test.prompts, together, strict=True):
        (alone,) = _run_in_chunks(runner, _laid_out((prompt,), runner, config), config, shortest=5)
        if not torch.equal(alone, expected):
            raise ModelRefused(
                f"{loaded.config.model_type}: exact is not possible on {loaded.device}. Logits change with the batch "
                f"composition or the chunks by {float((alone - expected).abs().max()):.3g}."
            )


def _laid_out(prompts: Sequence[tuple[int, ...]], runner: ModelRunner, config: EngineConfig) -> list[TokenSequence]:
    """A sequence for each prompt, in shuffled blocks of a new cache."""
    per_prompt = [-(-len(prompt) // config.block_size) for prompt in prompts]
    runner.allocate(1 + sum(per_prompt))
    blocks = list(range(1, 1 + sum(per_prompt)))
    random.Random(1).shuffle(blocks)
    sequences = []
    for index, (prompt, count) in enumerate(zip(prompts, per_prompt, strict=True)):
        request = GenerateRequest(f"self-test-{index}", prompt, SamplingParams(max_tokens=1, seed=0))
        sequence = TokenSequence.of(request, NO_SINK)
        sequence.blocks = [blocks.pop() for _ in range(count)]
        sequences.append(sequence)
    return sequences


def _prompt_length(loaded: LoadedModel) -> int:
    window = getattr(loaded.config, "sliding_window", None) or 0
    return min(max(64, window + _BEYOND_WINDOW), _LONGEST)


def _run_in_chunks(
    runner: ModelRunner, sequences: Sequence[TokenSequence], config: EngineConfig, *, shortest: int
) -> list[torch.Tensor]:
    """Logits of the last tokens of each sequence, from prefill chunks of unequal length and one-token rows. No step has
    more tokens than the engine allows.
    """
    longest = max(1, config.max_step_tokens // len(sequences))
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    while any(sequence.num_pending for sequence in sequences):
        chunks = []
        for index, sequence in enumerate(sequences):
            before_decode = sequence.num_pending - _DECODED
            length = 1 if before_decode <= 0 else min(before_decode, shortest + 12 * index, longest)
            if sequence.num_pending:
                chunks.append(Chunk(sequence, sequence.num_computed, length))
        rows = runner.last_logits(chunks)
        for chunk in chunks:
            index = sequences.index(chunk.sequence)
            if len(chunk.sequence.token_ids) - chunk.end <= _DECODED:
                found[index].append(rows[chunk.sequence.request_id])
            chunk.sequence.num_computed = chunk.end
    return [torch.stack(logits) for logits in found]


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    centred = expected - expected.mean(dim=-1, keepdim=True)
    found = found - found.mean(dim=-1, keepdim=True)
    return float(((found - centred).norm(dim=-1) / centred.norm(dim=-1)).max())
