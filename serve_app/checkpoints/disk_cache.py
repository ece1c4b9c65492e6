"""A bounded folder of local copies of remote and archived checkpoints, keyed by content.

- `content/<digest>/`: adapter_config.json and adapter_model.safetensors; always complete.
- `names/<hash>.json`: the content of a remote path at its last download, so that a restart downloads nothing again.
- `work/<random>/`: a download in progress; never read, removed when it is old.
- `pins/<digest>`: locked by each process whose requests use the entry (`pins.py`).
- `lock`: held by a process while it adds or removes entries.

The least recently used entries are removed first; a pinned entry stays. An entry is written under another name,
flushed, and renamed; one that is there already and not damaged stays as it is, for its readers. A process hashes each
entry before its first use.
"""

import fcntl
import hashlib
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
from serve_app.checkpoints.pins import Pins

logger = logging.getLogger(__name__)

_ABANDONED_S: Final = 6 * 3600.0
_TOUCH_S: Final = 1.0
_MAX_NOTES: Final = 4096


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
        path = os.path.join(self._directory, "work", secrets.token_hex(8))
        with self._locked():
            self._make_room(nbytes)
            os.mkdir(path)
            self._reserved[path] = nbytes
        try:
            yield path
        finally:
            self._reserved.pop(path, None)
            shutil.rmtree(path, ignore_errors=True)

    def publish(self, path: str, digest: str) -> str:
        """Turn a workspace that holds the checkpoint with this digest into its entry; returns the entry's folder."""
        for name in os.listdir(path):
            if name not in (CONFIG_FILE, WEIGHTS_FILE):
                os.unlink(os.path.join(path, name))
            else:
                _flush(os.path.join(path, name))
        _flush(path)
        entry = self._entry(digest)
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
        entry = self._entry(digest)
        try:
            if digest in self._verified:
                os.stat(os.path.join(entry, WEIGHTS_FILE))
                if abs(time.time() - os.stat(entry).st_mtime) > _TOUCH_S:
                    os.utime(entry)
                return entry
            os.utime(entry)
            if _is_whole(entry, digest):
                self._verified.add(digest)
                return entry
        except FileNotFoundError:
            if not os.path.isdir(entry):
                self._verified.discard(digest)
                return None
        with self._locked():
            if _is_whole(entry, digest):  # another process has replaced it since
                return entry
            logger.error("Removing a damaged checkpoint from the cache: %s", digest)
            self._remove(entry)
        return None

    def pin(self, digest: str) -> bool:
        """Keep the entry until it is unpinned; False when there is none, and nothing to unpin."""
        if not os.path.isdir(self._entry(digest)):
            return False
        self._pins.pin(digest)
        if self.use(digest) is None:
            self._pins.unpin(digest)
            return False
        return True

    def unpin(self, digest: str) -> None:
        self._pins.unpin(digest)

    def holds(self, directory: str) -> bool:
        """Whether this is the folder of an entry."""
        return os.path.dirname(directory) == os.path.join(self._directory, "content")

    def note(self, name: str, text: str) -> None:
        """Store a small text under a name; it survives restarts."""
        path = self._note_path(name)
        temporary = f"{path}.{secrets.token_hex(4)}"
        with self._locked():
            notes = sorted(os.scandir(os.path.dirname(path)), key=lambda note: note.stat().st_mtime)
            for note in notes[: max(0, len(notes) - _MAX_NOTES)]:
                os.unlink(note.path)
            with open(temporary, "x", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, path)

    def noted(self, name: str) -> str | None:
        with suppress(FileNotFoundError), open(self._note_path(name), encoding="utf-8") as file:
            return file.read()
        return None

    def _note_path(self, name: str) -> str:
        return os.path.join(self._directory, "names", f"{hashlib.sha256(name.encode()).hexdigest()}.json")

    def _entry(self, digest: str) -> str:
        return os.path.join(self._directory, "content", digest)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        for name in ("content", "work", "names"):
            os.makedirs(os.path.join(self._directory, name), exist_ok=True)
        with self._mutex, open(os.path.join(self._directory, "lock"), "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _make_room(self, nbytes: int) -> None:
        if nbytes > self._budget_bytes:
            raise CacheFull
        now = time.time()
        entries = sorted(_entries(os.path.join(self._directory, "content")), key=lambda entry: entry.used_at)
        work = list(_entries(os.path.join(self._directory, "work")))
        for abandoned in [one for one in work if now - one.used_at > _ABANDONED_S and one.path not in self._reserved]:
            shutil.rmtree(abandoned.path, ignore_errors=True)
            work.remove(abandoned)
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


def _is_whole(entry: str, digest: str) -> bool:
    """Whether the entry holds the content with this digest."""
    hashes = []
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        try:
            with open(os.path.join(entry, name), "rb") as file:
                hashes.append(hashlib.file_digest(file, "sha256").digest())
        except FileNotFoundError:
            return False
    return combined_digest(*hashes) == digest


def _flush(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
