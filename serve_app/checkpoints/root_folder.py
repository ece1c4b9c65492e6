"""Opens files below a root folder. A link can never lead outside the root.

Every part of a path is opened relative to its parent folder, and never through a link. Links are read and followed
here, part by part. So no concurrent change of the tree can make this code open a file outside the root.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_MAX_LINKS = 40  # as Linux
# Not blocking: opening a FIFO would wait for a writer without end.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ENXIO})  # ENXIO: a socket


class LeavesRoot(Exception):
    """A link on the way leads out of the root, or in circles."""


@contextmanager
def open_below(root: str, parts: Sequence[str]) -> Iterator[tuple[int, tuple[str, ...]] | None]:
    """A descriptor of the file at `parts` below `root`, and its real parts with links resolved; None if it does not
    exist.

    Raises `LeavesRoot`, or `OSError` when a part cannot be opened.
    """
    try:
        descriptor, real = _walk(root, parts)
    except OSError as exc:
        if exc.errno not in _NOT_THERE:
            raise
        yield None
        return
    try:
        yield descriptor, real
    finally:
        os.close(descriptor)


def open_in(root: str, folder: int, real: Sequence[str], name: str) -> int | None:
    """A descriptor of `name` in a folder that `open_below` has opened, by one call unless it is a link. To be closed by
    the caller.
    """
    try:
        return os.open(name, _FLAGS, dir_fd=folder)
    except OSError as exc:
        if exc.errno in _NOT_THERE:
            return None
        if exc.errno != errno.ELOOP:
            raise
    with open_below(root, (*real, name)) as found:
        return None if found is None else os.dup(found[0])


def _walk(root: str, parts: Sequence[str]) -> tuple[int, tuple[str, ...]]:
    descriptors = [os.open(root, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)]
    real: list[str] = []
    pending, links = list(reversed(parts)), 0
    try:
        while pending:
            part = pending.pop()
            if part == "..":
                if not real:
                    raise LeavesRoot
                real.pop()
                os.close(descriptors.pop())
            elif part not in ("", "."):
                target = _enter(part, descriptors, real)
                if target is not None:
                    links += 1
                    if links > _MAX_LINKS:
                        raise LeavesRoot
                    pending.extend(reversed(_relative(root, target, descriptors, real)))
        return descriptors.pop(), tuple(real)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _enter(part: str, descriptors: list[int], real: list[str]) -> str | None:
    """Open the part below the last descriptor, or return where it points when it is a link."""
    try:
        descriptors.append(os.open(part, _FLAGS, dir_fd=descriptors[-1]))
    except OSError as exc:
        if exc.errno != errno.ELOOP:
            raise
        return os.readlink(part, dir_fd=descriptors[-1])
    real.append(part)
    return None


def _relative(root: str, target: str, descriptors: list[int], real: list[str]) -> list[str]:
    """The link's target as parts from where the walk is; an absolute one takes the walk back to the root."""
    if not target.startswith("/"):
        return target.split("/")
    for base in (os.path.abspath(root), os.path.realpath(root)):
        if target == base or target.startswith(base.rstrip("/") + "/"):
            while real:
                real.pop()
                os.close(descriptors.pop())
            return target.removeprefix(base).split("/")
    raise LeavesRoot
