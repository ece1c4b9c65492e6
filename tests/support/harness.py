"""The whole service over deterministic engines, on a real loopback port, in this process and without Ray.

The fixture `edge` (`edge_fixtures.py`) is one running service with the models below; tests say what its engine replies.
The client is the OpenAI SDK, `httpx`, or a raw socket.
"""

import asyncio
import hashlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import httpx
import openai
import uvicorn

from engines.fake import FakeConfig, FakeEngine
from engines.interface.errors import AdapterChanged, EngineError
from engines.interface.protocol import Adapter, Engine, GenerateRequest
from serve_app.access.sharing.shared_limits import Exchange
from serve_app.api.record import RequestRecord
from serve_app.base.errors import CheckpointNotFound, InvalidRequest
from serve_app.base.model_id import CheckpointPath, parse_checkpoint_path
from serve_app.catalog.catalog import Checkpoints, ResolvedCheckpoint
from serve_app.catalog.loading import Load
from serve_app.catalog.served_model import load_model
from serve_app.checkpoints.checkpoint import is_open_to
from serve_app.checkpoints.listing import ListedCheckpoint
from serve_app.checkpoints.pages import Listing
from serve_app.config.checking.refusal import Refusal
from serve_app.config.service import CheckpointsConfig, ImagesConfig
from serve_app.http.app import build_http_app
from serve_app.http.service import Service
from serve_app.images.preprocessor import Preprocessor
from serve_app.replicas.in_process import LocalReplicas
from serve_app.replicas.token_gaps import TokenGaps
from tests.support.files.tiny_tokenizer import make_tokenizer

CHAT = "tiny/Chat"
PLAIN = "tiny/Plain"  # a chat template, but a renderer that parses nothing
BASE = "tiny/Base"  # no chat template
KEY = "rh-test-key"
OTHER_KEY = "rh-other-key"
CONTEXT = 4096
KEEP_ALIVE_S = 0.15
NEXT_PAGE = "the-rest"
HERE = "/nowhere"

T = TypeVar("T")


@dataclass(frozen=True)
class StoredCheckpoint:
    """What a checkpoint store returns, without files."""

    digest: str
    directory: str = HERE
    base_model: str | None = CHAT
    owner: str | None = None
    public: bool = False
    chat_template: str | None = None
    problem: str | None = None


@dataclass
class MemoryCheckpoints:
    """Checkpoints by path; an exception in place of one is raised. `kept`: the digests that requests use; `removed`:
    those that are gone when a request begins to use them, once each.
    """

    held: dict[str, StoredCheckpoint | Exception] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    asked_after: list[str | None] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def resolve_for(self, path: CheckpointPath, caller: str | None, who: str) -> ResolvedCheckpoint:
        denied = CheckpointNotFound(f"The model {str(path)!r} does not exist, or this key may not use it.")
        found = self.held.get(str(path), denied)
        if isinstance(found, Exception):
            raise found
        if not is_open_to(found.owner, public=found.public, caller=caller):
            raise denied
        return found

    @asynccontextmanager
    async def keep(self, adapter: Adapter) -> AsyncIterator[None]:
        if adapter.digest in self.removed:
            self.removed.remove(adapter.digest)
            raise AdapterChanged("removed from the cache")
        self.kept.append(adapter.digest)
        try:
            yield
        finally:
            self.kept.remove(adapter.digest)

    async def list(self, owner: str | None, after: str | None = None) -> Listing:
        self.asked_after.append(after)
        if after not in (None, NEXT_PAGE):
            raise InvalidRequest(f"after must be the 'next' of an earlier page, got {after!r}.", "after")
        mine = tuple(
            ListedCheckpoint(
                parse_checkpoint_path(path),
                1_750_000_000.5,
                found.base_model,
                found.problem,
                digest=found.digest,
                is_here=found.directory == HERE,
            )
            for path, found in self.held.items()
            if isinstance(found, StoredCheckpoint) and is_open_to(found.owner, public=found.public, caller=owner)
        )
        return Listing(mine, len(mine) < 3, NEXT_PAGE if after is None and len(mine) > 3 else None)

    def close(self) -> None:
        self.closed.set()


