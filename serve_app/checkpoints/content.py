"""One checkpoint's folder: whether it is complete, its metadata, and the digest of its content.

A checkpoint is complete when both files exist and the weights have the size that their header gives, or when the run
has written a marker file. An incomplete checkpoint may become complete; a complete one with errors is refused for good.
"""

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from engines.lora.format.digest import CONFIG_FILE, MAX_CONFIG_BYTES, PICKLE_FILE, WEIGHTS_FILE, combined_digest
from engines.lora.format.tensor_file import MAX_HEADER_BYTES, TensorFileError, TensorFileTruncated, header_extent
from serve_app.checkpoints.metadata import (
    METADATA_FILE,
    BadField,
    Metadata,
    NotJson,
    base_of,
    json_object,
    parse_metadata,
)
from serve_app.checkpoints.report import OwnedIncomplete, OwnedRefused, Report, Unfit
from serve_app.checkpoints.root_folder import open_below, open_in

TEMPLATE_FILE: Final = "chat_template.jinja"
MARKER_FILE: Final = "checkpoint_complete"
FILES: Final = (CONFIG_FILE, WEIGHTS_FILE, PICKLE_FILE, METADATA_FILE, TEMPLATE_FILE, MARKER_FILE)
_MAX_TEMPLATE_BYTES: Final = 1 << 17  # four times the longest template in use; kept in memory for every checkpoint
_HEAD_BYTES: Final = 1 << 16
_GLANCE_BYTES: Final = 1 << 18  # of a header that is parsed for a listing: some 2000 tensors

