"""What holds for all tests."""

import gc
import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    # Before Triton is imported: without a device its kernels run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish() -> None:
    """The modules of a thousand tests, torch and transformers are a million objects that never go away: each full
    collection would look at them all, for half a second.
    """
    gc.collect()
    gc.freeze()
