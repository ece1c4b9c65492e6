"""What drawing the next tokens costs, beside transformers' warpers and `torch.multinomial` on the same logits.

    OMP_NUM_THREADS=1 python tests/bench/drawing.py [--rows 32] [--vocab 49152]

Logits in bfloat16: a broad bell with thirty tokens that stand out. Both sides in turn, medians of twenty rounds, in
processor time. Ours also draws from seeds, tells what is not finite, and would take other parameters in each row.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engines.interface.protocol import GenerateRequest, SamplingParams
from engines.planning.sequence import NO_SINK, TokenSequence
from engines.sampling.sampler import sample

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.9},
    "top_p": {"temperature": 0.9, "top_p": 0.9},
    "top_k and top_p": {"temperature": 0.9, "top_k": 50, "top_p": 0.9},
    "temperature, the token's log-probability": {"temperature": 0.9, "logprobs": 0},
    "temperature, 5 log-probabilities": {"temperature": 0.9, "logprobs": 5},
    # What costs most: nearly no weight, many candidates, nearly all of them, equal ones, and long histories.
    "temperature 0.03, top_k 20": {"temperature": 0.03, "top_k": 20},
    "top_k 500 and top_p": {"temperature": 0.9, "top_k": 500, "top_p": 0.9},
    "top_k 20,000 and top_p": {"temperature": 2.0, "top_k": 20_000, "top_p": 0.9},
    "temperature 2, top_p 0.99": {"temperature": 2.0, "top_p": 0.99},
    "temperature 1,000,000, top_p 0.9": {"temperature": 1e6, "top_p": 0.9},
    "penalties over 3,000 tokens": {
        "temperature": 0.0,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
    },
}
HISTORY = 3000


def logits_like_a_models(rows: int, vocab: int) -> torch.Tensor:
    torch.manual_seed(0)
    logits = torch.randn(rows, vocab) * 2
    for row in logits:
        row[torch.randint(vocab, (30,))] += torch.rand(30) * 14
    return logits.bfloat16()


def theirs(
    logits: torch.Tensor,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    **_: Any,
) -> list[int]:
    """transformers has no presence and frequency penalties."""
    scores = logits.float()
    if repetition_penalty != 1.0:
        seen = torch.arange(1, HISTORY + 1).expand(len(scores), -1)
        scores = RepetitionPenaltyLogitsProcessor(repetition_penalty)(seen, scores)
    if not temperature:
        return scores.argmax(dim=-1).tolist()  # type: ignore[no-any-return]
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    probabilities = torch.softmax(warpers(None, scores), dim=-1)
    return torch.multinomial(probabilities, 1)[:, 0].tolist()  # type: ignore[no-any-return]


def seconds(work: Callable[[], object]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=49152)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logits = logits_like_a_models(options.rows, options.vocab)
    print(f"| {options.rows} rows of {options.vocab:,}, ms | ours | transformers | ratio |")
    print("|---|--:|--:|--:|")
    with torch.inference_mode():
        for name, sampling in KINDS.items():
            sequences = [
                TokenSequence.of(
                    GenerateRequest(str(row), (1,), SamplingParams(**{"max_tokens": 9, "seed": row, **sampling})),
                    NO_SINK,
                )
                for row in range(options.rows)
            ]
            for sequence in sequences if "repetition_penalty" in sampling else ():
                for token_id in range(1, HISTORY + 1):
                    sequence.append(token_id)
            ours, other = [], []
            for _ in range(20):
                ours.append(seconds(partial(sample, logits, sequences)))
                other.append(seconds(partial(theirs, logits, **sampling)))
            a, b = statistics.median(ours), statistics.median(other)
            beside = f"{1e3 * b:.1f} | {b / a:.1f}" if "logprobs" not in sampling else "- | -"
            print(f"| {name} | {1e3 * a:.1f} | {beside} |")


if __name__ == "__main__":
    main()
