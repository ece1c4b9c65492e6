"""An admitted request: its caller, its lease on the key's limits, and its record."""

from dataclasses import dataclass, field
from typing import Final

from serve_app.access.auth import Caller
from serve_app.access.budgets import Budgets
from serve_app.access.limits import Lease
from serve_app.api.bodies.ignored_fields import IgnoredFields
from serve_app.api.record import RequestRecord
from serve_app.base.errors import BudgetExceeded
from serve_app.config.price import Price, Tokens
from serve_app.ledger.money import to_pico
from serve_app.ledger.spend import Spend

_MARGIN_S: Final = 60.0


@dataclass(slots=True)
class Ticket:
    """What a request carries through the service besides its body. `longest_s`: how long it can run. `body_bytes`:
    length of the body as received.
    """

    caller: Caller
    lease: Lease
    record: RequestRecord
    budgets: Budgets
    longest_s: float
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

    async def reserve(self, num_prompt: int, asked: int | None, most: int, *, most_prompt: int | None = None) -> None:
        """As `Lease.reserve`, and of the key's budget, before the engine gets the prompt. A client that disconnects
        before the first token is charged for the prompt. `most_prompt`: what the budget holds for a prompt whose length
        is a guess. The record has the price. Raises `BudgetExceeded` too.
        """
        record = self.record
        self.lease.reserve(num_prompt, asked, most)
        record.prompt_tokens = num_prompt
        if not self.caller.budget:
            return
        dearest = _dearest(record.price, num_prompt if most_prompt is None else most_prompt, most)
        try:
            is_held = await self.budgets.hold(self.caller, record.id, dearest, lives_s=self.longest_s + _MARGIN_S)
        except BudgetExceeded:
            self.lease.give_back()
            raise
        record.is_held |= is_held

    def refund(self) -> None:
        """Charge nothing: the caller got no token."""
        self.lease.settle(0)
        record = self.record
        record.prompt_tokens = record.image_tokens = record.cached_tokens = 0
        record.completion_tokens = record.reasoning_tokens = 0

    def settle(self) -> None:
        """Charge what was used, as recorded. Once, at the end."""
        self.lease.settle(self.record.prompt_tokens + self.record.completion_tokens)


def _dearest(price: Price | None, num_prompt: int, most: int) -> Spend:
    """What a request costs whose reply is as long as it may be."""
    if price is None:
        return Spend(0, num_prompt + most)
    num_cached = num_prompt if price.of_cached > price.prompt else 0
    return Spend(to_pico(price.cost(Tokens(num_prompt, num_cached, most))), num_prompt + most)
