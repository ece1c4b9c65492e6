"""An admitted request: its caller, its lease on the key's limits, and its record."""

from dataclasses import dataclass, field

from serve_app.access.auth import Caller
from serve_app.access.limits import Lease
from serve_app.api.ignored_fields import IgnoredFields
from serve_app.api.record import RequestRecord


@dataclass(slots=True)
class Ticket:
    """What a request carries through the service besides its body. `body_bytes`: length of the body as received."""

    caller: Caller
    lease: Lease
    record: RequestRecord
    body_bytes: int = 0
    image_bytes: int = 0
    ignored_fields: IgnoredFields = field(default_factory=IgnoredFields)

    def hold_images(self, num_bytes: int) -> None:
        """Hold `num_bytes` of prepared images besides the body, as `Lease.hold` does."""
        self.image_bytes = num_bytes
        self.hold(0)

    def hold(self, reply_bytes: int) -> None:
        """Hold `reply_bytes` for the reply besides body and images, as `Lease.hold` does."""
        self.lease.hold(self.body_bytes + self.image_bytes + reply_bytes)

    def reserve(self, num_prompt: int, asked: int | None, most: int) -> None:
        """As `Lease.reserve`, before the engine gets the prompt. A client that disconnects before the first token is
        charged for the prompt.
        """
        self.lease.reserve(num_prompt, asked, most)
        self.record.prompt_tokens = num_prompt

    def refund(self) -> None:
        """Charge nothing: the caller got no token."""
        self.lease.settle(0)
        self.record.prompt_tokens = 0

    def settle(self) -> None:
        """Charge what was used, as recorded. Once, at the end."""
        self.lease.settle(self.record.prompt_tokens + self.record.completion_tokens)
