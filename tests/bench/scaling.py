"""A model that scales over a day, in simulated time: seconds over the limit, and replica hours, for several pools.

    python tests/bench/scaling.py [--mean 6] [--seed 1] [--limit 5] [--hours 24]

The traffic is that of a day with bursts; a replica takes 90 s to start. The real policy and measurements decide, with
Serve's own delays (`tests/support/replicas/scaling_simulation.py`). A second is over the limit if the first token of a
request that came in it takes longer than the limit.

Prints a Markdown table.
"""

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.replicas.scaling_simulation import Pool, Result, Simulation, traffic

POOLS = [
    Pool("fixed, 2", 2, 2),
    Pool("fixed, 4", 4, 4),
    Pool("fixed, 6", 6, 6),
    Pool("fixed, 8", 8, 8),
    Pool("by requests, 1 to 8", 1, 8, by="requests"),
    Pool("by requests, 2 to 8", 2, 8, by="requests"),
    Pool("by load, 0 to 8", 0, 8),
    Pool("by load, 1 to 8", 1, 8),
    Pool("by load, 2 to 8", 2, 8),
    Pool("by load, 2 to 8, started in 20 s", 2, 8, start_s=20),
]


def row(result: Result, limit_s: float) -> str:
    waits = sorted(result.waits)
    late = sum(wait > limit_s for wait in waits) / len(waits)
    hours = result.replica_s / 3600
    return (
        f"| {result.pool.name} | {len(result.over_limit_s)} | {late:.2%} | {statistics.median(waits):.2f} | "
        f"{waits[int(0.99 * len(waits))]:.1f} | {hours:.0f} | {result.most} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mean", type=float, default=6.0, help="requests a second, on average without bursts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=5.0, help="longest time to the first token, in seconds")
    parser.add_argument("--hours", type=float, default=24)
    asked = parser.parse_args()
    seconds = int(asked.hours * 3600)
    print("| pool | seconds over the limit | late requests | median, s | 99 %, s | replica hours | most |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for pool in POOLS:
        requests = traffic(asked.seed, mean_per_s=asked.mean, seconds=seconds)
        print(row(Simulation(pool, limit_s=asked.limit).run(requests, seconds), asked.limit), flush=True)


if __name__ == "__main__":
    main()
