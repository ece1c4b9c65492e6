"""What a decode step costs on the host while the device computes: the engine's loop around recorded decode steps that
cost nothing. No step on a device is shorter than this.

    OMP_NUM_THREADS=1 python tests/bench/host.py [--steps 300]

On the CPU. The parts are real but for the model, whose logits are always the same: plan, fill in the rows, draw,
commit, emit. A vocabulary of 256 tokens leaves of the drawing what its calls cost. Then what becomes of a step beside a
thread that always has Python to run, as a busy event loop does.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from engines.gpu.attention import PagedLayout
from engines.gpu.graphs import DecodeGraphs
from engines.host.switching import SWITCH_INTERVAL_S
from engines.interface.protocol import GenerateRequest, SamplingParams
from engines.loop import EngineLoop
from engines.planning.block_pool import BlockPool
from engines.planning.scheduler import Chunk, Scheduler
from engines.planning.sequence import NO_SINK, TokenSequence
from engines.tensors.batch import Carried, StepBatch, build_batch
from tests.support.engines.no_adapters import NoAdapters

VOCAB, BLOCK, CONTEXT = 256, 16, 4096
PROMPT, OUTPUT = 16, 1000
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "greedy, 5 log-probabilities": {"temperature": 0.0, "logprobs": 5},
}


class Device:
    """Implements `engines.loop.Runner`."""

    repeatable = True

    def __init__(self, max_rows: int) -> None:
        self._logits = torch.randn(max_rows, VOCAB)
        self._graphs = DecodeGraphs(
            self._forward,
            _recorded,
            block_size=BLOCK,
            width=CONTEXT // BLOCK,
            max_rows=max_rows,
            device=torch.device("cpu"),
        )

    def _forward(self, batch: StepBatch, layout: PagedLayout) -> torch.Tensor:
        return self._logits[: len(layout.lengths)]

    def decode(self, chunks: Sequence[Chunk], carried: Carried | None = None) -> Any:
        return self._graphs.run(chunks, carried)

    def forward(self, chunks: Sequence[Chunk]) -> Any:
        """Of the prompts."""
        return build_batch(chunks, BLOCK, torch.device("cpu")), self._logits[: len(chunks)]

    def check_health(self) -> None:
        raise AssertionError("nothing fails here")


def _recorded(compute: Callable[[], object]) -> Callable[[], object]:
    compute()
    return lambda: None


def loop_with(rows: int, sampling: dict[str, Any]) -> EngineLoop:
    pool = BlockPool(1 + rows * (PROMPT + OUTPUT + BLOCK) // BLOCK + rows, BLOCK)
    budgets = {"max_running": rows, "max_step_tokens": rows * PROMPT, "max_step_tokens_decoding": 256}
    scheduler = Scheduler(pool, NoAdapters(), **budgets, prefix_cache=True)
    loop = EngineLoop(Device(rows), scheduler, NoAdapters(), lambda events: None, print)
    for index in range(rows):
        params = SamplingParams(**{"max_tokens": OUTPUT, "seed": index, **sampling})
        loop.add(TokenSequence.of(GenerateRequest(str(index), (index,) * PROMPT, params), NO_SINK))
    for _ in range(20):
        loop.step()
    return loop


def microseconds(loop: EngineLoop, steps: int) -> float:
    """The median of a step in the least disturbed of ten stretches."""
    medians = []
    for _ in range(10):
        times = []
        for _ in range(steps // 10):
            started = time.perf_counter()
            loop.step()
            times.append(time.perf_counter() - started)
        medians.append(statistics.median(times))
    return 1e6 * min(medians)


def beside_a_busy_thread(switch_interval_s: float) -> float:
    """Microseconds of a greedy step of 32 rows."""
    before, ended = sys.getswitchinterval(), Event()

    def spin() -> None:
        while not ended.is_set():
            pass

    loop, thread = loop_with(32, SAMPLING["greedy"]), Thread(target=spin)
    sys.setswitchinterval(switch_interval_s)
    thread.start()
    try:
        return microseconds(loop, 100)
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    print("| microseconds a step, rows | 1 | 8 | 32 | 64 | 256 |")
    print("|---|--:|--:|--:|--:|--:|")
    with torch.inference_mode():
        for name, sampling in SAMPLING.items():
            found = [microseconds(loop_with(rows, sampling), steps) for rows in (1, 8, 32, 64, 256)]
            print(f"| {name} | " + " | ".join(f"{value:.0f}" for value in found) + " |")
        print()
        for interval_s in (sys.getswitchinterval(), SWITCH_INTERVAL_S):
            found_us = beside_a_busy_thread(interval_s)
            print(f"beside a busy thread, threads switched after {1e3 * interval_s:g} ms: {found_us:.0f} us, 32 rows")


if __name__ == "__main__":
    main()
