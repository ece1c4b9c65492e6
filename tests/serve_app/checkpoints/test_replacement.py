"""Checkpoints that are rewritten while many streams sample them, over the real engine: no answer mixes two contents."""

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from engines.interface.protocol import Adapter
from engines.lora.format.digest import CONFIG_FILE, WEIGHTS_FILE
from engines.torch_engine import TorchEngine
from serve_app.base.model_id import CheckpointPath
from serve_app.checkpoints import CheckpointStore
from tests.support.engines.engine_harness import adapter, clear_prompt, engine_config, reference_greedy
from tests.support.files.checkpoint_files import folder
from tests.support.harness import BASE, RunningEdge, config_for, running_edge

pytest_plugins = ("tests.support.edge_fixtures",)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_TOKENS = 10
_SECONDS = 15.0
_EVERY_S = 1.0
_STREAMS = 16


def _contents() -> list[Adapter]:
    return [adapter("llama", "all", seed) for seed in range(6)]


@dataclass
class Rewritten:
    """A path whose content is replaced; `history` holds each digest with the time from which a request may see it."""

    path: CheckpointPath
    root: Path
    is_in_place: bool
    history: list[tuple[float, str]] = field(default_factory=list)

    def put(self, content: Adapter) -> None:
        self.history.append((time.monotonic(), content.digest))
        (self._put_in_place if self.is_in_place else self._put_by_link)(Path(content.directory))

    def between(self, began: float, ended: float) -> set[str]:
        """The contents that a request may have seen: a write takes a moment, in which the one before is there."""
        before = [digest for since, digest in self.history if since <= began]
        return {*before[-2:], *(digest for since, digest in self.history if began <= since <= ended)}

    def _put_in_place(self, source: Path) -> None:
        target = folder(self.root, self.path)
        target.mkdir(parents=True, exist_ok=True)
        names = (CONFIG_FILE, WEIGHTS_FILE)
        hashes = {name: hashlib.sha256((source / name).read_bytes()).hexdigest() for name in names}
        (target / "checkpoint.json").write_text(json.dumps({"base_model": BASE, "sha256": hashes}))
        for name in names:
            (target / name).write_bytes((source / name).read_bytes())

    def _put_by_link(self, source: Path) -> None:
        """Another folder under the same name, from one moment to the next."""
        target, version = folder(self.root, self.path), self.root / "versions" / str(len(self.history))
        shutil.copytree(source, version)
        (version / "checkpoint.json").write_text(json.dumps({"base_model": BASE}))
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name("next")
        temporary.symlink_to(version)
        os.replace(temporary, target)


@contextmanager
def _rewriting(checkpoints: list[Rewritten], contents: list[Adapter]) -> Iterator[None]:
    stop = threading.Event()

    def rewrite() -> None:
        turn = 1
        while not stop.wait(_EVERY_S):
            for checkpoint in checkpoints:
                checkpoint.put(contents[turn % len(contents)])
            turn += 1

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        yield
    finally:
        stop.set()
        writer.join()


def _sample(edge: RunningEdge, checkpoints: list[Rewritten], prompt: tuple[int, ...], first: int) -> tuple[int, int]:
    """Sample one after another until the time is over: how many were answered, and how many were incomplete."""
    until, answered, incomplete, turn = time.monotonic() + _SECONDS, 0, 0, first
    oracles = {content.digest: reference_greedy("llama", content, prompt, _TOKENS)[0] for content in _contents()}
    while time.monotonic() < until:
        turn += 1
        checkpoint, began = checkpoints[turn % len(checkpoints)], time.monotonic()
        fields = {"temperature": 0, "max_tokens": _TOKENS, "return_token_ids": True, "stream": True}
        response = edge.complete(list(prompt), model=str(checkpoint.path), **fields)
        if response.status_code == 404 and response.json()["error"]["code"] == "checkpoint_incomplete":
            incomplete += 1
            continue
        assert response.status_code == 200, response.text
        choices = [choice for event in edge.events(response)[:-1] for choice in event["choices"]]
        tokens = tuple(token for choice in choices for token in choice.get("token_ids") or ())
        digest = response.headers["x-checkpoint-digest"]
        assert digest in checkpoint.between(began, time.monotonic())
        assert tokens == oracles[digest]
        answered += 1
    return answered, incomplete


def test_every_answer_is_that_of_one_content_that_was_there(model_folders: dict[str, str], tmp_path: Path) -> None:
    *changing, third, fourth = _contents()
    prompt = clear_prompt("llama", 40, _TOKENS, bounds=tuple(_contents()))
    rewritten = [
        Rewritten(CheckpointPath("r", "linked"), tmp_path / "root", is_in_place=False),
        Rewritten(CheckpointPath("r", "in-place"), tmp_path / "root", is_in_place=True),
    ]
    still = [Rewritten(CheckpointPath("r", name), tmp_path / "root", is_in_place=True) for name in ("third", "fourth")]
    for checkpoint, content in zip([*rewritten, *still], [changing[0], changing[0], third, fourth], strict=True):
        checkpoint.put(content)
    config = config_for(model_folders) | {"checkpoints": {"roots": [str(tmp_path / "root")]}}
    engine = partial(TorchEngine, engine_config("llama", max_adapters=3))
    opened = partial(CheckpointStore, [str(tmp_path / "root")], cache_directory=str(tmp_path / "c"))
    with running_edge(config, engine, open_checkpoints=lambda _: opened()) as edge:
        with _rewriting(rewritten, changing), ThreadPoolExecutor(_STREAMS) as streams:
            calls = [streams.submit(_sample, edge, [*rewritten, *still], prompt, i) for i in range(_STREAMS)]
            counts = [call.result() for call in calls]
        assert sum(answered for answered, _ in counts) > _STREAMS
        assert edge.engine.stats().counters.adapter_loads > len(changing)
