"""A bounded folder of local copies of remote and archived checkpoints, keyed by content.

- `content/<digest>/`: adapter_config.json and adapter_model.safetensors; always complete.
- the notes (`notes.py`): among them, which files of entries were hashed.
- `work/<random>/`: a download in progress; never read, removed when its process is gone.
- `pins/<name>`: locked by each process whose requests use the entry or that downloads into the folder (`pins.py`).
- `lock`: held by a process while it adds or removes entries.

The least recently used entries are removed first; a pinned entry stays. An entry is written under another name,
flushed, and renamed; one that is there already and not damaged stays as it is, for its readers. Before its first use in
a process, an entry is hashed, unless its files are as they were when they were hashed last.
"""

import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from engines.lora.format.digest import CONFIG_FILE, WEIGHTS_FILE, combined_digest
from serve_app.checkpoints.content import fingerprint
from serve_app.checkpoints.notes import Notes
from serve_app.checkpoints.pins import Pins

logger = logging.getLogger(__name__)

_TOUCH_S: Final = 1.0


class CacheFull(Exception):
    """The cache has no room for this many bytes now."""


@dataclass(frozen=True, slots=True)
class _Entry:
    path: str
    nbytes: int
    used_at: float


class DiskCache:
    """The cache. Calls block on the disk. Several threads and processes may use one folder. Raises `OSError` when the
    disk fails.
    """

    def __init__(self, directory: str, budget_bytes: int) -> None:
        """Does not touch the disk yet."""
        self.notes = Notes(directory)
        self.evictions = 0
        self._directory = directory
        self._budget_bytes = budget_bytes
        self._pins = Pins(os.path.join(directory, "pins"))
        self._mutex = threading.Lock()
        self._verified: set[str] = set()
        self._reserved: dict[str, int] = {}

    @contextmanager
    def workspace(self, nbytes: int) -> Iterator[str]:
        """An empty folder for files of `nbytes` in total. It is removed afterwards unless published. Raises
        `CacheFull`.
        """
        name = secrets.token_hex(8)
        path = os.path.join(self._directory, "work", name)
        with self._locked():
            self._make_room(nbytes)
            self._pins.pin(name)
            self._reserved[path] = nbytes
        try:
            os.mkdir(path)
            yield path
        finally:
            self._reserved.pop(path, None)
            shutil.rmtree(path, ignore_errors=True)
            self._pins.unpin(name)
            with self._pins.alone(name):  # removes the lock's file
                pass

    def publish(self, path: str, digest: str) -> str:
        """Turn a workspace that holds the checkpoint with this digest into its entry; returns the entry's folder."""
        for name in os.listdir(path):
            if name not in (CONFIG_FILE, WEIGHTS_FILE):
                os.unlink(os.path.join(path, name))
            else:
                _flush(os.path.join(path, name))
        _flush(path)
        entry = self.entry(digest)
        self.use(digest)  # removes a damaged one; whole ones only are published
        with self._locked():
            if not os.path.isdir(entry):
                os.rename(path, entry)
                _flush(os.path.dirname(entry))
            os.utime(entry)
            self._verified.add(digest)
        return entry

    def use(self, digest: str) -> str | None:
        """The entry's folder, marked as used now; None when there is none. A damaged entry is removed and counts as
        none.
        """
        entry = self.entry(digest)
        try:
            if digest in self._verified:
                os.stat(os.path.join(entry, WEIGHTS_FILE))
                if abs(time.time() - os.stat(entry).st_mtime) > _TOUCH_S:
                    os.utime(entry)
                return entry
            os.utime(entry)
            if self._is_whole(entry, digest):
                self._verified.add(digest)
                return entry
        except FileNotFoundError:
            if not os.path.isdir(entry):
                self._verified.discard(digest)
                return None
        with self._locked():
            if self._is_whole(entry, digest):  # another process has replaced it since
                return entry
            logger.error("Removing a damaged checkpoint from the cache: %s", digest)
            self._remove(entry)
        return None

    def pin(self, digest: str) -> bool:
        """Keep the entry until it is unpinned; False when there is none, and nothing to unpin."""
        if not os.path.isdir(self.entry(digest)):
            return False
        self._pins.pin(digest)
        if self.use(digest) is None:
            self._pins.unpin(digest)
            return False
        return True

    def unpin(self, digest: str) -> None:
        self._pins.unpin(digest)

    def doubt(self, digest: str) -> None:
        """Hash the entry again before its next use, and drop the notes on its content."""
        self._verified.discard(digest)
        self.notes.forget(digest)

    def holds(self, directory: str) -> bool:
        """Whether this is the folder of an entry."""
        return os.path.dirname(directory) == os.path.join(self._directory, "content")

    def entry(self, digest: str) -> str:
        """The folder of an entry, whether it is there or not."""
        return os.path.join(self._directory, "content", digest)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        for name in ("content", "work"):
            os.makedirs(os.path.join(self._directory, name), exist_ok=True)
        with self._mutex, open(os.path.join(self._directory, "lock"), "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _is_whole(self, entry: str, digest: str) -> bool:
        """Whether the entry holds the content with this digest."""
        name = f"entry {digest}"
        try:
            state = _state(entry)
            if self.notes.get(name, state) is None:
                if _digest_of(entry) != digest:
                    return False
                self.notes.put(name, state, "", digest)
        except FileNotFoundError:
            return False
        return True

    def _make_room(self, nbytes: int) -> None:
        if nbytes > self._budget_bytes:
            raise CacheFull
        self._clear_abandoned()
        entries = sorted(_entries(os.path.join(self._directory, "content")), key=lambda entry: entry.used_at)
        work = list(_entries(os.path.join(self._directory, "work")))
        used = sum(entry.nbytes for entry in entries)
        used += sum(max(one.nbytes, self._reserved.get(one.path, 0)) for one in work)
        for entry in entries:
            if used + nbytes <= self._budget_bytes:
                return
            with self._pins.alone(os.path.basename(entry.path)) as is_unused:
                if is_unused:
                    self._remove(entry.path)
                    self.evictions += 1
                    used -= entry.nbytes
        if used + nbytes > self._budget_bytes:
            raise CacheFull

    def _clear_abandoned(self) -> None:
        """Remove what processes have left that are gone."""
        for one in os.scandir(os.path.join(self._directory, "work")):
            with self._pins.alone(one.name) as is_abandoned:
                if is_abandoned:
                    shutil.rmtree(one.path, ignore_errors=True)

    def _remove(self, entry: str) -> None:
        """Rename the entry first, so that no reader finds a part of it."""
        self._verified.discard(os.path.basename(entry))
        grave = os.path.join(self._directory, "work", secrets.token_hex(8))
        with suppress(FileNotFoundError):
            os.rename(entry, grave)
            shutil.rmtree(grave, ignore_errors=True)


def _entries(directory: str) -> Iterator[_Entry]:
    with os.scandir(directory) as found:
        for item in found:
            with suppress(FileNotFoundError, NotADirectoryError):
                nbytes = sum(file.stat(follow_symlinks=False).st_size for file in os.scandir(item.path))
                yield _Entry(item.path, nbytes, item.stat(follow_symlinks=False).st_mtime)


def _state(entry: str) -> str:
    return json.dumps([fingerprint(os.stat(os.path.join(entry, name)))[1:] for name in (CONFIG_FILE, WEIGHTS_FILE)])


def _digest_of(entry: str) -> str:
    hashes = []
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with open(os.path.join(entry, name), "rb") as file:
            hashes.append(hashlib.file_digest(file, "sha256").digest())
    return combined_digest(*hashes)


def _flush(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
