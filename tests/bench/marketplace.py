"""What the way through a slug of the marketplace costs, beside the same upstream asked directly, and beside LiteLLM's
proxy in front of it. All in one run and in turn; the service runs with the settings of config.yaml.

    python tests/bench/marketplace.py [--litellm VENV] [--rounds 3] [--streams 32] [--seconds 10] [--open 500]

    idle       CPU time per second of the proxy's processes without any request; it is part of what follows
    first      time to the first token, one request at a time, on one connection that is kept
    paced      32 streams of 20 tokens per second: CPU time per token of the proxy's processes, first tokens, pauses
    steps      the same, but all streams get their tokens at the same moments, as an engine makes them
    flat out   32 streams of 250 tokens, as fast as they come: tokens per second, CPU time per token
    requests   32 clients that ask for one token again and again: requests per second, CPU time per request
    open       500 streams of a token each 2 s: memory that one more open stream takes

The upstream is `fast_upstream.py`, a process of its own; the clients are this process. `VENV` is an environment with
`litellm[proxy]`, not this repository's: `python3 -m venv VENV && VENV/bin/pip install 'litellm[proxy]==1.106.12'`.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sides import KEY, PACES, Side, litellm, roundhouse, upstream

MARK = b'" tok'  # what each token's event holds once, and no other event
FLAT, REQUESTS = "tokens flat out", "requests of one token"


@dataclass(slots=True)
class Stream:
    """One reply: when it was asked for, and when its tokens came."""

    asked_at: float
    times: list[float] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        return self.times[0] - self.asked_at

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


class Client(asyncio.Protocol):
    """One kept connection, which looks at what comes as cheaply as it can."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._tail = b""
        self._stream: Stream | None = None
        self._over: asyncio.Future[None] | None = None
        self._first: asyncio.Event = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_exception(ConnectionError(f"{self._side.name} cut a stream after {self._tail!r}"))

    def data_received(self, data: bytes) -> None:
        assert self._stream is not None
        assert self._over is not None
        seen = self._tail + data
        if not self._stream.times and seen.startswith(b"HTTP/1.1 ") and not seen.startswith(b"HTTP/1.1 200"):
            self._over.set_exception(RuntimeError(f"{self._side.name}: {seen[:2000].decode(errors='replace')}"))
        # The tail is shorter than a mark: none is counted twice.
        if count := seen.count(MARK):
            self._stream.times += [time.perf_counter()] * count
            self._first.set()
        if seen.endswith(b"0\r\n\r\n") and not self._over.done():
            self._over.set_result(None)
        self._tail = seen[1 - len(MARK) :]

    async def ask(self, pace: str, tokens: int) -> Stream:
        """The whole reply; it must have exactly so many tokens."""
        await self.begin(pace, tokens)
        assert self._stream is not None
        assert self._over is not None
        await self._over
        assert len(self._stream.times) == tokens, (self._side.name, len(self._stream.times))
        return self._stream

    async def begin(self, pace: str, tokens: int) -> None:
        self._tail, self._over = b"", asyncio.get_running_loop().create_future()
        self._first.clear()
        body = {
            "model": self._side.model.format(pace),
            "messages": [{"role": "user", "content": "Say it again and again."}],
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        content = json.dumps(body).encode()
        path = f"{self._side.prefix.format(PACES[pace])}/v1/chat/completions"
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        self._stream = Stream(time.perf_counter())
        self._transport.write(head.encode() + content)

    async def first_token(self) -> None:
        assert self._over is not None
        waiting = asyncio.ensure_future(self._first.wait())
        either: set[asyncio.Future[Any]] = {waiting, self._over}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._over.done():
            self._over.result()

    def leave(self) -> None:
        if self._over is not None:
            self._over.cancel()
        self._transport.close()


@contextlib.asynccontextmanager
async def clients(side: Side, count: int) -> AsyncIterator[list[Client]]:
    loop = asyncio.get_running_loop()
    made = [(await loop.create_connection(lambda: Client(side), "127.0.0.1", side.port))[1] for _ in range(count)]
    try:
        yield made
    finally:
        for client in made:
            client.leave()


def used_us(before: dict[str, float], after: dict[str, float], tokens: int) -> dict[str, float]:
    return {name: (seconds - before.get(name, 0.0)) / tokens * 1e6 for name, seconds in after.items()}


def ms(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    return f"p50 {statistics.median(ordered) * 1e3:6.2f} ms, p99 {ordered[len(ordered) * 99 // 100] * 1e3:7.2f} ms"


@dataclass(slots=True)
class Figures:
    """All rounds of one side, by what was measured. `used_us`: of a token, or of a request that has one."""

    idle_ms: list[float] = field(default_factory=list)
    first_s: list[list[float]] = field(default_factory=list)
    streams: dict[str, list[Stream]] = field(default_factory=lambda: defaultdict(list))
    used_us: dict[str, list[dict[str, float]]] = field(default_factory=lambda: defaultdict(list))
    per_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    open_bytes: list[dict[str, float]] = field(default_factory=list)


def idle(side: Side, figures: Figures, seconds: float) -> None:
    before = side.cpu_seconds()
    time.sleep(seconds)
    figures.idle_ms.append((sum(side.cpu_seconds().values()) - sum(before.values())) / seconds * 1e3)


async def first(sides: Sequence[Side], figures: dict[str, Figures], requests: int) -> None:
    """One request to each side in turn."""
    async with contextlib.AsyncExitStack() as stack:
        opened = {side.name: (await stack.enter_async_context(clients(side, 1)))[0] for side in sides}
        for side in sides:
            figures[side.name].first_s.append([])
            for _ in range(5):  # warm
                await opened[side.name].ask("flat", 1)
        for _ in range(requests):
            for side in sides:
                stream = await opened[side.name].ask("flat", 1)
                figures[side.name].first_s[-1].append(stream.first_s)


async def paced(side: Side, figures: Figures, pace: str, options: argparse.Namespace) -> None:
    step_s = 0.05
    async with clients(side, options.streams) as made:

        async def one(client: Client, index: int) -> Stream:
            await asyncio.sleep(step_s * index / options.streams)  # not all first tokens at the same moment
            return await client.ask(pace, int(options.seconds / step_s))

        await asyncio.gather(*(client.ask("flat", 20) for client in made))  # warm
        before = side.cpu_seconds()
        streams = await asyncio.gather(*(one(client, index) for index, client in enumerate(made)))
        tokens = sum(len(stream.times) for stream in streams)
        figures.used_us[pace].append(used_us(before, side.cpu_seconds(), tokens))
        figures.streams[pace] += streams


async def flat_out(side: Side, figures: Figures, tokens: int, options: argparse.Namespace) -> None:
    """Replies of so many tokens, as many as fit into the time."""
    async with clients(side, options.streams) as made:
        await asyncio.gather(*(client.ask("flat", 100) for client in made))  # warm
        started = time.perf_counter()
        done: list[Stream] = []

        async def one(client: Client) -> None:
            while time.perf_counter() - started < options.seconds:
                done.append(await client.ask("flat", tokens))

        before = side.cpu_seconds()
        await asyncio.gather(*(one(client) for client in made))
        took, received = time.perf_counter() - started, len(done) * tokens
        what = FLAT if tokens > 1 else REQUESTS
        figures.used_us[what].append(used_us(before, side.cpu_seconds(), received))
        figures.per_s[what].append(received / took)


async def held_open(side: Side, figures: Figures, options: argparse.Namespace) -> None:
    """What the processes hold while all streams have had their first token, less what they held before."""
    before = side.memory_bytes()
    async with clients(side, options.open) as made:
        for client in made:
            await client.begin("slow", 1000)
        await asyncio.gather(*(client.first_token() for client in made))
        after = side.memory_bytes()
    figures.open_bytes.append({name: (held - before.get(name, 0)) / options.open for name, held in after.items()})
    figures.open_bytes[-1] |= {f"{name}, all of it": held for name, held in after.items()}


async def measure(sides: Sequence[Side], options: argparse.Namespace) -> dict[str, Figures]:
    figures = {side.name: Figures() for side in sides}
    proxies = [side for side in sides if side.pids()]
    for number in range(options.rounds):
        print(f"round {number + 1}, load average {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
        for side in proxies:
            idle(side, figures[side.name], options.seconds)
        await first(sides, figures, options.requests)
        for pace in ("paced", "steps"):
            for side in sides:
                await paced(side, figures[side.name], pace, options)
        for tokens in (250, 1):
            for side in sides:
                await flat_out(side, figures[side.name], tokens, options)
        for side in proxies:
            await held_open(side, figures[side.name], options)
    return figures


def together(rounds: Sequence[dict[str, float]]) -> list[float]:
    return [sum(used.values()) for used in rounds]


def report(figures: dict[str, Figures]) -> None:
    for name, found in figures.items():
        print(f"\n{name}")
        if found.idle_ms:
            print(f"  idle                             {statistics.median(found.idle_ms):.0f} ms CPU a second")
        print(f"  first token, one at a time       {ms([each for one in found.first_s for each in one])}")
        for pace, streams in found.streams.items():
            print(f"  {pace}: first token               {ms([stream.first_s for stream in streams])}")
            print(f"  {pace}: between tokens            {ms([gap for stream in streams for gap in stream.gaps_s])}")
        for what, each in found.per_s.items():
            print(f"  {what:32} {statistics.median(each):,.0f} a second")
        for pace, rounds in found.used_us.items():
            _report_cpu(pace, rounds)
        for what in found.open_bytes[0] if found.open_bytes else ():
            # The most: later rounds take what the first one left free.
            most = max(one[what] for one in found.open_bytes)
            shown = f"{most / 2**20:.0f} MiB" if what.endswith("all of it") else f"{most / 1024:.1f} KiB a stream"
            print(f"  open streams, {what:28} {shown}")
    _report_ratios(figures)


def _report_cpu(what: str, rounds: Sequence[dict[str, float]]) -> None:
    if not any(rounds):
        return
    for name in rounds[0]:
        print(f"  {what}: {name:28} {statistics.median(used[name] for used in rounds):7.1f} µs CPU each")
    all_of_it = together(rounds)
    each = ", ".join(f"{used:.1f}" for used in all_of_it)
    print(f"  {what}: {'together':28} {statistics.median(all_of_it):7.1f} µs CPU each ({each})")


def _report_ratios(figures: dict[str, Figures]) -> None:
    direct, ours, peer = (figures.get(name) for name in ("direct", "Roundhouse", "LiteLLM"))
    print()
    for name, side in (("Roundhouse", ours), ("LiteLLM", peer)):
        if side is not None and direct is not None:
            added = [
                statistics.median(one) - statistics.median(base)
                for one, base in zip(side.first_s, direct.first_s, strict=True)
            ]
            each = ", ".join(f"{seconds * 1e3:.2f}" for seconds in added)
            print(f"{name} adds {statistics.median(added) * 1e3:.2f} ms to the median first token ({each})")
    if ours is not None and peer is not None:
        for pace, rounds in ours.used_us.items():
            pairs = zip(together(rounds), together(peer.used_us[pace]), strict=True)
            ratios = [theirs / own for own, theirs in pairs]
            each = ", ".join(f"{ratio:.1f}" for ratio in ratios)
            print(f"LiteLLM's CPU time, {pace}: {statistics.median(ratios):.1f} times ours ({each})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--litellm", type=Path, help="an environment with litellm[proxy]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=200, help="of each round, one at a time")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--open", type=int, default=500)
    parser.add_argument("--without-us", action="store_true", help="the upstream directly and LiteLLM alone")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends what it started too
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port = stack.enter_context(upstream())
        sides = [Side("direct", port, "/{}", "{}", dict)]
        if not options.without_us:
            sides.append(stack.enter_context(roundhouse(port, folder)))
        if options.litellm:
            sides.append(stack.enter_context(litellm(options.litellm, port, folder)))
        report(asyncio.run(measure(sides, options)))


if __name__ == "__main__":
    main()
