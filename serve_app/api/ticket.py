"""A request that was admitted: whose it is, what it has leased, what is recorded of it."""

from dataclasses import dataclass

from serve_app.access.auth import Caller
from serve_app.access.limits import Lease
from serve_app.api.record import RequestRecord

JsonObject = dict[str, object]


@dataclass(slots=True)
class Ticket:
    """What a request carries through the service beside its body. `body_bytes`: length of the body as it came."""

    caller: Caller
    lease: Lease
    record: RequestRecord
    body_bytes: int
    ignored_fields: tuple[str, ...] = ()

    def charge_prompt(self, num_tokens: int) -> None:
        """Count the prompt before the engine gets it: who hangs up before the first token has used it all the same."""
        self.record.prompt_tokens = num_tokens
        self.lease.charge(num_tokens)

    def give_prompt_back(self) -> None:
        """Nothing was run."""
        self.lease.charge(-self.record.prompt_tokens)
        self.record.prompt_tokens = 0
