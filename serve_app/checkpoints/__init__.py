"""Checkpoints: LoRA adapters that training runs save for sampling. This package finds, verifies and caches them by
their content.

- `store.py`: `CheckpointStore`, the interface of the package.
- `local.py`: roots on a file system; `remote.py`: roots that fsspec reaches.
- `checkpoint.py`: a verified checkpoint; `content.py`: one folder, its completeness and digest.
- `metadata.py`: checkpoint.json; `archive.py`, `tar.py`: a checkpoint as a tar file.
- `disk_cache.py`, `pins.py`: local copies, bounded; `listing.py`: searches a root; `pages.py`: pages of what was found.
- `audit.py`: a line of the log for each checkpoint that is read.
- `notes.py`: what is kept on disk about files that were read.
- `report.py`: errors with the checkpoint's owner.
- `root_threads.py`: the threads of one root, and what happens to a root that hangs.
- `root_folder.py`: opens files below a root; `filesystem.py`: fsspec.

Errors are those of `serve_app.base.errors`: `CheckpointError` and its subclasses, and `InvalidRequest` for a link that
leaves its root.
"""

from serve_app.checkpoints.checkpoint import Checkpoint
from serve_app.checkpoints.pages import Listing
from serve_app.checkpoints.store import CheckpointStore, StoreCounters

__all__ = ["Checkpoint", "CheckpointStore", "Listing", "StoreCounters"]
