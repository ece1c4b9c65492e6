"""What each optimisation of the CPU path buys: the forward pass alone, no HTTP, no scheduling, no sampling.

    python tests/bench/forward.py [--threads 2] [--rounds 5] [--context 160]

Decoding steps of 1 to 64 sequences and the prefill of 1,024 tokens, with the demo model in bfloat16; the variants are
measured in turn, round after round, and the table shows the medians in tokens per second.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from bench_service import MODEL_FOLDER

from engines.compute import runner as model_runner
from engines.compute.runner import NO_SINK, ModelRunner
from engines.config import EngineConfig
from engines.model.loader import load_model
from engines.native import build
from engines.planning.scheduler import Chunk
from engines.planning.sequence import TokenSequence
from engines.protocol import GenerateRequest, SamplingParams

BATCHES = (1, 8, 32, 64)
PROMPT = 1024
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    attention: str
    packed: bool = True
    flags: tuple[str, ...] = ()

    def runner(self, threads: int, context: int, kernel_cache: str) -> ModelRunner:
        blocks = max(BATCHES) * (-(-(context + 1) // BLOCK)) + PROMPT // BLOCK + 1
        config: Any = {"source": str(MODEL_FOLDER), "dtype": "bfloat16", "attention": self.attention}
        with _patched(build, "_FLAGS", build._FLAGS + self.flags), _patched(model_runner, "pack_linears", self.pack):
            settings = EngineConfig(**config, kernel_cache=kernel_cache, threads=threads)
            runner = ModelRunner(load_model(settings), settings, threads=threads)
        runner.allocate(blocks)
        return runner

    @property
    def pack(self) -> Callable[..., int]:
        return PACK if self.packed else lambda model, tiled: 0


PACK = model_runner.pack_linears
VARIANTS = (
    Variant("transformers' layers, blocks gathered for one SDPA call", "sdpa", packed=False),
    Variant("+ linear layers in oneDNN's layout", "sdpa"),
    Variant("C kernels without AMX", "native", flags=("-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")),
    Variant("C kernels", "native"),
)


@contextmanager
def _patched(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def chunk_of(tokens: int, first_block: int, start: int) -> Chunk:
    request = GenerateRequest("bench", tuple(7 + i % 1000 for i in range(tokens)), SamplingParams(max_tokens=1, seed=0))
    sequence = TokenSequence.of(request, NO_SINK)
    sequence.blocks = list(range(first_block, first_block + -(-tokens // BLOCK)))
    return Chunk(sequence, start, tokens - start)


def tokens_per_s(runner: ModelRunner, chunks: list[Chunk]) -> float:
    """The best of a few forwards in a row: what neighbours take away comes in stretches."""
    best = min(_seconds(runner, chunks) for _ in range(5))
    return sum(chunk.length for chunk in chunks) / best


def _seconds(runner: ModelRunner, chunks: list[Chunk]) -> float:
    started = time.perf_counter()
    runner.forward(chunks)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--context", type=int, default=160)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    size = -(-(options.context + 1) // BLOCK)
    loads = {
        f"decode, {count}": [chunk_of(options.context + 1, 1 + i * size, options.context) for i in range(count)]
        for count in BATCHES
    }
    loads[f"prefill, {PROMPT:,}"] = [chunk_of(PROMPT, 1, 0)]
    rates: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as cache, torch.inference_mode():
        runners = {variant.name: variant.runner(options.threads, options.context, cache) for variant in VARIANTS}
        for _ in range(options.rounds):
            for load, chunks in loads.items():
                for name, runner in runners.items():
                    rates.setdefault((name, load), []).append(tokens_per_s(runner, chunks))
    print(f"| {options.threads} threads | " + " | ".join(loads) + " |")
    print("|---|" + "--:|" * len(loads))
    for name in runners:
        print(f"| {name} | " + " | ".join(f"{statistics.median(rates[name, load]):.0f}" for load in loads) + " |")


if __name__ == "__main__":
    main()