@dataclass
class ListRecorder:
    """Keeps everything."""

    ended: list[RequestRecord] = field(default_factory=list)
    started: int = 0
    running: int = 0
    config_errors: list[list[str]] = field(default_factory=list)
    gaps: dict[str, TokenGaps] = field(default_factory=dict)

    def request_started(self, record: RequestRecord) -> None:
        self.started += 1
        self.running += 1

    def request_ended(self, record: RequestRecord) -> None:
        self.ended.append(record)
        self.running -= 1

    def gaps_of(self, model: str) -> TokenGaps:
        return self.gaps.setdefault(model, TokenGaps())

    def config_checked(self, refusals: Sequence[Refusal]) -> None:
        self.config_errors.append([refusal.sentence for refusal in refusals])


class Script:
    """What the engine replies to every request, until told otherwise."""

    def __init__(self) -> None:
        self.tokenizer = make_tokenizer()
        self.reply: Callable[[GenerateRequest], Iterable[int | EngineError] | None] = lambda request: None
        self.requests: list[GenerateRequest] = []

    @property
    def end(self) -> int:
        """The token that ends a turn."""
        return int(self.tokenizer.convert_tokens_to_ids("<|im_end|>"))

    def __call__(self, request: GenerateRequest) -> Iterable[int | EngineError] | None:
        self.requests.append(request)
        return self.reply(request)

    def says(self, *items: str | int | EngineError) -> None:
        """Text is tokenised, markers included; token ids and errors stand for themselves. Then the turn ends."""
        tokens = [token for item in items for token in (self.encode(item) if isinstance(item, str) else [item])]
        tokens.append(self.end)
        self.reply = lambda request: tokens

    def says_and_hangs(self, text: str, engine: FakeEngine) -> None:
        """The engine stops stepping with the last token of the text."""

        def tokens() -> Iterator[int]:
            *first, last = self.encode(text)
            yield from first
            engine.pause()
            yield last

        self.reply = lambda request: tokens()

    def makes_something_up(self) -> None:
        self.reply = lambda request: None

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


@dataclass
class RunningEdge:
    """A service on a port. Everything but `run` may be used from the test's thread."""

    port: int
    loop: asyncio.AbstractEventLoop
    service: Service
    engine: FakeEngine
    replicas: LocalReplicas
    script: Script
    checkpoints: MemoryCheckpoints
    recorder: ListRecorder
    config: dict[str, Any]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def run(self, work: Awaitable[T]) -> T:
        """Await something on the service's event loop."""

        async def waited() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(waited(), self.loop).result(30)

    def sdk(self, key: str = KEY, **options: Any) -> openai.OpenAI:
        # Without TLS: loading the certificates would take longer than most tests.
        http_client = openai.DefaultHttpxClient(verify=False)
        return openai.OpenAI(
            base_url=self.url, api_key=key, http_client=http_client, **{"max_retries": 0, "timeout": 30, **options}
        )

    def async_sdk(self, key: str = KEY) -> openai.AsyncOpenAI:
        http_client = openai.DefaultAsyncHttpxClient(verify=False)
        return openai.AsyncOpenAI(base_url=self.url, api_key=key, http_client=http_client, max_retries=0, timeout=30)

    def http(self, key: str | None = KEY) -> httpx.Client:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=30, verify=False)

    def post(self, path: str, key: str | None = KEY, **body: Any) -> httpx.Response:
        with self.http(key) as client:
            return client.post(path, json=body)

    def chat(self, content: str = "hi", **fields: Any) -> httpx.Response:
        body = {"model": CHAT, "messages": [{"role": "user", "content": content}], **fields}
        return self.post("/chat/completions", **body)

    def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        return self.post("/completions", **{"model": BASE, "prompt": prompt, **fields})

    def events(self, response: httpx.Response) -> list[Any]:
        """The events of a stream that was read to its end; `[DONE]` as that string."""
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8", response.text
        lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    def raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    @contextmanager
    def in_first_state(self) -> Iterator[Self]:
        """As it was started, for one test; what the test leaves behind is its failure."""
        self.script.makes_something_up()
        self.script.requests.clear()
        self.checkpoints.held.clear()
        self.checkpoints.asked_after.clear()
        self.recorder.ended.clear()
        yield self
        self.engine.resume()
        self.wait_until_idle()

    def reconfigure(self, **changes: Any) -> None:
        """Take over the configuration with some sections replaced."""
        self.run(self.service.reconfigure({**self.config, **changes}))

    def wait_until_idle(self) -> None:
        """Until nothing of any request is left: neither in the engine nor at the edge."""

        async def idle() -> None:
            async with asyncio.timeout(10):
                while not self._is_idle():  # noqa: ASYNC110 - what it waits for has no event
                    await asyncio.sleep(0.005)

        self.run(idle())

    def _is_idle(self) -> bool:
        stats = self.engine.stats()
        return not (stats.running or stats.waiting or self.replicas.open_streams or self.recorder.running)


