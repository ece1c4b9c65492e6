"""What the HTTP application is built around: the settings in force, and the parts that outlive them."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.access.auth import Keyring
from serve_app.access.capacity import Capacity
from serve_app.access.limits import Limiter
from serve_app.api.record import NullRecorder, Recorder
from serve_app.catalog.catalog import Catalog, Checkpoints
from serve_app.catalog.served_model import ServedModel, load_model
from serve_app.config.service import (
    CheckpointsConfig,
    ImagesConfig,
    LimitsConfig,
    ModelConfig,
    ServiceConfig,
    parse_config,
)
from serve_app.errors import ConfigRefused
from serve_app.images.preparing import Images
from serve_app.replicas.generation import Replicas
from serve_app.workers import Workers

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0
MAX_REQUESTS = 4096


@dataclass(frozen=True, slots=True)
class Settings:
    """One configuration, taken over as a whole. A request keeps those that it started with."""

    limits: LimitsConfig
    catalog: Catalog
    keyring: Keyring
    images: Images | None = None


class Service:
    """Owns the settings in force and what all requests share. `close` it."""

    def __init__(
        self,
        replicas: Replicas,
        open_checkpoints: Callable[[CheckpointsConfig], Checkpoints],
        *,
        open_images: Callable[[ImagesConfig], Images] | None = None,
        recorder: Recorder | None = None,
        keep_alive_s: float = KEEP_ALIVE_S,
        max_requests: int = MAX_REQUESTS,
    ) -> None:
        """`open_checkpoints` is called in a thread; what it opens is the service's to close. `keep_alive_s`: a stream
        that is silent for this long gets a comment. `max_requests`: how many run at a time.
        """
        self.replicas = replicas
        self.recorder: Recorder = recorder or NullRecorder()
        self.keep_alive_s = keep_alive_s
        self.limiter = Limiter()
        self.capacity = Capacity(max_requests)
        self.workers = Workers()
        self.config_error: str | None = "There is no configuration: the deployment has no user_config."
        self._open_checkpoints = open_checkpoints
        self._open_images = open_images
        self._config: ServiceConfig | None = None
        self._checkpoints: Checkpoints | None = None
        self._retired: list[Checkpoints] = []
        self._changing = asyncio.Lock()
        limits = LimitsConfig()
        self.settings = Settings(limits, Catalog({}, None), Keyring((), limits))

    async def reconfigure(self, raw: object) -> None:
        """Take a configuration over, or keep the last good one and say why. Never raises: in Ray that would take down
        an ingress that serves by the last good one. Models that did not change are not loaded again; requests under
        way finish as they began.
        """
        async with self._changing:
            try:
                await self._take_over(parse_config(raw))
            except ConfigRefused as exc:
                self._note(str(exc))
            except Exception as exc:  # a tokenizer or template can fail in ways of its own
                logger.exception("The configuration cannot be taken over.")
                self._note(f"The configuration cannot be taken over: {type(exc).__name__}.")
            else:
                self._note(None)

    def require_configuration(self) -> None:
        """Raises `ConfigRefused` with the reason as long as none was ever taken over."""
        if self._config is None:
            raise ConfigRefused(self.config_error)

    def close(self) -> None:
        self.workers.close()
        for checkpoints in (*self._retired, self._checkpoints):
            if checkpoints is not None:
                checkpoints.close()

    async def _take_over(self, config: ServiceConfig) -> None:
        keyring = await asyncio.to_thread(Keyring, config.keys, config.limits)
        loaded = list(self.settings.catalog.models.values())
        models = [await self._model(model, loaded) for model in config.models]
        checkpoints = self._checkpoints
        if self._config is None or self._config.checkpoints != config.checkpoints:
            # In a thread: a root's package may take seconds to import.
            checkpoints = await asyncio.to_thread(self._open_checkpoints, config.checkpoints)
        before = self.settings.limits
        catalog = Catalog({model.id: model for model in models}, checkpoints)
        self.settings = Settings(config.limits, catalog, keyring, self._images(config))
        if self._checkpoints is not None and self._checkpoints is not checkpoints:
            self._retire(self._checkpoints, before)
        self._config, self._checkpoints = config, checkpoints

    def _retire(self, checkpoints: Checkpoints, limits: LimitsConfig) -> None:
        """Close it once no request can be left of those that began with it: a body, and then the whole request."""

        def close() -> None:
            self._retired.remove(checkpoints)
            checkpoints.close()

        self._retired.append(checkpoints)
        asyncio.get_running_loop().call_later(limits.body_timeout_s + limits.total_timeout_s, close)

    def _images(self, config: ServiceConfig) -> Images | None:
        if config.images is None or self._open_images is None:
            return None
        if self._config is not None and self._config.images == config.images:
            return self.settings.images
        return self._open_images(config.images)

    async def _model(self, config: ModelConfig, loaded: list[ServedModel]) -> ServedModel:
        same = next((model for model in loaded if model.config == config), None)
        return await asyncio.to_thread(load_model, config) if same is None else same

    def _note(self, error: str | None) -> None:
        self.config_error = error
        self.recorder.config_checked(error)
        if error is None:
            logger.info("Configuration taken over: %d models.", len(self.settings.catalog.models))
        else:
            logger.error("Configuration refused, the last good one stays if there is one: %s", error)
