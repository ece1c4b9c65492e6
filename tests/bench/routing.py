"""Routing of a model with 10, 100 and 500 replicas: the real policy, reports and encodings, in simulated time, no Ray.

    python tests/bench/routing.py [--replicas 10 100 500] [--seconds 10] [--loads channel|serve] [--factor 1.1]

Requests arrive at random at a share of what all batches hold. Each goes through `candidate_of` and `choose` of one of
the ingresses, one per ten replicas, each with reports of its own. Replicas tell their status as frames that are encoded
and decoded (`tests/support/replicas/routing_simulation.py`). `--loads serve`: no statuses; the queue lengths are those
that Serve 2.60 believes for unary calls.

Prints Markdown tables: balance and adapters at 70 % load, the same with half of the requests for one adapter, the keys
that move when a replica leaves, and the bytes that Serve's controller carries.
"""

import argparse
import random
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ray import cloudpickle
from ray.serve._private.common import DeploymentID, DeploymentTargetInfo, ReplicaID, RunningReplicaInfo

from serve_app.replicas.reports import BEAT_S, Report
from serve_app.replicas.router import Candidate, Patience, Wish, choose
from serve_app.replicas.status import pack_adapters
from tests.support.replicas.routing_simulation import APP, CAPACITY, Result, Settings, Simulation, names


def moved(count: int, keys: int = 2000) -> tuple[float, int]:
    """Of ten replicas that leave in turn: how many keys move for each key that was on it, and how many were on another
    one. So the average share that moves is the first figure divided by the number of replicas.
    """
    candidates = [Candidate(name, 0, CAPACITY) for name in names(count)]
    wishes = [Wish(f"conversation {n}", "", "r") for n in range(keys)]
    home = {wish: choose(candidates, wish, Patience())[0].replica_id for wish in wishes}
    had = changed = strays = 0
    for gone in candidates[: min(10, count)]:
        left = [candidate for candidate in candidates if candidate is not gone]
        others = [wish for wish in wishes if choose(left, wish, Patience())[0].replica_id != home[wish]]
        had += sum(name == gone.replica_id for name in home.values())
        changed += len(others)
        strays += sum(home[wish] != gone.replica_id for wish in others)
    return changed / had, strays


def broadcast_bytes(count: int, stats: dict[str, object]) -> int:
    """What Serve's controller sends to one ingress when the report of one replica of the model changes."""
    deployment = DeploymentID("engine", APP)
    replicas = [
        RunningReplicaInfo(
            ReplicaID(name, deployment),
            node_id="n" * 56,
            node_ip="10.0.0.1",
            availability_zone=None,
            actor_name=f"SERVE_REPLICA::{APP}#engine#{name}",
            max_ongoing_requests=4 * CAPACITY,
            routing_stats=stats,
            port=30000,
        )
        for name in names(count)
    ]
    # Each replica has text of its own: pickle would write a shared object once.
    replicas = [cloudpickle.loads(cloudpickle.dumps(replica)) for replica in replicas]
    return len(cloudpickle.dumps({APP: DeploymentTargetInfo(True, replicas)}))


def broadcasts_per_s(count: int, changes_per_s: float) -> float:
    """In how many turns of its loop, ten a second, the controller sees a report that has changed. It asks each replica
    every second; `changes_per_s` is of one replica.
    """
    seen_per_turn = min(1.0, changes_per_s) / 10
    return 10 * (1 - (1 - seen_per_turn) ** count)


def balance_table(settings: list[Settings]) -> Iterator[str]:
    columns = ["replicas, ingresses", "busiest / average: median, highest", "adapter hits", "conversations that stay"]
    columns += ["waited", "hot adapter: replicas, hits", "statuses to each ingress", "a choice"]
    yield f"| {' | '.join(columns)} |"
    yield f"|---|{'--:|' * (len(columns) - 1)}"
    for one in settings:
        yield f"| {' | '.join(cells(one, Simulation(one).run()))} |"


def cells(settings: Settings, result: Result) -> Iterator[str]:
    yield f"{settings.replicas}, {settings.ingresses}"
    yield f"{statistics.median(result.ratios):.2f}, {max(result.ratios):.2f}"
    yield f"{share(result.hits):.0%}"
    yield f"{share(result.stays):.0%}"
    yield f"{share(result.late):.1%}"
    yield f"{len(result.hot_replicas)}, {share(result.hot_hits):.1%}" if settings.hot else "-"
    each = settings.seconds * settings.ingresses
    yield f"{result.frames / each:.0f}/s, {result.frame_bytes / each / 1e3:.0f} kB/s"
    yield f"{1e6 * statistics.median(result.choices):.0f} µs"


def share(counts: Counter[bool]) -> float:
    return counts[True] / max(1, counts.total())


def moved_table(counts: list[int]) -> Iterator[str]:
    yield "| replicas | keys that move for each key of the one that leaves | keys of others that move |"
    yield "|--:|--:|--:|"
    for count in counts:
        share, strays = moved(count)
        yield f"| {count} | {share:.2f} | {strays} |"


def controller_table(counts: list[int]) -> Iterator[str]:
    digests = [random.Random(n).randbytes(32).hex() for n in range(256)]
    before: dict[str, object] = {"is_ready": True, "adapters": tuple(digests), "beat": 123456, "good_for_s": 7.0}
    by_serve = Report(True, pack_adapters(digests), 123456, 7.0).fields()
    kinds = [
        ("before", before, 1 / BEAT_S),
        ("`transport: serve`", by_serve, 1 / BEAT_S),
        ("`transport: channel`", Report().fields(), 0),
    ]
    yield "| replicas, ingresses | reports | one broadcast to all ingresses | broadcasts/s | MB/s |"
    yield "|---|---|--:|--:|--:|"
    for count in counts:
        ingresses = max(2, count // 10)
        for name, stats, changes_per_s in kinds:
            size = broadcast_bytes(count, stats) * ingresses
            often = broadcasts_per_s(count, changes_per_s)
            yield f"| {count}, {ingresses} | {name} | {size / 1e6:.2f} MB | {often:.1f} | {size * often / 1e6:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[10, 100, 500])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--warm", type=float, default=15.0)
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--factor", type=float, default=Patience().factor)
    parser.add_argument("--loads", choices=["channel", "serve"], default="channel")
    parser.add_argument("--hot", type=float, nargs="*", default=[0.0, 0.5])
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    for hot in given.hot:
        print(f"\nload {given.load:.0%}, {hot:.0%} for one adapter, factor {given.factor}, loads from {given.loads}\n")
        rows = [
            Settings(
                count, given.seconds, given.warm, given.load, given.factor, hot, given.loads == "serve", given.seed
            )
            for count in given.replicas
        ]
        for line in balance_table(rows):
            print(line, flush=True)
    print()
    print("\n".join(moved_table(given.replicas)), "\n")
    print("\n".join(controller_table(given.replicas)))


if __name__ == "__main__":
    main()
