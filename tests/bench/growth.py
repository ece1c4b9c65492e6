"""How the service grows: tokens per second over streams, prompt length and number of checkpoints, what a prefill costs
those who decode, and what a checkpoint costs in memory.

    python tests/bench/growth.py --store FOLDER [--rounds 3]

makes the checkpoints that it needs under FOLDER (5 GB), starts the demo model with the demo's settings, measures, and
writes the tables into `README.md` and the plot into `growth.svg` beside this file. Points are measured in turn, round
after round, so that what the machine's neighbours do falls on all of them; figures are medians over the rounds.
"""

import argparse
import asyncio
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from bench_service import APP, BASE, KEY, MODEL_FOLDER, running
from load import Load, run
from make_adapters import make
from transformers import AutoConfig

from serve_app.cli.processes import command_line, descendants
from serve_app.config.deploy import free_port

HERE = Path(__file__).parent
STREAMS = (1, 2, 4, 8, 16, 32, 64)
PROMPTS = (128, 512, 1024, 2048, 4096)
CHECKPOINTS = (0, 1, 8, 64, 256, 1000)
RANKS = (4, 8, 16, 64)
BLOCK_SIZE = 16

Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Bench:
    """A running service, and the model ids of its checkpoints."""

    url: str
    checkpoints: tuple[str, ...]
    mixed: tuple[str, ...]
    _seeds: Iterator[int] = field(default_factory=partial(count, 1))

    def load(self, models: Iterable[str] = (BASE,), **changes: Any) -> Load:
        """Of prompts that no load before it had: else the prefix cache would have them."""
        return replace(Load(self.url, tuple(models), key=KEY, seed=next(self._seeds)), **changes)


def measured(load: Load) -> Figures:
    figures = asyncio.run(run(load))
    if figures["errors"]:
        raise SystemExit(f"{figures['errors']} requests failed: {figures['error']}")
    return figures


def over_streams(bench: Bench, streams: int) -> Figures:
    return measured(bench.load(streams=streams, requests=max(4, 2 * streams)))


def over_prompts(bench: Bench, tokens: int) -> Figures:
    """Prefill alone, then decoding on contexts of that length: the same prompts, whose K and V are kept."""
    prompts = bench.load(streams=8, requests=8, prompt_tokens=tokens)
    first = measured(replace(prompts, max_tokens=1))
    return {**measured(replace(prompts, max_tokens=64)), "prefill_tokens_per_s": tokens * first["requests_per_s"]}


def over_checkpoints(bench: Bench, number: int) -> Figures:
    models = bench.checkpoints[:number] or (BASE,)
    return measured(bench.load(models, streams=32, requests=96, zipf=1.0 if number > 8 else 0.0))


def with_ranks(bench: Bench, mixed: bool) -> Figures:
    models = bench.mixed if mixed else bench.checkpoints[: len(bench.mixed)]
    return measured(bench.load(models, streams=32, requests=96))


async def _beside_prefill(bench: Bench) -> tuple[Figures, Figures]:
    """Eight streams that decode, quiet and beside one 1,024-token prompt after the other."""
    decoding = partial(bench.load, streams=8, requests=8, prompt_tokens=128, max_tokens=192)
    quiet = await run(decoding())
    prompts = asyncio.create_task(_prompts_without_end(bench))
    busy = await run(decoding())
    prompts.cancel()
    return quiet, busy


async def _prompts_without_end(bench: Bench) -> None:
    while True:
        await run(bench.load(prompt_tokens=1024, max_tokens=1, streams=1, requests=1))


def beside_prefill(bench: Bench) -> Figures:
    quiet, busy = asyncio.run(_beside_prefill(bench))
    return {
        "quiet_ms": quiet["gap_ms"][1],
        "busy_ms": busy["gap_ms"][1],
        "times": busy["gap_ms"][1] / quiet["gap_ms"][1],
    }


def resident_bytes() -> int:
    """Resident memory of the model's process."""
    for pid in descendants():
        if f"ServeReplica:{APP}:engine" in " ".join(command_line(pid)):
            status = Path(f"/proc/{pid}/status").read_text()
            return 1024 * int(status.partition("VmRSS:")[2].split()[0])
    raise SystemExit("the model's process was not found")


def block_bytes() -> int:
    """Of K and V of one block of the demo model, in all layers."""
    config = AutoConfig.from_pretrained(MODEL_FOLDER)
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    return BLOCK_SIZE * int(per_token)


def load_all(bench: Bench) -> float:
    """Ask every checkpoint for one token; bytes of memory that each has added."""
    measured(bench.load(bench.checkpoints[:8], streams=8, requests=8, max_tokens=1))
    before = resident_bytes()
    rest = bench.checkpoints[8:]
    measured(bench.load(rest, streams=32, requests=len(rest), prompt_tokens=16, max_tokens=1))
    return (resident_bytes() - before) / len(rest)


@dataclass(slots=True)
class Results:
    """Figures of every round, by table and row."""

    tables: dict[str, dict[Any, list[Figures]]]

    def median(self, table: str, row: Any, figure: Callable[[Figures], float]) -> float:
        return statistics.median(figure(figures) for figures in self.tables[table][row])


