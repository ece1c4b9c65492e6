"""Closed-loop load on any OpenAI-compatible `/v1/completions`, streamed, over raw sockets.

    python tests/bench/load.py --url http://127.0.0.1:8000 --model M --streams 8 --requests 32

Prompts are random token ids, new for every request, so that no prefix cache helps unless `--shared-prefix` says how
many leading tokens all requests share. Several models (`--models a,b`) are asked in turn; `--zipf S` draws them with
probability ~ 1 / rank^S instead. Prints one JSON line; tokens are counted from the server's own `usage`.
"""

import argparse
import asyncio
import json
import random
import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Load:
    """One measurement. Lengths in tokens; `vocabulary` bounds the random ids from above."""

    url: str
    models: tuple[str, ...]
    key: str = "k"
    streams: int = 8
    requests: int = 32
    prompt_tokens: int = 128
    max_tokens: int = 64
    shared_prefix: int = 0
    vocabulary: int = 40000
    temperature: float = 0.0
    zipf: float = 0.0
    seed: int = 1


@dataclass(slots=True)
class Outcome:
    """What one request saw, in seconds. `ends`: when each chunk came, since the start of the whole measurement."""

    first_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str | None = None


async def run(load: Load) -> dict[str, object]:
    """Run the load. The figures: output tokens/s, requests/s, time to first token and gaps between chunks in ms."""
    rng = random.Random(load.seed)
    shared = [random.Random(7).randrange(1000, load.vocabulary) for _ in range(load.shared_prefix)]
    weights = [1 / (rank + 1) ** load.zipf for rank in range(len(load.models))]
    jobs = []
    for index in range(load.requests):
        own = [rng.randrange(1000, load.vocabulary) for _ in range(load.prompt_tokens - load.shared_prefix)]
        name = rng.choices(load.models, weights)[0] if load.zipf else load.models[index % len(load.models)]
        jobs.append((name, shared + own))
    gate = asyncio.Semaphore(load.streams)

    async def one(name: str, prompt: list[int]) -> Outcome:
        async with gate:
            return await _request(load, name, prompt)

    started = time.perf_counter()
    outcomes = await asyncio.gather(*(one(*job) for job in jobs))
    return _summary(outcomes, time.perf_counter() - started)


async def _request(load: Load, model: str, prompt: list[int]) -> Outcome:
    address = urllib.parse.urlsplit(load.url)
    outcome = Outcome()
    started = time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(_http(load, address, model, prompt))
        try:
            status = (await reader.readline()).split()[1]
            if status == b"200":
                await _read_events(reader, outcome, started)
            else:
                outcome.error = f"{status.decode()} {(await reader.read(800)).decode(errors='replace')[-300:]}"
        finally:
            writer.close()
    except (OSError, ValueError, asyncio.IncompleteReadError) as exc:
        outcome.error = repr(exc)
    return outcome


def _http(load: Load, address: urllib.parse.SplitResult, model: str, prompt: list[int]) -> bytes:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": load.max_tokens,
        "temperature": load.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    content = json.dumps(body).encode()
    head = (
        f"POST {address.path.rstrip('/')}/v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
        f"Content-Type: application/json\r\nAuthorization: Bearer {load.key}\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content


async def _read_events(reader: asyncio.StreamReader, outcome: Outcome, started: float) -> None:
    last = started
    async for line in reader:
        if not line.startswith(b"data:"):
            continue
        payload = line[5:].strip()
        if payload == b"[DONE]":
            return
        now = time.perf_counter()
        event = json.loads(payload)
        if event.get("error"):
            outcome.error = str(event["error"])[:300]
            return
        if event.get("usage"):
            outcome.tokens = event["usage"]["completion_tokens"]
        if event.get("choices"):
            if outcome.first_s is None:
                outcome.first_s = now - started
            else:
                outcome.gaps_s.append(now - last)
            last = now
    outcome.error = "the stream was cut"


def _summary(outcomes: Sequence[Outcome], wall_s: float) -> dict[str, object]:
    good = [outcome for outcome in outcomes if outcome.error is None]
    firsts = [outcome.first_s for outcome in good if outcome.first_s is not None]
    gaps = [gap for outcome in good for gap in outcome.gaps_s]
    return {
        "tokens_per_s": round(sum(outcome.tokens for outcome in good) / wall_s, 2),
        "requests_per_s": round(len(good) / wall_s, 3),
        "wall_s": round(wall_s, 2),
        "first_token_ms": [_percentile(firsts, 0.5), _percentile(firsts, 0.99)],
        "gap_ms": [_percentile(gaps, 0.5), _percentile(gaps, 0.99)],
        "errors": len(outcomes) - len(good),
        "error": next((outcome.error for outcome in outcomes if outcome.error), None),
    }


def _percentile(values: Sequence[float], share: float) -> float | None:
    ordered = sorted(values)
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1) if ordered else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--models", required=True, help="one model or several, separated by commas")
    parser.add_argument("--key", default="k")
    for name, default in (("streams", 8), ("requests", 32), ("prompt-tokens", 128), ("max-tokens", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--shared-prefix", type=int, default=0)
    parser.add_argument("--vocabulary", type=int, default=40000)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--zipf", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    options = vars(parser.parse_args())
    options["models"] = tuple(options["models"].split(","))
    print(json.dumps(asyncio.run(run(Load(**options)))))


if __name__ == "__main__":
    main()
