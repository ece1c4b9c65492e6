"""The Serve deployment that prepares images, on CPUs and in its own processes."""

import logging
import time
from collections.abc import Callable

from serve_app.base.logs import join_serve_logs, log_request
from serve_app.base.without_torch import do_without_torch
from serve_app.config.images import ImageArgs
from serve_app.images.prepared import ImageOrder, PreparedImages, Refusal
from serve_app.images.recorder import ImageRecorder

logger = logging.getLogger(__name__)


class ImagePreprocessor:
    """The deployment. Serve constructs it and lets its requests finish before it stops it. It keeps no state that a
    retry needs.
    """

    def __init__(self, args: ImageArgs, open_recorder: Callable[[], ImageRecorder]) -> None:
        do_without_torch()
        # Imported here, so that the process that builds the application does not load transformers.
        from serve_app.images.fetch import Fetcher
        from serve_app.images.preprocessor import Preprocessor

        join_serve_logs()
        fetcher = Fetcher(timeout_s=args.fetch_timeout_s)
        self._preprocessor = Preprocessor(
            threads=args.threads, cache_bytes=args.cache_bytes, fetcher=fetcher, recorder=open_recorder()
        )

    async def prepare(self, order: ImageOrder) -> PreparedImages:
        log_request(order.request_id)
        began_at = time.monotonic()
        prepared = await self._preprocessor.prepare(order)
        refused = sum(isinstance(image, Refusal) for image in prepared.images)
        took_ms = round(1000 * (time.monotonic() - began_at))
        logger.info("%d images in %d ms, %d refused", len(prepared.images), took_ms, refused)
        return prepared

    def check_health(self) -> None:
        """Serve calls this every few seconds."""
        join_serve_logs()

    def reconfigure(self, user_config: object) -> None:
        """Serve calls this with what makes a build differ from the last (`app.py`). Nothing here depends on it."""

    def __del__(self) -> None:
        self._preprocessor.close()
