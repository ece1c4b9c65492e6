"""What the way through HTTP costs: the production settings (HAProxy, one loop per process) with an engine that costs
nothing, so that everything measured is the service's own.

    python tests/bench/ingress.py [--streams 32] [--seconds 10]

    flat out   32 streams as fast as they come: tokens per second
    paced      32 streams of 20 tokens per second: CPU time per token, by process; pauses between tokens
    beside     the same beside two clients that send chats of some 2 MB, one after the other
    first      time to the first token, one request at a time, against the engine's own
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from serve_app.cli.processes import command_line, descendants  # noqa: E402
from tests.support.files.tiny_tokenizer import save_model_folder  # noqa: E402

KEY = "rh-bench-key"
TICKS = os.sysconf("SC_CLK_TCK")
REST = "the rest of Ray"
OURS = ("ServeReplica:api:ingress", "ServeReplica:flat:engine", "ServeReplica:paced:engine", "haproxy")


@dataclass
class Stream:
    """One reply: when its events came, and how many tokens it had."""

    asked_at: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: int = 0


async def ask(port: int, model: str, max_tokens: int) -> Stream:
    body: dict[str, object] = {"model": model, "prompt": "x", "max_tokens": max_tokens, "stream": True}
    # With their ids, tokens show that have no text of their own: halves of a character, special tokens.
    body |= {"stream_options": {"include_usage": True}, "return_token_ids": True}
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
    stream = Stream(time.monotonic())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + text)
    last = b""
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            stream.times.append(time.monotonic())
            last = line
    writer.close()
    stream.tokens = json.loads(last[6:])["usage"]["completion_tokens"]
    return stream


def cpu_seconds() -> dict[str, float]:
    """CPU time so far of each process that a token passes through, and of all others of the service together."""
    seconds = dict.fromkeys((*OURS, REST), 0.0)
    for pid in descendants():
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            title = " ".join(command_line(pid))
            name = next((name for name in OURS if name in title), REST)
            seconds[name] += (int(fields[11]) + int(fields[12])) / TICKS
    return seconds


async def flat_out(port: int, streams: int, seconds: float) -> None:
    await asyncio.gather(*(ask(port, "flat", 200) for _ in range(streams)))  # warm
    started = time.monotonic()
    done: list[Stream] = []

    async def client() -> None:
        while time.monotonic() - started < seconds:
            done.append(await ask(port, "flat", 1000))

    before = cpu_seconds()
    await asyncio.gather(*(client() for _ in range(streams)))
    took, tokens = time.monotonic() - started, sum(stream.tokens for stream in done)
    print(f"flat out, {streams} streams: {tokens / took:,.0f} tokens/s")
    report(before, tokens)


async def paced(port: int, streams: int, seconds: float, what: str = "paced") -> None:
    before = cpu_seconds()
    done = await asyncio.gather(*(ask(port, "paced", int(20 * seconds)) for _ in range(streams)))
    tokens = sum(stream.tokens for stream in done)
    print(f"{what}, {streams} streams of 20 tokens/s:")
    report(before, tokens)
    gaps = sorted(b - a for stream in done for a, b in zip(stream.times, stream.times[1:], strict=False))
    print(
        f"  between tokens: median {gaps[len(gaps) // 2] * 1e3:.1f} ms, 99 % {gaps[len(gaps) * 99 // 100] * 1e3:.1f} ms"
    )


def beside(port: int, streams: int, seconds: float) -> None:
    """The clients are processes of their own, which take no time from the one that measures."""
    messages = [{"role": ("user", "assistant")[n % 2], "content": f"{n} words " * 45} for n in range(4_001)]
    body = json.dumps({"model": "flat", "messages": messages, "max_tokens": 1})
    code = f"""
import sys, httpx
body = sys.stdin.read()
print("ready", flush=True)
while True:
    reply = httpx.post("http://127.0.0.1:{port}/v1/chat/completions", content=body, timeout=600, headers={{
        "authorization": "Bearer {KEY}", "content-type": "application/json"}})
    print(reply.status_code, reply.text[:200], flush=True)
"""
    with tempfile.TemporaryFile("w+") as log:
        clients = []
        for _ in range(2):
            client = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=log, text=True)
            assert client.stdin is not None
            client.stdin.write(body)
            client.stdin.close()
            clients.append(client)
        try:
            asyncio.run(paced(port, streams, seconds, f"beside chats of {len(body) / 1e6:.1f} MB"))
        finally:
            for client in clients:
                client.kill()
                client.wait()
        log.seek(0)
        replies = [line for line in log if not line.startswith("ready")]
    print(f"  {len(replies)} large requests were answered, the first with {replies[0].strip() if replies else '-'}")


def report(before: dict[str, float], tokens: int) -> None:
    used = {name: (after - before[name]) / tokens * 1e6 for name, after in cpu_seconds().items()}
    for name in OURS:
        if used[name] > 1:
            print(f"  {name:30} {used[name]:7.0f} µs CPU per token")
    print(f"  {'together':30} {sum(used[name] for name in OURS):7.0f} µs CPU per token")
    print(f"  {'(the rest of Ray)':30} {used[REST]:7.0f}")


async def first_token(port: int) -> None:
    times = []
    for _ in range(100):
        stream = await ask(port, "flat", 1)
        times.append(stream.times[0] - stream.asked_at)
    times.sort()
    print(f"first token, one at a time: median {statistics.median(times) * 1e3:.1f} ms, 90 % {times[90] * 1e3:.1f} ms")


def configuration(folder: str) -> dict[str, object]:
    """config.yaml with other models."""
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    api, model, *_ = config["applications"]
    api["deployments"][0]["user_config"] = {
        "models": [{"id": name, "app": name, "source": folder} for name in ("flat", "paced")],
        "keys": [{"name": "bench", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}],
    }
    fake = {"vocab_size": 512, "reply_tokens": None}
    usual = {"source": folder, "engine": "fake", "cpus_per_replica": 0.1, "max_running": 256}
    models = [
        {**model, "name": name, "args": {**usual, "id": name, "fake": {**fake, "step_s": step_s}}}
        for name, step_s in (("flat", 0.0), ("paced", 0.05))
    ]
    return {**config, "applications": [api, *models]}


@contextlib.contextmanager
def service() -> Iterator[int]:
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        model = str(save_model_folder(Path(folder) / "model"))
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(configuration(model)))
        command = [sys.executable, "-m", "serve_app", "up", "--config", str(path), "--port", str(port)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if "is ready" in line:
                    break
            yield port
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    with service() as port:
        asyncio.run(first_token(port))
        asyncio.run(paced(port, options.streams, options.seconds))
        beside(port, options.streams, options.seconds)
        asyncio.run(flat_out(port, options.streams, options.seconds))


if __name__ == "__main__":
    main()