def measure_all(bench: Bench, rounds: int) -> Results:
    def points() -> Iterable[tuple[str, Any, Figures]]:
        for streams in STREAMS:
            yield "streams", streams, over_streams(bench, streams)
        for tokens in PROMPTS:
            yield "prompts", tokens, over_prompts(bench, tokens)
        for number in CHECKPOINTS:
            yield "checkpoints", number, over_checkpoints(bench, number)
        for mixed in (False, True):
            yield "ranks", mixed, with_ranks(bench, mixed)
        yield "beside", None, beside_prefill(bench)

    results = Results({})
    for number in range(1, rounds + 1):
        for table, row, figures in points():
            results.tables.setdefault(table, {}).setdefault(row, []).append(figures)
            print(f"round {number}: {table} {row}: {dict(figures)}", flush=True)
    return results


def tokens_per_s(figures: Figures) -> float:
    return float(figures["tokens_per_s"])


def first_token(figures: Figures) -> float:
    return float(figures["first_token_ms"][0])


def gap(quantile: int) -> Callable[[Figures], float]:
    return lambda figures: float(figures["gap_ms"][quantile])


def markdown(results: Results, adapter_bytes: float) -> str:
    median = results.median
    lines = ["| streams | tokens/s | first token, ms | between tokens, median and p99, ms |", "|--:|--:|--:|--:|"]
    for row in STREAMS:
        gaps = f"{median('streams', row, gap(0)):.0f}, {median('streams', row, gap(1)):.0f}"
        first = median("streams", row, first_token)
        lines.append(f"| {row} | {median('streams', row, tokens_per_s):.0f} | {first:.0f} | {gaps} |")
    lines += ["", "| prompt, tokens | prefill, tokens/s | decoding on it, 8 streams, tokens/s |", "|--:|--:|--:|"]
    for row in PROMPTS:
        prefill = median("prompts", row, lambda figures: figures["prefill_tokens_per_s"])
        decode = median("prompts", row, tokens_per_s)
        lines.append(f"| {row:,} | {prefill:.0f} | {decode:.0f} |")
    lines += ["", "| checkpoints, 32 streams | tokens/s | of the base | first token, ms |", "|--:|--:|--:|--:|"]
    base = median("checkpoints", 0, tokens_per_s)
    for row in CHECKPOINTS:
        rate = median("checkpoints", row, tokens_per_s)
        first = median("checkpoints", row, first_token)
        lines.append(f"| {row or 'none (the base)'} | {rate:.0f} | {rate / base:.2f} | {first:.0f} |")
    alike, mixed = (median("ranks", row, tokens_per_s) for row in (False, True))
    beside = results.tables["beside"][None]
    quiet, busy, times = (statistics.median(f[name] for f in beside) for name in ("quiet_ms", "busy_ms", "times"))
    lines += [
        "",
        f"- Eight checkpoints of ranks {', '.join(map(str, RANKS))} in turn: {mixed:.0f} tokens/s, all of rank 8: "
        f"{alike:.0f}.",
        f"- p99 between the tokens of eight streams: {quiet:.0f} ms quiet, {busy:.0f} ms beside one 1,024-token prompt "
        f"after the other, {times:.1f} times as long.",
        f"- A loaded checkpoint of rank 8 takes {adapter_bytes / 1e6:.1f} MB, a block of {BLOCK_SIZE} tokens "
        f"{block_bytes() / 1e6:.2f} MB.",
    ]
    return "\n".join(lines)


def plot(results: Results) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "growth"  # the same figures give the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    tables: tuple[tuple[str, str, tuple[int, ...]], ...] = (
        ("streams", "streams", STREAMS),
        ("prompts", "prompt, tokens (prefill)", PROMPTS),
        ("checkpoints", "checkpoints, 32 streams", CHECKPOINTS),
    )
    for axis, (table, label, rows) in zip(axes, tables, strict=True):
        rate = (lambda figures: float(figures["prefill_tokens_per_s"])) if table == "prompts" else tokens_per_s
        axis.plot([max(row, 0.5) for row in rows], [results.median(table, row, rate) for row in rows], marker="o")
        axis.set(xscale="log", xlabel=label, ylabel="tokens/s", ylim=(0, None), xticks=[max(row, 0.5) for row in rows])
        axis.set_xticklabels(map(str, rows))
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    figure.savefig(HERE / "growth.svg", metadata={"Date": None})


def write_readme(table: str) -> None:
    """Put the tables between the marks."""
    readme = HERE / "README.md"
    before, begin, rest = readme.read_text().partition("<!-- growth -->\n")
    _, end, after = rest.partition("<!-- /growth -->\n")
    if not begin or not end:
        raise SystemExit("README.md has lost its marks <!-- growth --> and <!-- /growth -->")
    readme.write_text(f"{before}{begin}{table}\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    checkpoints = make(options.store, "bench", str(MODEL_FOLDER), max(CHECKPOINTS), [8])
    mixed = make(options.store, "mixed", str(MODEL_FOLDER), 8, RANKS)
    with running(options.store, free_port(), {}) as url:
        bench = Bench(url, checkpoints, mixed)
        measured(bench.load(streams=8, requests=16))  # warm
        adapter_bytes = load_all(bench)
        results = measure_all(bench, options.rounds)
    table = markdown(results, adapter_bytes)
    print(table)
    plot(results)
    write_readme(table)


if __name__ == "__main__":
    main()
