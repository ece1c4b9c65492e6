"""Checkpoints on disk for tests: small files of the right form, without torch."""

import asyncio
import gc
import io
import json
import struct
import tarfile
import threading
import time
import traceback
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from engines.lora.format.digest import CONFIG_FILE, WEIGHTS_FILE, adapter_digest
from serve_app.base.errors import CheckpointError
from serve_app.base.model_id import CheckpointPath
from serve_app.checkpoints import Checkpoint, CheckpointStore

PATH = CheckpointPath("run-1:train:0", "000080")
BASE = "Qwen/Qwen3-8B"
Result = TypeVar("Result")


def config(**fields: object) -> bytes:
    return json.dumps({"peft_type": "LORA", "r": 4, "base_model_name_or_path": BASE, **fields}).encode() + b"\n"


def weights(fill: int = 1, count: int = 300) -> bytes:
    header = json.dumps({"a": {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}}).encode()
    header = header.ljust(-(-len(header) // 8) * 8)
    return struct.pack("<Q", len(header)) + header + bytes([fill]) * count


def files(fill: int = 1, metadata: Mapping[str, object] | None = None) -> dict[str, bytes]:
    about = {} if metadata is None else {"checkpoint.json": json.dumps(metadata).encode()}
    return {**about, CONFIG_FILE: config(), WEIGHTS_FILE: weights(fill)}


SIZE = sum(map(len, files().values()))
"""Bytes of the two files of an adapter."""


def digest(contents: Mapping[str, bytes]) -> str:
    return adapter_digest(contents[CONFIG_FILE], contents[WEIGHTS_FILE])


def folder(root: Path, path: CheckpointPath = PATH) -> Path:
    return root / path.run / "sampler_weights" / path.name


def write(root: Path, contents: Mapping[str, bytes], path: CheckpointPath = PATH) -> Path:
    target = folder(root, path)
    target.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (target / name).write_bytes(content)
    return target


def tar_bytes(contents: Mapping[str, bytes], prefix: str = "", form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(prefix + name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def write_tar(root: Path, content: bytes, path: CheckpointPath = PATH) -> Path:
    target = folder(root, path)
    target = target.with_name(target.name + ".tar")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    return target


def later(seconds: float = 60.0) -> Callable[[], float]:
    """A clock by which everything was written long ago."""
    return lambda: time.time() + seconds


@contextmanager
def opened_store(*roots: Path | str, cache: Path, **options: object) -> Iterator[CheckpointStore]:
    store = CheckpointStore([str(root) for root in roots], cache_directory=str(cache), **options)  # type: ignore[arg-type]
    try:
        yield store
    finally:
        store.close()


def run(call: Callable[[], Awaitable[Result]]) -> Result:
    async def main() -> Result:
        return await call()

    return asyncio.run(main())


def assert_never_raised_twice(store: CheckpointStore, kind: type[CheckpointError]) -> None:
    """Each request for the path gets an error of its own, with no more frames than the one before, and the locals of
    one that was answered are let go.
    """

    class Body:
        """What a request brings along."""

    async def ask(body: Body) -> CheckpointError:
        try:
            await store.resolve(PATH)
        except kind as exc:
            return exc
        raise AssertionError("it was served")

    gone, errors, watched = threading.Semaphore(0), list[CheckpointError](), list[weakref.ref[Body]]()
    for _ in range(3):
        body = Body()
        watched.append(weakref.ref(body, lambda _: gone.release()))
        errors.append(run(lambda body=body: ask(body)))
        del body
    assert len({id(error) for error in errors}) == 3
    assert len({str(error) for error in errors}) == 1
    frames = [len(traceback.extract_tb(error.__traceback__)) for error in errors]
    assert frames[1] == frames[2]
    errors.clear()
    for _ in watched:
        assert any(
            gone.acquire(timeout=0.05) for _ in range(100) if gc.collect() >= 0
        )  # a thread may still look at one


def resolve(root: Path | str, path: CheckpointPath = PATH, **options: object) -> Checkpoint:
    """In a fresh store over one root, with its cache beside it."""
    cache = options.pop("cache", None) or Path(str(root) + "-cache")
    with opened_store(root, cache=Path(str(cache)), **options) as store:
        return run(lambda: store.resolve(path))
