"""The state of the HTTP application: the current settings, and the parts that outlive them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TypeVar

from serve_app.access.auth import Keyring
from serve_app.access.budgets import Budgets
from serve_app.access.capacity import Capacity
from serve_app.access.key_reader import KeyReader
from serve_app.access.limits import Limiter
from serve_app.access.sharing.shared_limits import Exchange, SharedLimits
from serve_app.api.record import NullRecorder, Recorder, RequestRecord
from serve_app.api.usage import usage_of
from serve_app.base.errors import ConfigRefused
from serve_app.base.workers import Workers
from serve_app.catalog.catalog import Catalog, Checkpoints
from serve_app.catalog.loading import Load, Models
from serve_app.catalog.served_model import load_model
from serve_app.config.checking.refusal import Refusal
from serve_app.config.ledger import LedgerConfig
from serve_app.config.marketplace import MarketplaceConfig
from serve_app.config.service import CheckpointsConfig, ImagesConfig, LimitsConfig, ServiceConfig, read_config
from serve_app.images.preparing import Images
from serve_app.ledger.ledger import Ledger
from serve_app.marketplace.slugs import Marketplace
from serve_app.replicas.generation import Replicas

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0
MAX_REQUESTS = 4096
LOADING_TIMEOUT_S = 10.0
_KEY_FILES_TIMEOUT_S = 5.0
_END_S = 5.0

_C = TypeVar("_C")
_T = TypeVar("_T")
_NO_CONFIGURATION = Refusal("", "The deployment has no user_config.")


@dataclass(frozen=True, slots=True)
class Settings:
    """The current settings. A request keeps the settings that it started with."""

    limits: LimitsConfig
    catalog: Catalog
    keyring: Keyring
    marketplace: Marketplace = field(default_factory=Marketplace)
    images: Images | None = None


class Service:
    """Owns the current settings and the state that all requests share. `close` it."""

    def __init__(
        self,
        replicas: Replicas,
        open_checkpoints: Callable[[CheckpointsConfig], Checkpoints],
        *,
        open_images: Callable[[ImagesConfig], Images] | None = None,
        open_ledger: Callable[[LedgerConfig], Ledger] = Ledger.of,
        recorder: Recorder | None = None,
        read_metrics: Callable[[], Awaitable[bytes]] | None = None,
        keep_alive_s: float = KEEP_ALIVE_S,
        max_requests: int = MAX_REQUESTS,
        loading_timeout_s: float = LOADING_TIMEOUT_S,
        load: Load = load_model,
        exchange: Exchange | None = None,
    ) -> None:
        """`open_checkpoints`, `open_ledger` and `load` are called in a thread; the service closes what they open.
        `read_metrics`: of the whole service, in Prometheus' text format. `keep_alive_s`: a stream without output for
        this long gets a comment. `max_requests`: how many run at a time. `loading_timeout_s`: the longest wait of a
        request for a model that is being loaded. `exchange`: with the board of the limits, None for the only ingress.
        """
        self.replicas = replicas
        self.recorder: Recorder = recorder or NullRecorder()
        self.read_metrics = read_metrics
        self.keep_alive_s = keep_alive_s
        self.limiter = Limiter()
        self.shared_limits = SharedLimits(self.limiter, exchange)
        self.shared_limits.start()
        self.budgets = Budgets()
        self.ledger: Ledger | None = None
        self.capacity = Capacity(max_requests)
        self.workers = Workers()
        self.refusals: tuple[Refusal, ...] = (_NO_CONFIGURATION,)
        self.served = asyncio.Event()  # there has been a key, and a model or slug
        self._open_checkpoints = open_checkpoints
        self._open_images = open_images
        self._images_config: ImagesConfig | None = None
        self._open_ledger = open_ledger
        self._ledger_config: LedgerConfig | None = None
        self._key_reader = KeyReader()
        self._wanted: ServiceConfig | None = None
        self._number = 0
        self._access_changing = asyncio.Lock()
        self._catalog_changing = asyncio.Lock()
        self._models = Models(self._serve, wait_s=loading_timeout_s, load=load)
        self._checkpoints: Checkpoints | None = None
        self._checkpoints_config: CheckpointsConfig | None = None
        self._retired: list[Checkpoints] = []
        limits = LimitsConfig()
        self._longest_request_s = _longest_request_s(limits)  # of requests that may use the current store
        self.settings = Settings(limits, Catalog({}, None), Keyring({}, limits))

    async def reconfigure(self, raw: object) -> None:
        """Apply the valid parts of a configuration. Log the errors of the other parts, which keep their previous
        values. Keys and limits apply at once, while other parts are still being loaded, and each model once it is
        loaded. Running requests finish with their old settings. Returns when everything is loaded. Never raises: Ray
        would stop an ingress that serves.
        """
        reading = read_config(raw, self._wanted)
        self._number += 1
        number, self._wanted = self._number, reading.config
        refusals = list(reading.refusals)
        async with self._access_changing:
            refusals += await self._take_over_access(reading.config)
        async with self._catalog_changing:
            if number != self._number:
                return  # the newer configuration loads its own parts
            refusals += await self._take_over_ledger(reading.config.ledger)
            refusals += await self._take_over_checkpoints(reading.config.checkpoints)
            refusals += await self._take_over_images(reading.config.images)
            refusals += await self._take_over_marketplace(reading.config.marketplace)
            loading = self._models.take_over(reading.config.models)
            self._serve()
            self._note(refusals)
        for one in loading:
            outcome = await one.outcome
            if isinstance(outcome, Refusal) and number == self._number:
                self._note([outcome], before=self.refusals)
        if number == self._number:
            self._log_settings()

    @property
    def config_error(self) -> str | None:
        """The errors of the last configuration, one sentence per line."""
        return "\n".join(map(str, self.refusals)) or None

    def require_configuration(self) -> None:
        """Raises `ConfigRefused` with the reason until there has been a key, and a model or slug."""
        if not self.served.is_set():
            raise ConfigRefused(self.config_error or str(_NO_CONFIGURATION))

    def book(self, record: RequestRecord) -> None:
        """Enter a request that ends into the ledger. One that a limit refused was not run, and is left out: a key could
        fill the disk with them.
        """
        if self.ledger is not None and (record.status != HTTPStatus.TOO_MANY_REQUESTS or record.is_held):
            self.ledger.append(usage_of(record, datetime.now(UTC)))
        number = 0 if self.ledger is None else self.ledger.num_appended
        self.budgets.ended(record.key_name, record.id, record.spend, number)

    async def close(self) -> None:
        """End the requests that still run, so that the ledger has their records before it closes."""
        await self.capacity.end_all(_END_S)
        await self.shared_limits.close()
        await self.settings.marketplace.close()
        if self.ledger is not None:
            self.ledger.close()
        self.workers.close()
        self._models.close()
        self._key_reader.close()
        for checkpoints in (*self._retired, self._checkpoints):
            if checkpoints is not None:
                checkpoints.close()

    async def _take_over_access(self, config: ServiceConfig) -> list[Refusal]:
        keyring, refusals = await self._key_reader.read(config.keys, config.limits)
        self.settings = replace(self.settings, limits=config.limits, keyring=keyring)
        self._longest_request_s = max(self._longest_request_s, _longest_request_s(config.limits))
        return refusals

    async def _take_over_ledger(self, config: LedgerConfig | None) -> list[Refusal]:
        if config == self._ledger_config:
            return []
        opened = None if config is None else await _attempt("ledger", "The ledger", self._open_ledger, config)
        if isinstance(opened, Refusal):
            return [opened]
        before, self.ledger, self._ledger_config = self.ledger, opened, config
        self.budgets.replace_books(opened)
        if before is not None:
            await asyncio.to_thread(before.close)
        return []

    async def _take_over_checkpoints(self, config: CheckpointsConfig) -> list[Refusal]:
        if config == self._checkpoints_config:
            return []
        checkpoints = await _attempt("checkpoints", "The store of checkpoints", self._open_checkpoints, config)
        if isinstance(checkpoints, Refusal):
            return [checkpoints]
        before, self._checkpoints, self._checkpoints_config = self._checkpoints, checkpoints, config
        self._serve()
        if before is not None:
            self._retire(before, self._longest_request_s)
        self._longest_request_s = _longest_request_s(self.settings.limits)
        return []

    async def _take_over_images(self, config: ImagesConfig | None) -> list[Refusal]:
        if config == self._images_config:
            return []
        images = None
        if config is not None and self._open_images is not None:
            opened = await _attempt("images", "What prepares images", self._open_images, config)
            if isinstance(opened, Refusal):
                return [opened]
            images = opened
        self._images_config = config
        self.settings = replace(self.settings, images=images)
        return []

    async def _take_over_marketplace(self, config: MarketplaceConfig) -> list[Refusal]:
        """Replies under way finish, also those of endpoints that are gone."""
        before = self.settings.marketplace
        try:
            opening = asyncio.to_thread(Marketplace.of, config, before)
            marketplace = await asyncio.wait_for(opening, _KEY_FILES_TIMEOUT_S)
        except TimeoutError:
            seconds = f"{_KEY_FILES_TIMEOUT_S:g} s"
            return [Refusal("marketplace", f"The key files of the marketplace were not read within {seconds}.")]
        self.settings = replace(self.settings, marketplace=marketplace)
        await before.close(marketplace)
        return list(marketplace.refusals)

    def _serve(self) -> None:
        """Serve the models as they are now: loaded, or being loaded."""
        catalog, entries = self.settings.catalog, self._models.entries
        if list(entries.values()) != list(catalog.entries.values()) or catalog.checkpoints is not self._checkpoints:
            self.settings = replace(self.settings, catalog=Catalog(entries, self._checkpoints))
        if (self.settings.catalog.models or self.settings.marketplace.slugs) and len(self.settings.keyring):
            self.served.set()

    def _retire(self, checkpoints: Checkpoints, longest_request_s: float) -> None:
        """Close the store once no request that began with it can be running."""

        def close() -> None:
            self._retired.remove(checkpoints)
            checkpoints.close()

        self._retired.append(checkpoints)
        asyncio.get_running_loop().call_later(longest_request_s, close)

    def _note(self, refusals: Iterable[Refusal], before: tuple[Refusal, ...] = ()) -> None:
        """Refusals of the last configuration, beside those of `before`."""
        self.refusals = (*before, *refusals)
        self.recorder.config_checked(self.refusals)
        for refusal in self.refusals[len(before) :]:
            logger.error("Configuration: refused: %s", refusal)

    def _log_settings(self) -> None:
        logger.info(
            "Configuration: %d models, %d slugs and %d keys are served.",
            len(self.settings.catalog.models),
            len(self.settings.marketplace.slugs),
            len(self.settings.keyring),
        )


def _longest_request_s(limits: LimitsConfig) -> float:
    """The longest time for a body and then for the whole request."""
    return limits.body_timeout_s + limits.total_timeout_s


async def _attempt(section: str, what: str, load: Callable[[_C], _T], config: _C) -> _T | Refusal:
    """Load something in a thread, because a tokenizer or the package of a root takes seconds. Returns the reason if it
    fails.
    """
    try:
        return await asyncio.to_thread(load, config)
    except ConfigRefused as exc:
        return Refusal(section, str(exc))
    except Exception as exc:  # tokenizers and templates can raise any exception
        logger.exception("%s cannot be loaded.", what)
        return Refusal(section, f"{what} cannot be loaded: {type(exc).__name__}.")
