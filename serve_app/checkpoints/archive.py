"""From a tar file on this machine to an entry of the disk cache."""

import os

from engines.lora.format.digest import CONFIG_FILE, MAX_CONFIG_BYTES, PICKLE_FILE, WEIGHTS_FILE
from serve_app.checkpoints.content import MARKER_FILE, Content, Reader, max_file_bytes, open_folder
from serve_app.checkpoints.disk_cache import DiskCache
from serve_app.checkpoints.metadata import METADATA_FILE, BadField, Metadata, NotJson, parse_metadata
from serve_app.checkpoints.report import Report
from serve_app.checkpoints.tar import (
    Archive,
    Member,
    TarRefused,
    TarTruncated,
    TarWrong,
    find_file,
    known_files,
    unpack,
)


def unpack_into(
    cache: DiskCache, descriptor: int, report: Report, *, max_bytes: int, is_young: bool
) -> tuple[Content, str]:
    """The content and the folder of its entry.

    Raises `OwnedIncomplete`, `OwnedRefused`, `CacheFull` or `OSError`.
    """
    archive = Archive.of(descriptor)
    try:
        members = known_files(archive)
        report.about = _about(archive, members.get(METADATA_FILE))
        _check(members, report, max_bytes, is_young=is_young)
        with cache.workspace(sum(member.size for member in members.values())) as workspace:
            unpack(archive, members, workspace)
            content = read_workspace(workspace, report, max_bytes=max_bytes, is_young=is_young, is_final=not is_young)
            return content, cache.publish(workspace, content.digest)
    except TarRefused as exc:
        report.about = _about(archive, find_file(archive, METADATA_FILE))
        raise report.refused(f"in its tar file, {exc}") from exc
    except TarWrong as exc:
        member = find_file(archive, METADATA_FILE)
        report.about = None if member is None else _about(archive, member)
        damaged = f"its tar file is damaged: {exc}"
        raise (report.incomplete(damaged) if is_young else report.refused(damaged)) from exc
    except TarTruncated as exc:
        report.about = _about(archive, find_file(archive, METADATA_FILE))
        raise report.incomplete(f"of its tar file, {exc}") from exc


def read_workspace(workspace: str, report: Report, *, max_bytes: int, is_young: bool, is_final: bool) -> Content:
    """Read a checkpoint from a workspace of the cache. Raises `OwnedIncomplete` or `OwnedRefused`."""
    with open_folder(os.path.dirname(workspace), (os.path.basename(workspace),)) as folder:
        assert folder is not None
        return Reader(folder, report, max_bytes, is_young, is_final).read()


def _about(archive: Archive, member: Member | None) -> Metadata | None:
    """What the checkpoint says about itself; None if that cannot be read. The errors in it are reported when the
    checkpoint is read.
    """
    if member is None:
        return Metadata()
    if member.size > MAX_CONFIG_BYTES:
        return None
    try:
        return parse_metadata(archive.read(member.size, member.offset))
    except (NotJson, BadField):
        return None


def _check(members: dict[str, Member], report: Report, max_bytes: int, *, is_young: bool) -> None:
    """Check the members before any is copied, and remove those that are never read."""
    members.pop(MARKER_FILE, None)
    pickle = members.pop(PICKLE_FILE, None)
    if pickle is not None and WEIGHTS_FILE not in members:
        raise report.refused(f"{PICKLE_FILE} is a pickle and is never read; save the adapter as {WEIGHTS_FILE}.")
    for name, member in members.items():
        limit = max_file_bytes(name, max_bytes)
        if limit is not None and member.size > limit:
            raise report.refused(f"{name} has {member.size} bytes; the limit is {limit}.")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if name not in members:
            message = f"{name} is not in its tar file."
            raise report.incomplete(message) if is_young else report.refused(message)
