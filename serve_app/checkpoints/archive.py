"""From a tar file on this machine to an entry of the disk cache."""

import os

from engines.lora.digest import CONFIG_FILE, PICKLE_FILE, WEIGHTS_FILE
from serve_app.checkpoints.content import MARKER_FILE, Content, Reader, incomplete, max_file_bytes, open_folder, refused
from serve_app.checkpoints.disk_cache import DiskCache
from serve_app.checkpoints.tar import Member, TarRefused, TarTruncated, TarWrong, known_files, unpack


def unpack_into(
    cache: DiskCache, descriptor: int, label: str, *, max_bytes: int, is_young: bool
) -> tuple[Content, str]:
    """The content and the folder of its entry.

    Raises `CheckpointIncomplete`, `CheckpointRefused`, `CacheFull` or `OSError`.
    """
    try:
        members = known_files(descriptor)
        _check(members, label, max_bytes, is_young=is_young)
        with cache.workspace(sum(member.size for member in members.values())) as workspace:
            unpack(descriptor, members, workspace)
            content = read_workspace(workspace, label, max_bytes=max_bytes, is_young=is_young, is_final=not is_young)
            return content, cache.publish(workspace, content.digest)
    except TarRefused as exc:
        raise refused(label, f"in its tar file, {exc}") from exc
    except TarWrong as exc:
        raise (incomplete if is_young else refused)(label, f"its tar file is damaged: {exc}") from exc
    except TarTruncated as exc:
        raise incomplete(label, f"of its tar file, {exc}") from exc


def read_workspace(workspace: str, label: str, *, max_bytes: int, is_young: bool, is_final: bool) -> Content:
    """What was put into a workspace of the cache. Raises `CheckpointIncomplete` or `CheckpointRefused`."""
    with open_folder(os.path.dirname(workspace), (os.path.basename(workspace),)) as folder:
        assert folder is not None
        return Reader(folder, label, max_bytes, is_young, is_final).read()


def _check(members: dict[str, Member], label: str, max_bytes: int, *, is_young: bool) -> None:
    """Before anything is copied. Takes out of the members what is never read."""
    members.pop(MARKER_FILE, None)
    pickle = members.pop(PICKLE_FILE, None)
    if pickle is not None and WEIGHTS_FILE not in members:
        raise refused(label, f"{PICKLE_FILE} is a pickle and is never read; save the adapter as {WEIGHTS_FILE}.")
    for name, member in members.items():
        limit = max_file_bytes(name, max_bytes)
        if limit is not None and member.size > limit:
            raise refused(label, f"{name} has {member.size} bytes; the limit is {limit}.")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if name not in members:
            raise (incomplete if is_young else refused)(label, f"{name} is not in its tar file.")
