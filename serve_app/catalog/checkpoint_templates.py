"""Renderers with the chat templates of checkpoints: each is built once and cached.

Building one can take seconds of a thread, even if the template is refused in the end. So refusals are cached too.
"""

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from renderers.base import Renderer, TemplateRefused
from serve_app.base.errors import CheckpointRefused
from serve_app.base.single_flight import SingleFlight
from serve_app.catalog.served_model import ServedModel

RENDER_US = 500_000
"""The most time that such a template may take to render a conversation (`renderers/templates/bounds.py`)."""

_REMEMBERED = 64
_BUILDERS = 2

# Not by the checkpoint's digest: two checkpoints of equal weights may differ in their templates.
_Key = tuple[str, str]
_Built = Renderer | str  # or why there is none


class OwnTemplates:
    """Owned by one event loop. Its threads end once nothing refers to it."""

    def __init__(self) -> None:
        executor = ThreadPoolExecutor(_BUILDERS, thread_name_prefix="chat-template")
        self._building = SingleFlight[_Key, _Built](executor)
        self._mutex = threading.Lock()
        self._known: OrderedDict[_Key, _Built] = OrderedDict()

    async def renderer(self, model: ServedModel, template: str) -> Renderer:
        """A renderer of the model's family with this template. Raises `CheckpointRefused`."""
        key = (model.id, template)
        built = self._remembered(key)
        if built is None:
            built = await self._building.run(key, lambda: self._build(key, model))
        if isinstance(built, str):
            raise CheckpointRefused(f"chat_template.jinja of the checkpoint cannot be used: {built}")
        return built

    def _remembered(self, key: _Key) -> _Built | None:
        with self._mutex:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def _build(self, key: _Key, model: ServedModel) -> _Built:
        """Build it and cache it, in the thread: the request may have ended before the result is ready."""
        built: _Built
        try:
            built = model.renderer_with(key[1])
        except TemplateRefused as exc:
            built = str(exc)
        with self._mutex:
            self._known[key] = built
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return built
