"""What the C kernels buy a vision model: the forward pass alone, on torch and on the kernels.

    python tests/bench/vision.py [--threads 2] [--rounds 3]

The model has the shape of SmolVLM-256M, with random weights in bfloat16: 30 layers of 576, and a tower of 12 layers of
768 over tiles of 512 x 512 pixels, 64 tokens each. The prompt has 256 tokens, 128 of them an image's two tiles. Both
paths are measured in turn, round after round; the table shows medians in tokens per second, and of the ratios.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForImageTextToText, SmolVLMConfig

from engines.compute.candidates import candidate_paths
from engines.compute.paged_model import PagedModel
from engines.compute.runner import ModelRunner
from engines.interface.config import EngineConfig
from engines.interface.protocol import GenerateRequest, HostTensor, PromptImage, SamplingParams
from engines.model.loader import load_model
from engines.planning.scheduler import Chunk
from engines.planning.sequence import NO_SINK, TokenSequence

BATCHES = (1, 8, 32)
PROMPT = 256
TILES, TILE_TOKENS, TILE_PIXELS = 2, 64, 512
BLOCK = 16
IMAGE = 49190
PATHS = {"torch": "sdpa", "C kernels": "native"}


def save_model(folder: Path) -> None:
    text = {
        "model_type": "llama",
        "vocab_size": 49280,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "pad_token_id": None,
    }
    tower = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": TILE_PIXELS,
        "patch_size": 16,
    }
    config = SmolVLMConfig(text_config=text, vision_config=tower, image_token_id=IMAGE, scale_factor=4)
    AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def image(seed: int) -> PromptImage:
    """In front of the prompt's text."""
    pixels = np.random.default_rng(seed).standard_normal((1, TILES, 3, TILE_PIXELS, TILE_PIXELS)).astype(np.float32)
    mask = np.ones((1, TILES, TILE_PIXELS, TILE_PIXELS), dtype=np.int64)
    tensors = {"pixel_values": pixels, "pixel_attention_mask": mask}
    host = {name: HostTensor(array.dtype.str, array.shape, array.tobytes()) for name, array in tensors.items()}
    return PromptImage(1, TILES * TILE_TOKENS, str(seed), host)


def chunk_of(tokens: int, first_block: int, start: int, seed: int) -> Chunk:
    token_ids = [7, *[IMAGE] * (TILES * TILE_TOKENS)]
    token_ids += (7 + i % 1000 for i in range(tokens - len(token_ids)))
    sampling = SamplingParams(max_tokens=1, seed=0)
    request = GenerateRequest(f"bench-{first_block}", tuple(token_ids), sampling, images=(image(seed),))
    sequence = TokenSequence.of(request, NO_SINK)
    sequence.blocks = list(range(first_block, first_block + -(-tokens // BLOCK)))
    return Chunk(sequence, start, tokens - start)


def runner_on(attention: str, source: Path, threads: int) -> ModelRunner:
    config = EngineConfig(str(source), attention=attention, threads=threads)
    loaded = load_model(config)
    model = PagedModel.of(loaded, config)
    runner = ModelRunner(next(candidate_paths(model, config, threads=threads)), config, model)
    runner.allocate(max(BATCHES) * (PROMPT // BLOCK + 1) + 1)
    return runner


def rate(runner: ModelRunner, make: Callable[[], list[Chunk]]) -> float:
    """Tokens per second, the best of a few forwards in a row: what neighbours take away comes in stretches."""
    best = 0.0
    for _ in range(2):
        chunks = make()
        started = time.perf_counter()
        runner.forward(chunks)
        best = max(best, sum(chunk.length for chunk in chunks) / (time.perf_counter() - started))
    return best


def loads() -> dict[str, Callable[[], list[Chunk]]]:
    size = PROMPT // BLOCK + 1
    seeds = iter(range(1, 1_000_000))
    decoding = {count: [chunk_of(PROMPT + 1, 1 + i * size, PROMPT, 0) for i in range(count)] for count in BATCHES}
    return {
        **{f"decode, {count}": lambda count=count: decoding[count] for count in BATCHES},
        f"prefill, {PROMPT}, image known": lambda: [chunk_of(PROMPT, 1, 0, 0)],
        f"prefill, {PROMPT}, image new": lambda: [chunk_of(PROMPT, 1, 0, next(seeds))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rates: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        save_model(Path(folder))
        runners = {name: runner_on(attention, Path(folder), options.threads) for name, attention in PATHS.items()}
        named = loads()
        for _ in range(options.rounds):
            for load, make in named.items():
                for name, runner in runners.items():
                    rates.setdefault((name, load), []).append(rate(runner, make))
    print(f"| {options.threads} threads | " + " | ".join(named) + " |")
    print("|---|" + "--:|" * len(named))
    for name in runners:
        print(f"| {name} | " + " | ".join(f"{statistics.median(rates[name, load]):.0f}" for load in named) + " |")
    ratios = [
        [ours / theirs for ours, theirs in zip(rates["C kernels", load], rates["torch", load], strict=True)]
        for load in named
    ]
    print("| ratio | " + " | ".join(f"{statistics.median(found):.2f}" for found in ratios) + " |")


if __name__ == "__main__":
    main()
