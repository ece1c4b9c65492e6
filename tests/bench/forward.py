"""What each optimisation of the CPU path buys: the forward pass alone, no HTTP, no scheduling, no sampling.

    python tests/bench/forward.py [--threads 2] [--rounds 5] [--context 160]

Decoding steps of 1 to 64 sequences and the prefill of 1,024 tokens, with the demo model in bfloat16; the variants are
measured in turn, round after round, and the table shows the medians in tokens per second.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from bench_service import MODEL_FOLDER

from engines.compute.native_path import NativePath
from engines.compute.paged_model import PagedModel
from engines.compute.path import ComputePath
from engines.compute.plain_path import PlainPath
from engines.compute.runner import ModelRunner
from engines.interface.config import EngineConfig
from engines.interface.protocol import GenerateRequest, SamplingParams
from engines.model.loader import load_model
from engines.model.packed_linear import pack_linears
from engines.native.build import FLAGS, library_path
from engines.native.library import Library
from engines.native.structure import read_structure
from engines.planning.scheduler import Chunk
from engines.planning.sequence import NO_SINK, TokenSequence

BATCHES = (1, 8, 32, 64)
PROMPT = 1024
BLOCK = 16


MakePath = Callable[[PagedModel, EngineConfig], ComputePath]


def plain(model: PagedModel, config: EngineConfig) -> ComputePath:
    return PlainPath(model, config.block_size)


def plain_packed(model: PagedModel, config: EngineConfig) -> ComputePath:
    pack_linears(model.loaded.model, tiled=False)
    return plain(model, config)


def native(model: PagedModel, config: EngineConfig, *, flags: Sequence[str] = FLAGS) -> ComputePath:
    parts = read_structure(model.loaded, dict(model.attention))
    library = Library(library_path(Path(config.kernel_cache), flags))
    return NativePath(model, parts, library, config, threads=config.threads or 1)


WITHOUT_AMX = (*FLAGS, "-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")
VARIANTS: dict[str, MakePath] = {
    "transformers' layers, blocks gathered for one SDPA call": plain,
    "+ linear layers in oneDNN's layout": plain_packed,
    "C kernels without AMX": partial(native, flags=WITHOUT_AMX),
    "C kernels": native,
}


def runner_over(make_path: MakePath, threads: int, context: int, kernel_cache: str) -> ModelRunner:
    config = EngineConfig(str(MODEL_FOLDER), dtype="bfloat16", kernel_cache=kernel_cache, threads=threads)
    model = PagedModel.of(load_model(config), config)
    runner = ModelRunner(make_path(model, config), config, model)
    runner.allocate(max(BATCHES) * (-(-(context + 1) // BLOCK)) + PROMPT // BLOCK + 1)
    return runner


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
        runners = {
            name: runner_over(make_path, options.threads, options.context, cache)
            for name, make_path in VARIANTS.items()
        }
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
