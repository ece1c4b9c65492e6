"""Prepares the images of one request from their URLs, on its own threads. The deployment runs this."""

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

from serve_app.images.data_url import ImageFile, is_data_url, parse_data_url
from serve_app.images.decode import ImageRefused, decode
from serve_app.images.fetch import Fetcher
from serve_app.images.prepared import ImageOrder, PreparedImage, PreparedImages, Refusal
from serve_app.images.processor import ModelProcessor
from serve_app.images.recorder import ImageRecorder, NoImageRecorder


class Preprocessor:
    """Decodes, resizes and tiles as each model's own processor does. `close` it.

    Recently prepared images come from a cache, because a conversation sends its images with every turn.
    """

    def __init__(
        self,
        *,
        threads: int,
        cache_bytes: int,
        fetcher: Fetcher | None = None,
        recorder: ImageRecorder | None = None,
    ) -> None:
        """`cache_bytes`: the size of the cache of prepared images."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="image")
        self._fetcher = fetcher or Fetcher()
        self._recorder: ImageRecorder = recorder or NoImageRecorder()
        self._processors: dict[tuple[str, str | None], ModelProcessor] = {}
        self._loading = threading.Lock()
        self._cache = _Cache(cache_bytes)

    async def prepare(self, order: ImageOrder) -> PreparedImages:
        """All images of the order, each prepared or refused. Raises `ConfigRefused` if the model takes no images."""
        loop = asyncio.get_running_loop()
        processor = await loop.run_in_executor(self._pool, self._processor, order.source, order.revision)
        images: list[PreparedImage | Refusal] = []
        left = order.total_bytes
        for url in order.urls:  # one after the other: a request holds one image that is not prepared at a time
            image = await self._image(url, order, processor) if left >= 0 else Refusal("comes after too many others")
            if isinstance(image, PreparedImage):
                left -= image.num_bytes
                if left < 0:
                    used = order.total_bytes - left
                    image = Refusal(f"makes the images of this request {used} bytes, more than {order.total_bytes}")
            if isinstance(image, Refusal):
                self._recorder.refused()
            images.append(image)
        return PreparedImages(processor.frame, tuple(images))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _image(self, url: str, order: ImageOrder, processor: ModelProcessor) -> PreparedImage | Refusal:
        run = asyncio.get_running_loop().run_in_executor
        try:
            if is_data_url(url):
                return await run(self._pool, self._from_data_url, url, order, processor)
            if not order.fetch:
                raise ImageRefused('must be a data URL, "data:image/png;base64,…"; this model does not fetch images')
            began_at = time.monotonic()
            file = await self._fetcher.fetch(url, order.limits.bytes)
            self._recorder.fetched(time.monotonic() - began_at)
            return await run(self._pool, self._from_file, file, order, processor)
        except ImageRefused as exc:
            return Refusal(str(exc))

    def _from_data_url(self, url: str, order: ImageOrder, processor: ModelProcessor) -> PreparedImage:
        return self._from_file(parse_data_url(url, order.limits.bytes), order, processor)

    def _from_file(self, file: ImageFile, order: ImageOrder, processor: ModelProcessor) -> PreparedImage:
        key = (order.source, order.revision, file.media_type, blake2b(file.content).digest())
        found = self._cache.get(key)
        if found is not None:
            self._recorder.reused()
            return found
        began_at = time.monotonic()
        found = processor.prepare(decode(file.content, order.limits, file.media_type))
        self._recorder.prepared(time.monotonic() - began_at)
        self._cache.put(key, found)
        return found

    def _processor(self, source: str, revision: str | None) -> ModelProcessor:
        """The model's processor, loaded once; other calls wait for it."""
        with self._loading:
            found = self._processors.get((source, revision))
            if found is None:
                found = self._processors[source, revision] = ModelProcessor(source, revision)
            return found


class _Cache:
    """A cache of the most recently used prepared images, bounded in bytes. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._images: OrderedDict[Sequence[object], PreparedImage] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Sequence[object]) -> PreparedImage | None:
        with self._lock:
            found = self._images.get(key)
            if found is not None:
                self._images.move_to_end(key)
            return found

    def put(self, key: Sequence[object], image: PreparedImage) -> None:
        if image.num_bytes > self._max_bytes:
            return
        with self._lock:
            if key not in self._images:
                self._images[key] = image
                self._num_bytes += image.num_bytes
            while self._num_bytes > self._max_bytes:
                _, dropped = self._images.popitem(last=False)
                self._num_bytes -= dropped.num_bytes
