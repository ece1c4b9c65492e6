"""What one token costs at the edge: validate, detokenise, build the event, send it.

    python tests/bench/edge.py [--streams 32] [--tokens 400] [--chat] [--loop uvloop] [--profile OUT]

The service runs over the deterministic engine in one process, on a real port; a second process reads raw sockets. The
figure is the CPU time of the serving process per token, engine included; the engine's own share is measured alone and
shown beside it. Prints one JSON line.
"""

import argparse
import asyncio
import cProfile
import hashlib
import itertools
import json
import multiprocessing
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import uvicorn

from engines.fake import FakeConfig, FakeEngine, Script
from engines.interface.protocol import GenerateRequest, Output, SamplingParams
from serve_app.http.app import build_http_app
from serve_app.http.service import Service
from serve_app.replicas.in_process import LocalReplicas
from tests.support.files.tiny_tokenizer import make_tokenizer, save_model_folder

KEY = "bench"


class NoCheckpoints:
    async def resolve_for(self, path: object, caller: str | None, who: str) -> object:
        raise LookupError(path)

    def close(self) -> None:
        pass


def request_bytes(arguments: argparse.Namespace) -> bytes:
    body: dict[str, object] = {"model": "m", "stream": True, "max_tokens": arguments.tokens, "temperature": 0}
    if arguments.chat:
        body["messages"] = [{"role": "user", "content": "Tell me something."}]
    else:
        body["prompt"] = "Tell me something."
    content = json.dumps(body).encode()
    path = "/v1/chat/completions" if arguments.chat else "/v1/completions"
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\n"
    return head.encode() + f"content-length: {len(content)}\r\nconnection: close\r\n\r\n".encode() + content


async def read_stream(port: int, request: bytes) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    received = 0
    last = b""
    while chunk := await reader.read(1 << 20):
        received += chunk.count(b"data: ")
        last = (last + chunk)[-1000:]
    writer.close()
    if b"data: [DONE]" not in last:
        raise SystemExit(f"A stream was cut: {last!r}")
    return received


def client(port: int, request: bytes, streams: int, result: "multiprocessing.Queue[tuple[float, int]]") -> None:
    async def run() -> tuple[float, int]:
        await read_stream(port, request)  # warm
        started = time.perf_counter()
        events = await asyncio.gather(*(read_stream(port, request) for _ in range(streams)))
        return time.perf_counter() - started, sum(events)

    result.put(asyncio.run(run()))


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def engine_alone(config: FakeConfig, script: Script, streams: int, tokens: int) -> float:
    """CPU seconds per token of the engine and a sink that drops everything."""
    engine = FakeEngine(config, script)
    await engine.start()
    finished = asyncio.Event()
    left = streams

    class Sink:
        def deliver(self, outputs: list[Output]) -> None:
            nonlocal left
            left -= sum(1 for output in outputs if getattr(output.event, "finish_reason", None) is not None)
            if not left:
                finished.set()

    sink = Sink()
    started = cpu_s()
    for index in range(streams):
        sampling = SamplingParams(max_tokens=tokens, seed=0, temperature=0)
        engine.submit(GenerateRequest(str(index), (1, 2, 3), sampling), sink)
    await finished.wait()
    used = cpu_s() - started
    await engine.close()
    return used / (streams * tokens)


async def measure(arguments: argparse.Namespace) -> dict[str, float]:
    config = FakeConfig(vocab_size=512, context_length=1 << 20, step_s=arguments.step_s)
    folder = save_model_folder(Path(tempfile.mkdtemp()), context_length=1 << 20)
    words = make_tokenizer().encode("The capital of France is Paris. It is also the largest city. 日本 😀 ")

    def script(request: GenerateRequest) -> Iterator[int]:
        return itertools.cycle(words)

    alone = await engine_alone(config, script, arguments.streams, arguments.tokens)
    engine = FakeEngine(config, script)
    await engine.start()
    service = Service(LocalReplicas({"app": engine}), lambda _: NoCheckpoints())  # type: ignore[arg-type,return-value]
    key = {"name": "bench", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}
    model = {"id": "m", "app": "app", "source": str(folder), "renderer": "qwen3"}
    await service.reconfigure({"models": [model], "keys": [key]})
    assert service.config_error is None, service.config_error
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(build_http_app(service), log_config=None, lifespan="off", access_log=False))
    serving = asyncio.create_task(server.serve([listening]))
    result: multiprocessing.Queue[tuple[float, int]] = multiprocessing.get_context("spawn").Queue()
    port = listening.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(
        target=client, args=(port, request_bytes(arguments), arguments.streams, result)
    )
    process.start()
    profile = cProfile.Profile()
    before = cpu_s()
    if arguments.profile:
        profile.enable()
    wall_s, events = await asyncio.to_thread(result.get)
    if arguments.profile:
        profile.disable()
        profile.dump_stats(arguments.profile)
    used = cpu_s() - before
    process.join()
    server.should_exit = True
    await serving
    await engine.close()
    await service.close()
    tokens = arguments.streams * arguments.tokens
    per_token_us = 1e6 * used / (tokens + arguments.tokens)
    return {
        "tokens_per_s": round(tokens / wall_s),
        "events": events,
        "cpu_us_per_token": round(per_token_us, 1),
        "engine_us_per_token": round(1e6 * alone, 1),
        "edge_us_per_token": round(per_token_us - 1e6 * alone, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--loop", choices=["asyncio", "uvloop"], default="asyncio")
    parser.add_argument("--profile")
    arguments = parser.parse_args()
    if arguments.loop == "uvloop":
        import uvloop

        found = uvloop.run(measure(arguments))
    else:
        found = asyncio.run(measure(arguments))
    print(json.dumps({"chat": arguments.chat, "loop": arguments.loop, **found}))


if __name__ == "__main__":
    main()
