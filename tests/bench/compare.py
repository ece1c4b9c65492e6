"""Two OpenAI-compatible servers side by side, in one run on one machine.

    python tests/bench/compare.py --ours http://127.0.0.1:8000 --peer http://127.0.0.1:8100 [--only base] [--rounds 3]

Each load goes to one server and then to the other, `--rounds` times over, so that what the machine's neighbours do
falls on both; the ratio is the median of the rounds' ratios. `--adapters` has both serve `a0000` … `a0007` (ours under
`tinker://bench/sampler_weights/`, see `make_adapters.py`). Prints a Markdown table, and JSON with `--json FILE`.
`peer_vllm.sh` starts the peer.
"""

import argparse
import asyncio
import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from load import Load, run

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
ADAPTERS = tuple(f"a{index:04d}" for index in range(8))


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load but for the server's address. `figure`: what is compared, and in which unit."""

    name: str
    load: Load
    adapters: bool = False
    figure: str = "tokens_per_s"


def scenarios() -> list[Scenario]:
    load = Load("", ())
    return [
        *(
            Scenario(f"base, {streams} streams", replace(load, streams=streams, requests=requests))
            for streams, requests in ((1, 4), (8, 32), (32, 96), (64, 160))
        ),
        Scenario("base at temperature 1, 32 streams", replace(load, streams=32, requests=96, temperature=1.0)),
        Scenario(
            "prefill, 8 x 1024 tokens",
            replace(load, streams=8, requests=16, prompt_tokens=1024, max_tokens=1),
            figure="requests_per_s",
        ),
        Scenario(
            "prefill, 960 of 1024 tokens shared",
            replace(load, streams=8, requests=64, prompt_tokens=1024, max_tokens=1, shared_prefix=960),
            figure="requests_per_s",
        ),
        *(
            Scenario(f"8 adapters, {streams} streams", replace(load, streams=streams, requests=requests), adapters=True)
            for streams, requests in ((8, 16), (32, 48))
        ),
    ]


async def measure(scenario: Scenario, options: argparse.Namespace, first_seed: int) -> dict[str, Any]:
    ours_models, peer_models = (options.ours_model,), (options.peer_model,)
    if scenario.adapters:
        ours_models, peer_models = tuple(f"tinker://bench/sampler_weights/{name}" for name in ADAPTERS), ADAPTERS
    rounds = []
    for number in range(options.rounds):
        seeded = replace(scenario.load, seed=first_seed + number)  # prompts of its own: no cache has them
        ours = await run(replace(seeded, url=options.ours, models=ours_models, key=options.key))
        peer = await run(replace(seeded, url=options.peer, models=peer_models))
        for name, result in (("ours", ours), ("peer", peer)):
            if result["errors"]:
                raise SystemExit(f"{scenario.name}: {result['errors']} requests failed at {name}: {result['error']}")
        rounds.append((ours, peer))
    return {
        "name": scenario.name,
        "unit": scenario.figure,
        **{side: [pair[index][scenario.figure] for pair in rounds] for index, side in enumerate(("ours", "peer"))},
        "ratio": statistics.median(ours[scenario.figure] / peer[scenario.figure] for ours, peer in rounds),
        "first_token_ms": [statistics.median(pair[index]["first_token_ms"][0] for pair in rounds) for index in (0, 1)],
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", required=True)
    parser.add_argument("--peer", required=True)
    parser.add_argument("--ours-model", default=BASE)
    parser.add_argument("--peer-model", default="m")
    parser.add_argument("--key", default="roundhouse-demo")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--adapters", action="store_true")
    parser.add_argument("--only", default="", help="scenarios whose names hold this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = [s for s in scenarios() if options.only in s.name and s.adapters <= options.adapters]
    print("| load | unit | ours | peer | ratio | first token, ours / peer |\n|---|---|---|---|---|---|")
    rows = []
    for index, scenario in enumerate(chosen):
        row = await measure(scenario, options, first_seed=1000 * index + 1)
        rows.append(row)
        ours, peer = (statistics.median(row[side]) for side in ("ours", "peer"))
        first = " / ".join(f"{value:.0f} ms" for value in row["first_token_ms"])
        unit = row["unit"].replace("_per_", "/")
        print(f"| {row['name']} | {unit} | {ours:.1f} | {peer:.1f} | **{row['ratio']:.2f}** | {first} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
