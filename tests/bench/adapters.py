"""What adapters cost a decoding step: loaded and unused, used by every row, at one rank and at mixed ranks. The forward
pass alone, no HTTP.

    python tests/bench/adapters.py --store STORE [--loaded 256] [--threads 2] [--rounds 15]

Three engines of the demo model in bfloat16 are measured in turn; the table shows the time of a step over the plain
one's, as the median of the rounds. `STORE` has the checkpoints of `growth.py`.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
from bench_service import MODEL_FOLDER
from forward import BLOCK, chunk_of, tokens_per_s
from growth import RANKS
from make_adapters import make

from engines.compute.candidates import candidate_paths
from engines.compute.paged_model import PagedModel
from engines.compute.runner import ModelRunner
from engines.interface.config import EngineConfig
from engines.interface.protocol import Adapter
from engines.lora.format.digest import CONFIG_FILE, WEIGHTS_FILE, adapter_digest
from engines.lora.format.weights import read_adapter
from engines.model.loader import load_model
from engines.planning.scheduler import Chunk

BATCHES = (1, 8, 32, 64)
CONTEXT = 160
USED = 8


def runner_with(folders: list[Path], threads: int, kernel_cache: str) -> ModelRunner:
    config = EngineConfig(
        str(MODEL_FOLDER), dtype="bfloat16", kernel_cache=kernel_cache, max_adapters=max(1, len(folders))
    )
    loaded = load_model(config)
    model = PagedModel.of(loaded, config)
    runner = ModelRunner(next(candidate_paths(model, config, threads=threads)), config, model)
    runner.allocate(1 + max(BATCHES) * -(-(CONTEXT + 1) // BLOCK))
    for slot, folder in enumerate(folders):
        digest = adapter_digest((folder / CONFIG_FILE).read_bytes(), (folder / WEIGHTS_FILE).read_bytes())
        adapter = Adapter(digest, str(folder))
        weights = read_adapter(adapter, model.targets, max_rank=max(RANKS), max_bytes=1 << 30)
        runner.adapters.install(slot, runner.adapters.prepare(weights))  # type: ignore[arg-type]
    return runner


def steps(rows: int, *, with_adapters: bool) -> list[Chunk]:
    size = -(-(CONTEXT + 1) // BLOCK)
    chunks = [chunk_of(CONTEXT + 1, 1 + row * size, CONTEXT) for row in range(rows)]
    for row, chunk in enumerate(chunks):
        if with_adapters:
            chunk.sequence.slot = row % USED
    return chunks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--loaded", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    make(options.store, "bench", str(MODEL_FOLDER), options.loaded, [8])
    make(options.store, "mixed", str(MODEL_FOLDER), USED, RANKS)
    same, mixed = (sorted((options.store / run / "sampler_weights").iterdir()) for run in ("bench", "mixed"))
    with tempfile.TemporaryDirectory() as cache, torch.inference_mode():
        plain = runner_with([], options.threads, cache)
        loaded = runner_with(same[: options.loaded], options.threads, cache)
        of_all_ranks = runner_with(mixed[:USED], options.threads, cache)
        variants = {
            f"{options.loaded} loaded, none used": (loaded, False),
            f"{USED} used, rank 8": (loaded, True),
            f"{USED} used, ranks {', '.join(map(str, RANKS))}": (of_all_ranks, True),
        }
        print("| step of | " + " | ".join(f"{rows} rows" for rows in BATCHES) + " |")
        print("|---|" + "--:|" * len(BATCHES))
        for name, (runner, with_adapters) in variants.items():
            cells = []
            for rows in BATCHES:
                chunks, base = steps(rows, with_adapters=with_adapters), steps(rows, with_adapters=False)
                ratios = [tokens_per_s(plain, base) / tokens_per_s(runner, chunks) for _ in range(options.rounds)]
                cells.append(f"{statistics.median(ratios):.2f}")
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
