"""An OpenAI-compatible upstream that costs next to nothing, for `marketplace.py`: streams of texts made beforehand.

    python tests/bench/fast_upstream.py --port 9100

The base URL says how fast: `http://127.0.0.1:9100/every/0.05/v1` sends a token each 50 ms, `/steps/0.05/v1` does so for
all streams at the same moments, as an engine does, and `/every/0/v1` sends 16 in a piece and waits only for its client.
A request for `n` tokens (`max_tokens`) gets exactly `n`, each in an event of its
own, then one with the reason for the end, one with usage if asked for, and `[DONE]`.
"""

import argparse
import asyncio
import contextlib
import json
import time

HEAD_END = b"\r\n\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
TOKENS_IN_A_PIECE = 16
# Not the same again and again: LiteLLM ends a stream after 100 equal texts.
TEXTS = [f" tok{number}" for number in range(TOKENS_IN_A_PIECE)]


class Connection(asyncio.Protocol):
    """One connection, its requests one after the other."""

    def __init__(self) -> None:
        self._buffer = b""
        self._reply: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._reply is not None:
            self._reply.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(HEAD_END)
        if not found:
            return
        lines = head.decode("latin-1").lower().split("\r\n")
        length = next((int(line[15:]) for line in lines if line.startswith("content-length:")), 0)
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        path = lines[0].split(" ")[1]
        if path.endswith("/completions"):
            self._reply = asyncio.ensure_future(self._stream(path, json.loads(rest[:length])))
        else:
            self._transport.write(NOT_FOUND)

    async def _stream(self, path: str, body: dict[str, object]) -> None:
        _, how, every_s, *_ = path.split("/")
        step_s, tokens = float(every_s), int(str(body["max_tokens"]))
        now = time.monotonic()
        events, end = _events(is_chat="/chat/" in path, body=body, tokens=tokens)
        if step_s:
            await self._paced(events, tokens, step_s, now if how == "every" else now // step_s * step_s)
        else:
            await self._flat_out(events, tokens)
        self._transport.write(end)

    async def _paced(self, events: list[bytes], tokens: int, step_s: float, due: float) -> None:
        self._transport.write(STREAM_HEAD + events[0])
        for number in range(1, tokens):
            due += step_s
            await asyncio.sleep(due - time.monotonic())
            self._transport.write(events[number % TOKENS_IN_A_PIECE])

    async def _flat_out(self, events: list[bytes], tokens: int) -> None:
        pieces, rest = divmod(tokens, TOKENS_IN_A_PIECE)
        self._transport.write(STREAM_HEAD + b"".join(events[:rest]))
        piece = b"".join(events)
        for _ in range(pieces):
            self._transport.write(piece)
            await asyncio.sleep(0)  # the other streams' turn
            await self._writable.wait()


def _events(*, is_chat: bool, body: dict[str, object], tokens: int) -> tuple[list[bytes], bytes]:
    """The HTTP chunk of each text, and all that follows the last one."""
    shared = {"object": "chat.completion.chunk" if is_chat else "text_completion", "created": 1767225600}
    named = {"id": "cmpl-123", **shared, "model": body["model"]}

    def chunk(event: object) -> bytes:
        text = event if isinstance(event, str) else json.dumps(event, separators=(",", ":"))
        content = b"data: %b\n\n" % text.encode()
        return b"%x\r\n%b\r\n" % (len(content), content)

    def choice(text: str, reason: str | None) -> dict[str, object]:
        said = {"delta": {"content": text}} if is_chat else {"text": text}
        return {**named, "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": reason}]}

    counts = {"prompt_tokens": 8, "completion_tokens": tokens, "total_tokens": 8 + tokens}
    asked = (body.get("stream_options") or {}) == {"include_usage": True}
    usage = chunk({**named, "choices": [], "usage": counts}) if asked else b""
    end = chunk(choice("", "length")) + usage + chunk("[DONE]") + b"0\r\n\r\n"
    return [chunk(choice(text, None)) for text in TEXTS], end


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", port, backlog=1024)
    print(f"listening on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="0: the system chooses")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
