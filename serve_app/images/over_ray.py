"""The client of the image preprocessing deployment, used by an ingress."""

import asyncio
import logging
from collections.abc import Callable

from ray import serve
from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from serve_app.base.errors import ConfigRefused, ImagesOverloaded, ImagesUnavailable
from serve_app.images.prepared import ImageOrder, PreparedImages

logger = logging.getLogger(__name__)

IMAGE_DEPLOYMENT = "preprocessor"
_LOST = (RayActorError, RequestCancelledError, TaskCancelledError)
_TRIES = 2


def _open_handle(app: str) -> DeploymentHandle:
    # Not checked: the application may be deployed after the ingress that names it.
    return serve.get_deployment_handle(IMAGE_DEPLOYMENT, app_name=app, _check_exists=False)


class RayImages:
    """`preparing.Images` over a handle of Serve. When a process is lost the call is retried: nothing was generated yet,
    and images can be prepared twice.
    """

    def __init__(
        self, app: str, *, timeout_s: float, open_handle: Callable[[str], DeploymentHandle] = _open_handle
    ) -> None:
        """`timeout_s`: for all images of a request, including the start of a process."""
        self._app = app
        self._timeout_s = timeout_s
        self._open_handle = open_handle
        self._handle: DeploymentHandle | None = None

    async def prepare(self, order: ImageOrder) -> PreparedImages:
        """Raises `ConfigRefused`, `ImagesUnavailable` or `ImagesOverloaded`."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._tried(order)
        except TimeoutError as exc:
            raise ImagesUnavailable(f"The images were not prepared within {self._timeout_s:g} s.") from exc

    async def _tried(self, order: ImageOrder) -> PreparedImages:
        for left in reversed(range(_TRIES)):
            try:
                return await self._once(order)
            except _LOST as exc:
                logger.warning("An image process was lost: %s", type(exc).__name__)
                if not left:
                    raise ImagesUnavailable("The processes that prepare images were lost.") from exc
        raise AssertionError

    async def _once(self, order: ImageOrder) -> PreparedImages:
        if self._handle is None:
            self._handle = self._open_handle(self._app).options(method_name="prepare")
        response = self._handle.remote(order)
        try:
            found: PreparedImages = await response
        except RayTaskError as exc:
            if isinstance(exc.cause, ConfigRefused | RayActorError):
                raise exc.cause from exc
            raise
        except BackPressureError as exc:
            raise ImagesOverloaded("Too many images are being prepared; try again.") from exc
        except DeploymentUnavailableError as exc:
            raise ImagesUnavailable(f"The image application {self._app!r} failed to deploy.") from exc
        except asyncio.CancelledError:
            # Not at once: Serve misses a call that was assigned to a process in this very turn of the loop.
            asyncio.get_running_loop().call_soon(response.cancel)
            raise
        return found
