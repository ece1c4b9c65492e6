"""For engine loops that are driven without adapters."""

from engines.interface.errors import AdapterError
from engines.interface.protocol import Adapter


class NoAdapters:
    """Implements `engines.loop.Adapters` and `engines.planning.scheduler.Slots`."""

    is_loading = False

    def want(self, adapter: Adapter, tenant: str) -> None: ...
    def unwant(self, adapter: Adapter) -> None: ...
    def poll(self) -> dict[Adapter, AdapterError]:
        return {}

    def ready(self, adapter: Adapter) -> bool:
        return True

    def pin(self, adapter: Adapter) -> int | None:
        return 0

    def unpin(self, slot: int) -> None: ...
