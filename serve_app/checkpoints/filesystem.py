"""The part of fsspec that the store uses: the state of files, and a bounded download."""

import logging
import os
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Protocol

from serve_app.base.errors import ConfigRefused
from serve_app.checkpoints.tar import Archive

logger = logging.getLogger(__name__)

# The fields, in fsspec's implementations, that change when a file's content changes.
_VERSIONS: Final = (
    "ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "generation", "blob_id", "LastModified", "last_modified",
    "Last-Modified", "mtime", "updated", "created",
)  # fmt: skip
_CHANGED: Final = ("LastModified", "last_modified", "mtime", "updated", "created")
_MISSING_STATUSES: Final = (403, 404, 410)  # 403: from object stores for a missing file if the client may not list
_MAX_CHILDREN: Final = 100_000
_RANGE_BYTES: Final = 1 << 16


class StoreFailed(Exception):
    """The store did not answer, or its answer was not a file."""


@dataclass(frozen=True, slots=True)
class FileState:
    """A file as the store describes it. `version` None: the description cannot distinguish two contents. `changed_at`:
    in seconds since 1970, 0 when the store gives none.
    """

    name: str
    size: int | None
    version: str | None
    changed_at: float = 0.0


class _Fsspec(Protocol):
    def info(self, path: str) -> Mapping[str, object]: ...
    def ls(self, path: str, *, detail: bool) -> Sequence[Mapping[str, object]]: ...
    def get_file(self, remote: str, local: str, *, callback: object) -> None: ...
    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes: ...
    def invalidate_cache(self, path: str | None = None) -> None: ...


class FileSystem:
    """One root. Calls block on the network. Thread-safe."""

    def __init__(self, url: str) -> None:
        """Opens no connection yet. Raises `ConfigRefused` when the kind of store is unknown or its package is not
        installed.
        """
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        try:
            files, base = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as exc:
            raise ConfigRefused(f"The root {url!r} needs a package that is not installed: {exc}.") from exc
        except ValueError as exc:
            raise ConfigRefused(f"The root {url!r} cannot be used: {exc}.") from exc
        self._files: _Fsspec = files
        self._base = str(base).rstrip("/")
        self._can_list = not url.startswith(("http://", "https://"))

    def states(self, folder: Sequence[str], names: Iterable[str]) -> tuple[FileState, ...]:
        """The states of the files that exist. Raises `StoreFailed`."""
        path = self._path(folder)
        with _asking(path):
            if self._can_list:
                self._files.invalidate_cache(path)
                items = {posixpath.basename(str(item["name"]).rstrip("/")): item for item in self._list(path)}
                return tuple(_state(name, items[name]) for name in names if name in items)
            found = ((name, self._info(f"{path}/{name}")) for name in names)
            return tuple(_state(name, info) for name, info in found if info is not None)

    def fetch(self, folder: Sequence[str], state: FileState, target: str, max_bytes: int) -> None:
        """Download into a new local file, at most `max_bytes`. Raises `FileNotFoundError` or `StoreFailed`."""
        from fsspec.callbacks import Callback  # type: ignore[import-untyped]

        limit = max_bytes if state.size is None else state.size

        def stop_at_limit(size: int | None, value: int, **_: object) -> None:
            if value > limit:
                raise StoreFailed(f"{state.name} is longer than the store said")

        path = f"{self._path(folder)}/{state.name}"
        with _asking(path):
            self._files.get_file(path, target, callback=Callback(hooks={"limit": stop_at_limit}))
            if state.size is not None and os.path.getsize(target) != state.size:
                raise StoreFailed(f"{state.name} is shorter than the store said")

    def text(self, folder: Sequence[str], state: FileState, max_bytes: int) -> bytes | None:
        """The content of a small file; None when it no longer exists or is too large. Raises `StoreFailed`."""
        path = f"{self._path(folder)}/{state.name}"
        if state.size is None or state.size > max_bytes:
            return None
        with _asking(path):
            try:
                return self._files.cat_file(path)
            except FileNotFoundError:
                return None

    def archive(self, folder: Sequence[str], state: FileState) -> Archive:
        """A tar file, of which only what is read is downloaded. Its reads raise `StoreFailed`."""
        path = f"{self._path(folder)}/{state.name}"
        size, held = state.size or 0, (0, b"")

        def read(count: int, offset: int) -> bytes:
            nonlocal held
            start, content = held
            if not start <= offset <= offset + count <= start + len(content):
                end = min(size, offset + max(count, _RANGE_BYTES))
                with _asking(path):
                    start, content = held = offset, self._files.cat_file(path, offset, end) if end > offset else b""
            return content[offset - start : offset - start + count]

        return Archive(size, read)

    def children(self, folder: Sequence[str]) -> list[FileState]:
        """What is in a folder, at most 100,000; empty where the store cannot list. Raises `StoreFailed`."""
        if not self._can_list:
            return []
        path = self._path(folder)
        with _asking(path):
            items = self._list(path)[:_MAX_CHILDREN]
            return [_state(posixpath.basename(str(item["name"]).rstrip("/")), item) for item in items]

    def _path(self, folder: Sequence[str]) -> str:
        return "/".join((self._base, *folder))

    def _list(self, path: str) -> Sequence[Mapping[str, object]]:
        try:
            return self._files.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _info(self, url: str) -> Mapping[str, object] | None:
        try:
            return self._files.info(url)
        except FileNotFoundError as exc:
            # fsspec raises this for every failure; the server's answer is in the cause.
            cause = exc.__cause__
            if cause is not None and getattr(cause, "status", None) not in _MISSING_STATUSES:
                raise StoreFailed(f"{type(cause).__name__}") from exc
            return None


def _state(name: str, info: Mapping[str, object]) -> FileState:
    size = info.get("size")
    versions = [f"{key}={info[key]}" for key in _VERSIONS if info.get(key) is not None]
    return FileState(name, size if isinstance(size, int) else None, "; ".join(versions) or None, _changed_at(info))


def _changed_at(info: Mapping[str, object]) -> float:
    for key in _CHANGED:
        value = info.get(key)
        if isinstance(value, str):
            with suppress(ValueError):
                value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return 0.0


@contextmanager
def _asking(path: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, StoreFailed):
        raise
    except Exception as exc:  # every store raises exceptions of its own
        logger.warning("A checkpoint store failed at %s: %r", path, exc)
        raise StoreFailed(f"{type(exc).__name__}") from exc
