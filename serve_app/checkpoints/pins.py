"""Which entries of the disk cache are in use, known to all processes that share its folder.

A process holds a shared lock on a small file for each entry that its requests use. Who removes an entry takes the lock
alone first. The system gives the locks of a dead process back.
"""

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Pins:
    """The pins of one process. Calls block on the disk. Thread-safe."""

    def __init__(self, directory: str) -> None:
        """`directory`: of the lock files; it is made when it is needed."""
        self._directory = directory
        self._mutex = threading.Lock()
        self._held: dict[str, tuple[int, int]] = {}  # descriptor and number of pins, by digest

    def pin(self, digest: str) -> None:
        """Each is given back by one `unpin`."""
        if self._pin_again(digest):
            return
        descriptor = self._open(digest, fcntl.LOCK_SH)  # may wait for who removes the entry
        if self._pin_again(digest, descriptor):
            os.close(descriptor)

    def _pin_again(self, digest: str, descriptor: int | None = None) -> bool:
        """Whether the process has the lock already; if not, it has it with `descriptor` from now on."""
        with self._mutex:
            held = self._held.get(digest)
            if held is not None:
                self._held[digest] = held[0], held[1] + 1
            elif descriptor is not None:
                self._held[digest] = descriptor, 1
            return held is not None

    def unpin(self, digest: str) -> None:
        with self._mutex:
            descriptor, number = self._held.pop(digest)
            if number > 1:
                self._held[digest] = descriptor, number - 1
            else:
                os.close(descriptor)

    @contextmanager
    def alone(self, digest: str) -> Iterator[bool]:
        """Whether nobody uses the entry; while the context lasts, nobody begins to."""
        try:
            descriptor = self._open(digest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            with suppress(FileNotFoundError):
                os.unlink(self._path(digest))
            os.close(descriptor)

    def _open(self, digest: str, lock: int) -> int:
        """Open and lock the file. One that was removed meanwhile locks nothing, so another is opened."""
        os.makedirs(self._directory, exist_ok=True)
        while True:
            descriptor = os.open(self._path(digest), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, lock)
                with suppress(FileNotFoundError):
                    if os.stat(self._path(digest)).st_ino == os.fstat(descriptor).st_ino:
                        return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _path(self, digest: str) -> str:
        return os.path.join(self._directory, digest)
