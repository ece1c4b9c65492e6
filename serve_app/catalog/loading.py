"""Loads the models of the catalogue in threads: a few at a time, those first that requests wait for.

A model takes a second and more, most of it for its tokenizer. An ingress serves as soon as one model is loaded.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from serve_app.base.errors import ConfigRefused, NoReplica
from serve_app.catalog.served_model import ServedModel, load_model
from serve_app.config.catalog_entry import ModelConfig
from serve_app.config.checking.refusal import Refusal

logger = logging.getLogger(__name__)

LOADING = "its tokenizer is still being loaded"
_THREADS = 8
_THREADS_UNASKED = 2  # loading holds the interpreter most of the time, and requests to other models need it

Load = Callable[[ModelConfig, ServedModel | None], ServedModel]
Outcome = ServedModel | Refusal | None
"""None: the model is no longer wanted."""


class Loading:
    """One model that is being loaded. `config` may change in fields that loading does not depend on."""

    def __init__(self, config: ModelConfig, before: ServedModel | None, wait_s: float, ask: Callable[[], None]) -> None:
        """`before`: its last version. `wait_s`: the longest wait. `ask` is called once a request waits."""
        self.config = config
        self.before = before
        self.is_asked = False
        self.began_at: float | None = None  # when a thread took it
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._wait_s = wait_s
        self._ask = ask

    async def wait(self) -> ServedModel | None:
        """The model; None if it cannot be loaded. Raises `NoReplica` once its thread has taken too long: what hangs is
        not waited for again and again.
        """
        self.is_asked = True
        self._ask()
        since = time.monotonic() if self.began_at is None else self.began_at
        await asyncio.wait([self.outcome], timeout=max(0.0, since + self._wait_s - time.monotonic()))
        if not self.outcome.done():
            raise NoReplica(LOADING)
        found = self.outcome.result()
        return found if isinstance(found, ServedModel) else None

    def drop(self) -> None:
        """It is no longer wanted. A thread that has it goes on, for the requests that wait."""
        if self.began_at is None:
            self.outcome.set_result(None)


Entry = ServedModel | Loading


class Models:
    """The models of the current configuration, loaded or being loaded. Owned by an event loop; `close` it."""

    def __init__(self, changed: Callable[[], None], *, wait_s: float, load: Load = load_model) -> None:
        """`changed` is called when a load has ended. `wait_s`: the longest wait of a request for one."""
        self._changed = changed
        self._wait_s = wait_s
        self._load = load
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="load-model")
        self._ids: list[str] = []
        self._loaded: dict[str, ServedModel] = {}
        self._loading: dict[str, Loading] = {}
        self._num_running = 0

    @property
    def entries(self) -> Mapping[str, Entry]:
        """In the order of the configuration. A model that is loaded again has its last version until then, and keeps
        it if loading fails.
        """
        known: dict[str, Entry] = {**self._loading, **self._loaded}
        return {model_id: known[model_id] for model_id in self._ids if model_id in known}

    def take_over(self, configs: Iterable[ModelConfig]) -> list[Loading]:
        """These are the models from now on. Returns those that have to be loaded."""
        loaded, under_way = self._loaded, self._loading
        self._ids, self._loaded, self._loading = [], {}, {}
        for config in configs:
            self._ids.append(config.id)
            before = loaded.get(config.id)
            now = before and before.under(config)
            if before is not None:
                self._loaded[config.id] = now or before
            if now is None:
                self._loading[config.id] = self._loading_of(config, before, under_way.get(config.id))
        for loading in under_way.values():
            if loading not in self._loading.values():
                loading.drop()
        self._start()
        return list(self._loading.values())

    def close(self) -> None:
        """Close; does not wait for running loads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _loading_of(self, config: ModelConfig, before: ServedModel | None, under_way: Loading | None) -> Loading:
        if under_way is None or under_way.config.loaded_by != config.loaded_by:
            return Loading(config, before, self._wait_s, self._start)
        under_way.config = config
        return under_way

    def _start(self) -> None:
        while (loading := self._next()) is not None:
            loading.began_at = time.monotonic()
            self._num_running += 1
            call = asyncio.get_running_loop().run_in_executor(
                self._threads, self._attempt, loading.config, loading.before
            )
            call.add_done_callback(partial(self._land, loading))

    def _next(self) -> Loading | None:
        """The load that a thread takes now."""
        waiting = [loading for loading in self._loading.values() if loading.began_at is None]
        asked = [loading for loading in waiting if loading.is_asked]
        if asked and self._num_running < _THREADS:
            return asked[0]
        return waiting[0] if waiting and self._num_running < _THREADS_UNASKED else None

    def _land(self, loading: Loading, done: "asyncio.Future[ServedModel | Refusal]") -> None:
        self._num_running -= 1
        if done.cancelled():
            return
        found, model_id = done.result(), loading.config.id
        if isinstance(found, ServedModel):
            found = found.under(loading.config) or found
        if self._loading.get(model_id) is loading:
            del self._loading[model_id]
            if isinstance(found, ServedModel):
                self._loaded[model_id] = found
        loading.outcome.set_result(found)
        self._start()
        self._changed()

    def _attempt(self, config: ModelConfig, before: ServedModel | None) -> ServedModel | Refusal:
        try:
            return self._load(config, before)
        except ConfigRefused as exc:
            return Refusal("models", str(exc))
        except BaseException as exc:  # tokenizers and templates can raise any exception, and tokenizers panic
            logger.exception("The model %r cannot be loaded.", config.id)
            return Refusal("models", f"The model {config.id!r} cannot be loaded: {type(exc).__name__}.")