def config_for(folders: dict[str, str]) -> dict[str, Any]:
    return {
        "models": [
            {"id": CHAT, "app": "tiny", "source": folders["chat"], "renderer": "qwen3", "variants": {"peft:128": 128}},
            {"id": PLAIN, "app": "tiny", "source": folders["chat"], "renderer": "generic"},
            {"id": BASE, "app": "tiny", "source": folders["base"]},
        ],
        "keys": [
            {"name": "test", "sha256": hashlib.sha256(KEY.encode()).hexdigest(), "owner": "alice"},
            {"name": "other", "sha256": hashlib.sha256(OTHER_KEY.encode()).hexdigest(), "models": [BASE]},
        ],
    }


@contextmanager
def running_edge(
    config: dict[str, Any],
    engine: FakeConfig | Callable[[], Engine],
    *,
    app: str = "tiny",
    recorder: ListRecorder | None = None,
    open_checkpoints: Callable[[CheckpointsConfig], Checkpoints] | None = None,
    max_requests: int = 4096,
    load: Load = load_model,
    loading_timeout_s: float = 10,
    exchange: Exchange | None = None,
) -> Iterator[RunningEdge]:
    """Start everything on a thread with its own event loop, and end it without leftovers. `engine`: settings of the
    deterministic one, or what makes another, which knows no script. `open_checkpoints` None: those in memory.
    """
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # a client that does not read soon shows
    ready = threading.Event()
    found: dict[str, Any] = {}

    async def main() -> None:
        script, checkpoints, records = Script(), MemoryCheckpoints(), recorder or ListRecorder()
        running = FakeEngine(engine, script) if isinstance(engine, FakeConfig) else engine()
        await running.start()
        replicas = LocalReplicas({app: running})

        def open_memory(_: CheckpointsConfig) -> MemoryCheckpoints:
            return checkpoints

        preparing: list[Preprocessor] = []

        def open_images(_: ImagesConfig) -> Preprocessor:
            preparing.append(Preprocessor(threads=2, cache_bytes=1 << 20))
            return preparing[-1]

        service = Service(
            replicas,
            open_checkpoints or open_memory,
            open_images=open_images,
            recorder=records,
            keep_alive_s=KEEP_ALIVE_S,
            max_requests=max_requests,
            load=load,
            loading_timeout_s=loading_timeout_s,
            exchange=exchange,
        )
        await service.reconfigure(config)
        settings = uvicorn.Config(build_http_app(service), log_config=None, lifespan="off", access_log=False)
        server = uvicorn.Server(settings)
        found["server"] = server
        found["edge"] = RunningEdge(
            listening.getsockname()[1],
            asyncio.get_running_loop(),
            service,
            running,  # type: ignore[arg-type]  # tests of a real engine use none of what only the other one has
            replicas,
            script,
            checkpoints,
            records,
            config,
        )
        ready.set()
        await server.serve([listening])
        await running.close()
        await service.close()
        for preprocessor in preparing:
            preprocessor.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="edge")
    thread.start()
    try:
        assert ready.wait(60), "the service did not start"
        yield found["edge"]
    finally:
        found["server"].should_exit = True
        thread.join(30)
        listening.close()
