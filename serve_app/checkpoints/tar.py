"""A checkpoint as one uncompressed tar file. This parser reads the few known files and nothing else.

No file is ever written under a name from the archive. Links, devices, absolute paths and paths with `..` are refused
anywhere in it. So is everything that a plain archive does not need: sparse files, very long extended headers. The
end-of-archive block is required: an archive without it is still being written.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Final, Self

from serve_app.checkpoints.content import FILES, read_at

_BLOCK: Final = 512
_MAX_MEMBERS: Final = 10_000
_MAX_EXTENDED_BYTES: Final = 1 << 16
_COPY_BYTES: Final = 1 << 22
_FILE_TYPES: Final = (b"0", b"\0", b"7")
_REFUSED_TYPES: Final = {
    b"1": "a link", b"2": "a link", b"3": "a device", b"4": "a device", b"6": "a FIFO", b"S": "a sparse file",
}  # fmt: skip


class TarRefused(Exception):
    """The archive has a member that is not allowed; the message is a sentence."""


class TarWrong(Exception):
    """The bytes are not a tar archive; the message is a sentence."""


class TarTruncated(Exception):
    """The archive ends too early; the message is a sentence."""


@dataclass(frozen=True, slots=True)
class Member:
    """A regular file in the archive; `offset` in bytes from its start."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Archive:
    """The bytes of an archive, wherever they lie. `read` returns `count` bytes at an offset, fewer only at the end."""

    size: int
    read: Callable[[int, int], bytes]

    @classmethod
    def of(cls, descriptor: int) -> Self:
        """An open file on this machine."""
        return cls(os.fstat(descriptor).st_size, partial(read_at, descriptor))


def known_files(archive: Archive) -> dict[str, Member]:
    """The checkpoint's files by name. They lie at the top of the archive, or in its only folder.

    Walks the whole archive. Raises `TarRefused`, `TarWrong` or `TarTruncated`.
    """
    found: dict[str, dict[str, Member]] = {}
    for member in _members(archive):
        path = PurePosixPath(member.name)
        if path.name in FILES and len(path.parts) <= 2:
            folder = found.setdefault(str(path.parent), {})
            if path.name in folder:
                raise TarRefused(f"it holds {path.name} twice.")
            folder[path.name] = member
    if len(found) > 1:
        raise TarRefused("it holds checkpoint files in more than one folder.")
    return next(iter(found.values()), {})


def find_file(archive: Archive, name: str) -> Member | None:
    """The first file of this name in an archive that is not in order, as far as its headers can be followed."""
    with suppress(TarRefused, TarWrong, TarTruncated):
        for member, _ in _entries(archive):
            if PurePosixPath(member.name).name == name:
                return member
    return None


def unpack(archive: Archive, members: Mapping[str, Member], directory: str) -> None:
    """Write members into `directory`, each under its key."""
    for name, member in members.items():
        with open(os.path.join(directory, name), "xb") as file:
            position = 0
            while position < member.size:
                piece = archive.read(min(_COPY_BYTES, member.size - position), member.offset + position)
                if not piece:
                    raise TarTruncated(f"it ends inside {name}.")
                file.write(piece)
                position += len(piece)


def _members(archive: Archive) -> Iterator[Member]:
    """Regular files, after checking every entry up to the end-of-archive block."""
    for member, kind in _entries(archive):
        _check(member.name, kind)
        if kind in _FILE_TYPES and not member.name.endswith("/"):
            yield member


def _entries(archive: Archive) -> Iterator[tuple[Member, bytes]]:
    """Every entry with its type, up to the end-of-archive block."""
    total, position, extended = archive.size, 0, dict[str, str]()
    for _ in range(_MAX_MEMBERS):
        header = archive.read(_BLOCK, position)
        if len(header) < _BLOCK:
            raise TarTruncated(f"it ends after {total} bytes, without an end-of-archive block.")
        if not any(header):
            return
        name, kind, size = _parse(header, extended)
        start = position + _BLOCK
        position = start + -(-size // _BLOCK) * _BLOCK
        if position > total:
            raise TarTruncated(f"it has {total} bytes, and {name!r:.100} alone ends at {position}.")
        if kind in (b"x", b"g", b"L"):
            extended |= _extended(archive, start, size, kind)
            continue
        extended = {}
        yield Member(name, start, size), kind
    raise TarRefused(f"it has more than {_MAX_MEMBERS} members.")


def _parse(header: bytes, extended: Mapping[str, str]) -> tuple[str, bytes, int]:
    blank = header[:148] + b" " * 8 + header[156:]
    if _number(header[148:156]) not in (sum(blank), sum(byte - 256 * (byte > 127) for byte in blank)):
        raise TarWrong("a header has a wrong checksum.")
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    full = b"/".join(part for part in (prefix, name) if part).decode("utf-8", "surrogateescape")
    kind = header[156:157]
    size = 0 if kind == b"5" else _number(header[124:136])
    if kind in (b"x", b"g", b"L"):
        return full, kind, size
    if "size" in extended:
        try:
            size = int(extended["size"][:20])
        except ValueError as exc:
            raise TarWrong("an extended header has a size that is no number.") from exc
    if size < 0:
        raise TarWrong(f"the size of {full!r:.100} is negative.")
    return extended.get("path", full), kind, size


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # base 256, for sizes from 8 GiB
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError as exc:
        raise TarWrong("a header has a number that is not octal.") from exc


def _extended(archive: Archive, start: int, size: int, kind: bytes) -> dict[str, str]:
    """The path and size that an extended header gives to the member after it."""
    if size > _MAX_EXTENDED_BYTES:
        raise TarRefused(f"an extended header has {size} bytes; the limit is {_MAX_EXTENDED_BYTES}.")
    text = archive.read(size, start)
    if kind == b"L":
        return {"path": text.partition(b"\0")[0].decode("utf-8", "surrogateescape")}
    records = dict(_records(text))
    if any(key.startswith("GNU.sparse") for key in records):
        raise TarRefused("it holds a sparse file.")
    if kind == b"g" and records.keys() & {"path", "size", "linkpath"}:
        raise TarRefused("a global header names files.")
    return {key: records[key] for key in ("path", "size") if key in records}


def _records(text: bytes) -> Iterator[tuple[str, str]]:
    while text.strip(b"\0"):
        length, _, rest = text.partition(b" ")
        count = int(length) if length.isdigit() and len(length) < 6 else 0
        record = rest[: count - len(length) - 1]
        key, equals, value = record.removesuffix(b"\n").partition(b"=")
        if count <= len(length) + 1 or count > len(text) or not equals or not record.endswith(b"\n"):
            raise TarWrong("an extended header is malformed.")
        yield key.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape")
        text = text[count:]


def _check(name: str, kind: bytes) -> None:
    if kind in _REFUSED_TYPES:
        raise TarRefused(f"{name!r:.100} is {_REFUSED_TYPES[kind]}.")
    if kind not in (*_FILE_TYPES, b"5"):
        raise TarRefused(f"{name!r:.100} has the unknown type {kind!r}.")
    if name.startswith("/") or ".." in name.split("/") or "\0" in name or not name:
        raise TarRefused(f"{name!r:.100} leads out of the archive.")
