"""Clients in a closed loop: each asks, takes its answer, and asks again, until the load ends. None is cut off."""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp

from tests.support.soak.contract import Contract
from tests.support.soak.kinds import Kind, Manner

_LONGEST_S = 300.0  # an answer that has not ended by then is a fault
_PATIENCE_S = 3.0  # of those that leave
_PAUSE_S = 0.2


@dataclass(slots=True)
class Answer:
    """What one client saw. `outcome`: a status with its code, `left`, or `broken`."""

    kind: Kind
    outcome: str = "left"
    fault: str | None = None
    first_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Tally:
    """What all clients saw so far. `faults`: whatever is outside the contract."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    firsts_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    @property
    def answered(self) -> int:
        return self.outcomes.total()

    def served(self, kind: str) -> int:
        return self.outcomes[kind, "200"]

    def add(self, answer: Answer) -> None:
        self.outcomes[answer.kind.name, answer.outcome] += 1
        if answer.fault is not None:
            self.faults.append(f"{answer.kind.name}: {answer.fault}")
        if answer.first_s is not None and answer.kind.manner is Manner.READ:
            self.firsts_s.append(answer.first_s)
            self.gaps_s += answer.gaps_s


@dataclass(frozen=True, slots=True)
class Load:
    """`clients` of these kinds at a time."""

    url: str
    key: str
    kinds: Sequence[Kind]
    clients: int
    seed: int = 1

    async def run(self, tally: Tally, has_ended: Callable[[], bool]) -> None:
        """Until `has_ended`, and all have their answers."""
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(None)) as session:
            async with session.get(f"{self.url}/openapi.json") as reply:
                contract = Contract(await reply.json())
            visits = Visits(session, contract, self)
            await asyncio.gather(*(self._client(visits, number, tally, has_ended) for number in range(self.clients)))

    async def _client(self, visits: "Visits", number: int, tally: Tally, has_ended: Callable[[], bool]) -> None:
        chance = Random(f"{self.seed}/{number}")
        weights = [kind.weight for kind in self.kinds]
        while not has_ended():
            (kind,) = chance.choices(self.kinds, weights)
            answer = await visits.make(kind, chance)
            tally.add(answer)
            if answer.outcome.startswith(("429", "503")):
                await asyncio.sleep(chance.uniform(0, 2 * _PAUSE_S))  # it was asked to come back later


@dataclass(frozen=True, slots=True)
class Visits:
    """Makes single requests, each on a connection of its own."""

    session: aiohttp.ClientSession
    contract: Contract
    load: Load

    async def make(self, kind: Kind, chance: Random) -> Answer:
        leaves = kind.manner is Manner.LEAVE
        answer = Answer(kind)
        try:
            async with asyncio.timeout(chance.uniform(0, _PATIENCE_S) if leaves else _LONGEST_S):
                await self._exchange(answer, kind.body(chance), chance)
        except TimeoutError:
            if not leaves:
                answer.outcome, answer.fault = "broken", f"no end within {_LONGEST_S:.0f} s"
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            answer.outcome, answer.fault = "broken", repr(exc)
        return answer

    async def _exchange(self, answer: Answer, body: Any, chance: Random) -> None:
        kind = answer.kind
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {kind.key or self.load.key}", "content-type": "application/json"}
        began = time.monotonic()
        async with self.session.post(f"{self.load.url}{kind.path}", data=content, headers=headers) as reply:
            if reply.status != 200:
                value = await reply.json()
                refusal = (reply.status, value["error"]["code"])
                answer.outcome = " ".join(str(part) for part in refusal if part is not None)
                can_retry = "retry-after" in reply.headers
                answer.fault = self.contract.refusal(kind, refusal, value, can_retry=can_retry)
            elif reply.content_type == "text/event-stream":
                await self._read_events(answer, reply, began, chance)
            else:
                value = await reply.json()
                answer.outcome, answer.fault = "200", self.contract.reply(kind, value)

    async def _read_events(self, answer: Answer, reply: aiohttp.ClientResponse, began: float, chance: Random) -> None:
        last: str | None = None
        seen_at = began
        async for line in reply.content:
            if not line.startswith(b"data: "):
                continue
            last = line[len(b"data: ") :].decode().strip()
            if last == "[DONE]":
                continue
            now = time.monotonic()
            if answer.first_s is None:
                answer.first_s = now - began
            else:
                answer.gaps_s.append(now - seen_at)
            seen_at = now
            value = json.loads(last)
            if "error" in value:
                answer.outcome = f"200, then {value['error']['code']}"
                answer.fault = self.contract.failure(answer.kind, value)
                return
            answer.fault = answer.fault or self.contract.chunk(answer.kind, value)
            if answer.kind.manner is Manner.PAUSE and chance.random() < 0.2:
                await asyncio.sleep(chance.uniform(0, _PAUSE_S))
        answer.outcome = "200"
        if last != "[DONE]":
            answer.fault = f"a stream ended with {last!r}"


@contextmanager
def under(load: Load) -> Iterator[Tally]:
    """With this load, in a thread of its own, until the end of the context; then all have their answers."""
    tally, ended = Tally(), threading.Event()
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(lambda: asyncio.run(load.run(tally, ended.is_set)))
        try:
            yield tally
        finally:
            ended.set()
        running.result()
