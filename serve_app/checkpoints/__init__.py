"""Checkpoints: LoRA adapters that training runs save for sampling, found, verified and kept by their content.

    store.py        CheckpointStore: the way in
    local.py        roots on a file system        remote.py      roots behind fsspec
    content.py      one folder: complete, whose, which digest      metadata.py    checkpoint.json
    archive.py tar.py   a checkpoint as a tar file                 disk_cache.py  local copies, bounded
    listing.py      which there are               report.py      errors, with whose checkpoint it is
    root_folder.py  opening files below a root    filesystem.py  fsspec

Errors are those of `serve_app.errors`: `CheckpointError` and below, and `InvalidRequest` for a link out of its root.
"""

from serve_app.checkpoints.checkpoint import Checkpoint
from serve_app.checkpoints.listing import Listing
from serve_app.checkpoints.store import CheckpointStore, StoreCounters

__all__ = ["Checkpoint", "CheckpointStore", "Listing", "StoreCounters"]
