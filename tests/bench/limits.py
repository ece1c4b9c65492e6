"""How exactly limits hold over several ingresses, in simulated time, and what their board costs.

    python tests/bench/limits.py [--minutes 5] [--rate 40]

One key asks at random times and ingresses, for four times as much as it may. Each ingress exchanges every `PERIOD_S`
(`access/sharing/`), at a time of its own. The limiters and the board are those of the service; no network, no Ray.

Prints Markdown tables.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from serve_app.access.sharing.board import Board, Telling, Used
from serve_app.access.sharing.shared_limits import PERIOD_S
from tests.support.limiter_kit import caller
from tests.support.limits_simulation import Ingresses, flood

PER_MINUTE = 600


def excess(count: int, *, minutes: float, per_s: float, period_s: float) -> float:
    """The share of what was admitted above what one ingress would have admitted."""
    who = caller(requests_per_minute=PER_MINUTE)
    admitted = []
    for ingresses in (Ingresses(count), Ingresses(1)):
        ingresses.exchange()
        admitted.append(flood(ingresses, who, seconds=60 * minutes, per_s=per_s, period_s=period_s, seed=1))
    return admitted[0] / admitted[1] - 1


def exchange_us(num_ingresses: int, num_keys: int, rounds: int = 50) -> float:
    """CPU time of one exchange in which all keys have changed."""
    board, used = Board(), {f"key-{n}": Used(1, 1, 100) for n in range(num_keys)}
    hearings = [board.exchange(Telling(str(n), 0, used)) for n in range(num_ingresses)]
    began = time.process_time()
    for serial in range(1, rounds + 1):
        for n in range(num_ingresses):
            before = hearings[n]
            hearings[n] = board.exchange(Telling(str(n), serial, used, before.epoch, before.version))
    return (time.process_time() - began) / (rounds * num_ingresses) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--rate", type=float, default=40, help="requests a second; a key may send 10")
    asked = parser.parse_args()
    print(f"| ingresses | exchange every {PERIOD_S} s | every 2 s | never |")
    print("|---|--:|--:|--:|")
    for count in (2, 4, 8):
        shares = [
            excess(count, minutes=asked.minutes, per_s=asked.rate, period_s=period_s) for period_s in (PERIOD_S, 2, 1e9)
        ]
        print(f"| {count} | {' | '.join(f'{share:+.1%}' for share in shares)} |")
    print("\n| ingresses | keys that all changed | CPU time of an exchange | share of a core |")
    print("|---|--:|--:|--:|")
    for num_ingresses, num_keys in ((2, 20), (8, 200), (50, 1000)):
        cost_us = exchange_us(num_ingresses, num_keys)
        share = cost_us / 1e6 * num_ingresses / PERIOD_S
        print(f"| {num_ingresses} | {num_keys} | {cost_us:.0f} µs | {share:.1%} |")


if __name__ == "__main__":
    main()
