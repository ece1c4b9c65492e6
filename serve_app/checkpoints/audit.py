"""One line of the log for each checkpoint that is read or downloaded: for whom, what, from where, how long, and how it
ended. A replica writes a line of its own when it loads the adapter (`engines/lora/cache.py`).
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from serve_app.base.model_id import CheckpointPath

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Load:
    """`digest`: set once it is known."""

    digest: str = "unknown"


@contextmanager
def audited(who: str, path: CheckpointPath, source: str) -> Iterator[Load]:
    """`who`: the name of the key whose request came first; empty for the command line. `source`: the root."""
    load, began, result = Load(), time.monotonic(), "read"
    try:
        yield load
    except Exception as exc:
        result = f"{type(exc).__name__}: {exc}"
        raise
    finally:
        seconds = time.monotonic() - began
        logger.info(
            "checkpoint_read key=%s path=%s digest=%s from=%s seconds=%.3f result=%s",
            who, path, load.digest, source, seconds, result,
        )  # fmt: skip