Fingerprint = tuple[str | tuple[int, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a complete checkpoint. `digest` as in `engines.interface.protocol.Adapter`."""

    digest: str
    base_model: str | None
    owner: str | None
    public: bool
    expires_at: datetime | None
    chat_template: str | None


@dataclass(frozen=True, slots=True)
class Folder:
    """The files of a checkpoint, held open. A read returns the content at the time of opening, or a change shows in the
    fingerprint.

    `path`: the folder's real path. `files`: open descriptors of the existing files, by name.
    """

    path: str
    files: Mapping[str, int]
    statuses: Mapping[str, os.stat_result]

    @property
    def fingerprint(self) -> Fingerprint:
        """Differs when any file was written, replaced, added or removed, as far as time stamps tell."""
        return (self.path, *(fingerprint(self.statuses[name]) if name in self.files else None for name in FILES))

    @property
    def changed_at(self) -> float:
        """The time of the last change of any file, in seconds since 1970 by the file system's clock."""
        return max((max(s.st_mtime, s.st_ctime) for s in self.statuses.values()), default=0.0)


def fingerprint(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def read_at(descriptor: int, count: int, offset: int = 0) -> bytes:
    """As `os.pread`, but short only at the end of the file."""
    pieces = []
    while count > 0 and (piece := os.pread(descriptor, count, offset)):
        pieces.append(piece)
        count, offset = count - len(piece), offset + len(piece)
    return b"".join(pieces)


@contextmanager
def open_folder(root: str, parts: tuple[str, ...]) -> Iterator[Folder | None]:
    """Open a checkpoint's folder; None when there is none. Files are opened, not only looked up: over NFS only opening
    fetches their current state. Raises `LeavesRoot` or `OSError`.
    """
    with open_below(root, parts) as found:
        if found is None or not stat.S_ISDIR(os.fstat(found[0]).st_mode):
            yield None
            return
        real = found[1]
        files = dict[str, int]()
        try:
            for name in FILES:
                descriptor = open_in(root, found[0], real, name)
                if descriptor is not None:
                    files[name] = descriptor
            statuses = {name: os.fstat(descriptor) for name, descriptor in files.items()}
            yield Folder(os.path.join(root, *real), files, statuses)
        finally:
            for descriptor in files.values():
                os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads one folder. `is_young`: it changed so recently that an apparent error may be a write in progress.
    `is_final`: no file will be added.
    """

    folder: Folder
    report: Report
    max_bytes: int
    is_young: bool
    is_final: bool = False
    _texts: dict[str, bytes] = field(default_factory=dict)

    def read(self) -> Content:
        """Raises `OwnedIncomplete` or `OwnedRefused`."""
        metadata = self.report.about = self._metadata()
        self._check_files()
        config = self._json_object(CONFIG_FILE)
        self._check_extent()
        hashes = {CONFIG_FILE: hashlib.sha256(self._text(CONFIG_FILE)).digest(), WEIGHTS_FILE: self._hash_weights()}
        self._check_hashes(metadata, hashes)
        return Content(
            combined_digest(hashes[CONFIG_FILE], hashes[WEIGHTS_FILE]),
            metadata.base_model or base_of(config),
            metadata.owner,
            metadata.public,
            metadata.expires_at,
            self._template(),
        )

    def at_a_glance(self) -> Unfit | None:
        """Raise what `read` would raise, as far as file sizes and first bytes show it."""
        try:
            self.report.about = self._metadata()
            self._check_files()
            self._json_object(CONFIG_FILE)
            self._check_extent(_GLANCE_BYTES)
        except (OwnedIncomplete, OwnedRefused) as exc:
            return exc
        return None

    def _check_files(self) -> None:
        present = self.folder.files
        if PICKLE_FILE in present and WEIGHTS_FILE not in present:
            raise self._refused(f"{PICKLE_FILE} is a pickle and is never read; save the adapter as {WEIGHTS_FILE}.")
        for name in present:
            self._check_file(name)
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if name not in present:
                raise self._incomplete(f"{name} is not there.")

    def _check_file(self, name: str) -> None:
        status, limit = self.folder.statuses[name], max_file_bytes(name, self.max_bytes)
        if not stat.S_ISREG(status.st_mode):
            raise self._refused(f"{name} is not a regular file.")
        if limit is not None and status.st_size > limit:
            raise self._refused(f"{name} has {status.st_size} bytes; the limit is {limit}.")

    def _json_object(self, name: str) -> Mapping[str, object]:
        try:
            return json_object(self._text(name))
        except NotJson as exc:
            raise self._wrong(f"{name} {exc}.") from exc

    def _metadata(self) -> Metadata:
        if METADATA_FILE not in self.folder.files:
            return Metadata()
        self.report.about = None  # an error from here on may be somebody's secret
        self._check_file(METADATA_FILE)
        try:
            return parse_metadata(self._text(METADATA_FILE))
        except NotJson as exc:
            raise self._wrong(f"{METADATA_FILE} {exc}.") from exc
        except BadField as exc:
            raise self._refused(f"{METADATA_FILE}: {exc}") from exc

    def _check_extent(self, max_header_bytes: int = MAX_HEADER_BYTES + 8) -> None:
        """Check the size against the header. Of a longer header only the length is checked."""
        size = self.folder.statuses[WEIGHTS_FILE].st_size
        head = read_at(self.folder.files[WEIGHTS_FILE], _HEAD_BYTES)
        try:
            try:
                extent = header_extent(head)
            except TensorFileTruncated as exc:
                if exc.needed > size:
                    raise
                if exc.needed > max_header_bytes:
                    return
                extent = header_extent(read_at(self.folder.files[WEIGHTS_FILE], exc.needed))
        except TensorFileTruncated as exc:
            raise self._incomplete(f"{WEIGHTS_FILE} has {size} bytes, and its header alone {exc.needed}.") from exc
        except TensorFileError as exc:
            raise self._wrong(f"{WEIGHTS_FILE}: {exc}") from exc
        if extent != size:
            raise self._incomplete(f"{WEIGHTS_FILE} has {size} bytes, and its header describes {extent}.")

    def _hash_weights(self) -> bytes:
        with open(os.dup(self.folder.files[WEIGHTS_FILE]), "rb", buffering=0) as file:
            file.seek(0)
            return hashlib.file_digest(file, "sha256").digest()

    def _check_hashes(self, metadata: Metadata, hashes: Mapping[str, bytes]) -> None:
        for name, expected in metadata.sha256.items():
            if name not in FILES or name in (METADATA_FILE, PICKLE_FILE, MARKER_FILE):  # the last two are never read
                continue
            if name not in self.folder.files:
                raise self._incomplete(f"{name} is not there, and {METADATA_FILE} lists it.")
            found = hashes.get(name) or hashlib.sha256(self._text(name)).digest()
            if found.hex() != expected:
                raise self._wrong(f"the SHA-256 of {name} is {found.hex()}, and {METADATA_FILE} says {expected}.")

    def _template(self) -> str | None:
        if TEMPLATE_FILE not in self.folder.files:
            return None
        try:
            return self._text(TEMPLATE_FILE).decode("utf-8")
        except UnicodeDecodeError as exc:
            raise self._wrong(f"{TEMPLATE_FILE} is not UTF-8.") from exc

    def _text(self, name: str) -> bytes:
        """Once: what is parsed is what is hashed."""
        if name not in self._texts:
            self._texts[name] = read_at(self.folder.files[name], MAX_CONFIG_BYTES)
        return self._texts[name]

    def _wrong(self, message: str) -> Unfit:
        return self._incomplete(message) if self.is_young else self._refused(message)

    def _incomplete(self, message: str) -> Unfit:
        if self.is_final or MARKER_FILE in self.folder.files:
            return self._refused(message)
        return self.report.incomplete(message)

    def _refused(self, message: str) -> OwnedRefused:
        return self.report.refused(message)


def max_file_bytes(name: str, max_weights_bytes: int) -> int | None:
    """The size limit in bytes of one of `FILES`; None for files that are never read."""
    if name in (PICKLE_FILE, MARKER_FILE):
        return None
    limits = {WEIGHTS_FILE: max_weights_bytes, TEMPLATE_FILE: _MAX_TEMPLATE_BYTES}
    return limits.get(name, MAX_CONFIG_BYTES)
