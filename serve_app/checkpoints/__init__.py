"""Checkpoints: LoRA adapters that training runs save for sampling, found, verified and kept by their content.

    checkpoint.py   Checkpoint: what a path has now, and whose it is
    store.py        CheckpointStore: the entry to this package
    local.py        roots on a file system        remote.py      roots behind fsspec
    content.py      one folder: whether it is complete, its owner, its digest
    metadata.py     checkpoint.json
    archive.py      a checkpoint as a tar file    tar.py         reading tar files
    disk_cache.py   local copies, bounded
    listing.py      which checkpoints there are
    report.py       errors, with the checkpoint that they are about
    root_folder.py  opening files below a root    filesystem.py  fsspec

Errors are those of `serve_app.errors`: `CheckpointError` and below, and `InvalidRequest` for a link out of its root.
"""

from serve_app.checkpoints.checkpoint import Checkpoint
from serve_app.checkpoints.listing import Listing
from serve_app.checkpoints.store import CheckpointStore, StoreCounters

__all__ = ["Checkpoint", "CheckpointStore", "Listing", "StoreCounters"]
