"""The Serve deployment that prepares images: on CPUs, apart from the ingress and from the models."""

from serve_app.config.images import ImageArgs
from serve_app.images.prepared import ImageOrder, PreparedImages
from serve_app.logs import join_serve_logs


class ImagePreprocessor:
    """Serve constructs it and finishes its requests before it stops it. It keeps nothing that a retry would miss."""

    def __init__(self, args: ImageArgs) -> None:
        # Not at the top: whoever builds the application need not have transformers and torch in memory.
        from serve_app.images.fetch import Fetcher
        from serve_app.images.preprocessor import Preprocessor

        join_serve_logs()
        fetcher = Fetcher(timeout_s=args.fetch_timeout_s)
        self._preprocessor = Preprocessor(threads=args.threads, cache_bytes=args.cache_bytes, fetcher=fetcher)

    async def prepare(self, order: ImageOrder) -> PreparedImages:
        return await self._preprocessor.prepare(order)

    def __del__(self) -> None:
        self._preprocessor.close()
